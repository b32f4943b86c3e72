"""The share of each tenant in each tier, guaranteed and allowed, as given to the tiers' policies."""

from __future__ import annotations

from collections.abc import Sequence

from kvstored.clients.tenants import Tenant, TenantDirectory
from kvstored.store.blocks import Residency
from kvstored.store.policies import Policy, Share


class TenantShares:
    """The shares of all tenants. `policies` has the policies of all tiers."""

    def __init__(self, tenants: TenantDirectory, residency: Residency, policies: Sequence[Policy]) -> None:
        self._tenants = tenants
        self._residency = residency
        self._policies = policies

    def set_all(self) -> None:
        """Set the shares of all tenants with limits, at the start: recovered blocks are protected before a client of
        the tenant connects. After a change of the list, set them for all tenants that have a share too.
        """
        shares = {number for policy in self._policies for number in policy.shares}
        for tenant in self._tenants.all():
            limits = tenant.limits
            is_limited = limits.host_min_bytes or limits.host_max_bytes or limits.nvme_max_bytes
            number = self._residency.tenant(tenant.index_name) if is_limited or shares else -1
            if is_limited or number in shares:
                self.set(tenant, number)

    def set(self, tenant: Tenant, tenant_id: int) -> None:
        limits = tenant.limits
        shares = {
            self._residency.mapped: Share(limits.host_min_bytes, limits.host_max_bytes or None),
            self._residency.durable: Share(0, limits.nvme_max_bytes or None),
        }
        for policy in self._policies:
            if policy.tier in shares:
                policy.set_share(tenant_id, shares[policy.tier])
