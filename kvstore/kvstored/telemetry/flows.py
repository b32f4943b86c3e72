"""What went through each tier and to each tenant: blocks served, promoted, demoted, evicted, and missed, by cause."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass

from kvstored.lifecycle import Cause


@dataclass(slots=True)
class TierFlow:
    hits: int = 0
    promoted_blocks: int = 0
    demoted_blocks: int = 0
    evicted_blocks: int = 0
    expired_blocks: int = 0


@dataclass(slots=True)
class TenantFlow:
    """`hit_blocks` were handed out under leases; `missed_blocks` were asked for, by lookup or acquire, in vain."""

    lookups: int = 0
    hit_blocks: int = 0
    missed_blocks: int = 0


class Flows:
    """One `TierFlow` a tier, by its position in the residency index; one `TenantFlow` a tenant, by its number."""

    def __init__(self, tiers: int) -> None:
        self.tiers = [TierFlow() for _ in range(tiers)]
        self.tenants: defaultdict[int, TenantFlow] = defaultdict(TenantFlow)
        self.misses: Counter[Cause] = Counter()

    def hit(self, tier: int, blocks: int) -> None:
        if blocks and tier < len(self.tiers):
            self.tiers[tier].hits += blocks

    def missed(self, tenant: int, cause: Cause, blocks: int) -> None:
        """A chain broke off: the first block is missing for `cause`, and those behind it go with it."""
        self.misses[cause] += blocks
        self.tenants[tenant].missed_blocks += blocks
