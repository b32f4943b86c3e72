"""Tenant shares configure each tenant's blocks: the share of each tier, which the tiers' policies hold, and how long
new blocks are kept.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvstore_proto.terms import NO_TERMS, Terms
from kvstored.clients.tenants import Tenant, TenantDirectory
from kvstored.config import TenantSection
from kvstored.store.blocks import Residency
from kvstored.store.policies import EvictionPolicy, Share
from kvstored.store.retention import Retention


class TenantShares:
    """A component that applies tenants' settings: it gives each policy in `policies` (one for each tier) the tenants'
    shares of that tier, and gives `retention` the default terms (time to live, priority) of tenants' new blocks."""

    def __init__(
        self, tenants: TenantDirectory, residency: Residency, policies: Sequence[EvictionPolicy], retention: Retention
    ) -> None:
        self._tenants = tenants
        self._residency = residency
        self._policies = policies
        self._retention = retention

    def set_all(self) -> None:
        """Set the shares and terms of all tenants that have limits. At the start this protects recovered blocks before
        a client of the tenant connects. After a change of the configured tenants it also resets tenants that lost their
        limits.
        """
        shares = {number for policy in self._policies for number in policy.shares} | self._retention.defaults.keys()
        for tenant in self._tenants.all():
            limits = tenant.limits
            is_special = limits.host_min_bytes or limits.host_max_bytes or limits.nvme_max_bytes or _terms(limits)
            number = self._residency.tenant(tenant.index_name) if is_special or shares else -1
            if is_special or number in shares:
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
        self._retention.defaults.pop(tenant_id, None)
        if (terms := _terms(limits)) is not None:
            self._retention.defaults[tenant_id] = terms


def _terms(limits: TenantSection) -> Terms | None:
    """Return the terms of a tenant's new blocks, which a put may override; None when the tenant has none."""
    terms = Terms(limits.ttl_s or None, limits.priority or None)
    return None if terms == NO_TERMS else terms
