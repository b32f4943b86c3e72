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
    """A component that gives the policies each tenant's share of a tier, and gives `retention` the default terms of
    tenants' new blocks. It also notes which tenants allow lossy copies. `policies` has one policy for each tier.
    """

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
        shares |= self._residency.exactness.tenants
        self._retention.pins.forget_shares()
        for tenant in self._tenants.all():
            limits = tenant.limits
            payer = self._payer(limits)
            is_special = limits.shares or payer.shares or _terms(limits) or limits.lossy or self._charged_to(payer.name)
            number = self._residency.tenant(tenant.index_name) if is_special or shares else -1
            if is_special or number in shares:
                self.set(tenant, number)

    def set(self, tenant: Tenant, tenant_id: int) -> None:
        limits, lossy = tenant.limits, self._residency.exactness.tenants
        payer = self._payer(limits)
        charged = self._charged_to(payer.name)
        mapped = self._residency.tiers[self._residency.mapped]
        self._retention.pins.set_share(tenant_id, limits.share(mapped).min_bytes, charged)
        for policy in self._policies:
            tier = self._residency.tiers[policy.tier]
            share, most_bytes = limits.share(tier), payer.share(tier).max_bytes or None
            policy.set_share(tenant_id, Share(share.min_bytes, most_bytes, share.weight, charged if most_bytes else ()))
        (lossy.add if limits.lossy else lossy.discard)(tenant_id)
        self._retention.defaults.pop(tenant_id, None)
        if (terms := _terms(limits)) is not None:
            self._retention.defaults[tenant_id] = terms

    def _payer(self, limits: TenantSection) -> TenantSection:
        """Return the limits against which a tenant's blocks count: its own, or a shared pool's publisher's."""
        return (self._tenants.section(limits.publisher) or limits) if limits.is_pool else limits

    def _charged_to(self, name: str) -> tuple[int, ...]:
        """Return the numbers of the tenant `name` and of the shared pools that it publishes; none without a pool."""
        pools = {section.name for section in self._tenants.listed if section.publisher == name}
        if not pools:
            return ()
        charged = [each for each in self._tenants.all() if each.name == name or each.name in pools]
        return tuple(self._residency.tenant(each.index_name) for each in charged)


def _terms(limits: TenantSection) -> Terms | None:
    """Return the terms of a tenant's new blocks, which a put may override; None when the tenant has none."""
    terms = Terms(limits.ttl_s or None, limits.priority or None)
    return None if terms == NO_TERMS else terms
