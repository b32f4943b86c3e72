"""What went through each tier and to each tenant: blocks served, promoted, demoted, evicted, and missed, by cause."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass

from kvstored.lifecycle import Cause
from kvstored.telemetry.caller import Caller

MAX_ACCOUNTS = 1024  # of a tenant; clients make their names up, and those beyond count under their tenant alone


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
    """One `TierFlow` a tier, by its position in the residency index; one `TenantFlow` a tenant, by its number, and one
    for each of its accounts, by tenant and name."""

    def __init__(self, tiers: int) -> None:
        self.tiers = [TierFlow() for _ in range(tiers)]
        self.tenants: defaultdict[int, TenantFlow] = defaultdict(TenantFlow)
        self.accounts: defaultdict[int, dict[str, TenantFlow]] = defaultdict(dict)
        self.misses: Counter[Cause] = Counter()

    def hit(self, tier: int, blocks: int) -> None:
        if blocks and tier < len(self.tiers):
            self.tiers[tier].hits += blocks

    def looked_up(self, caller: Caller) -> None:
        self.tenants[caller.tenant_id].lookups += 1
        account = self._account(caller)
        if account is not None:
            account.lookups += 1

    def found(self, caller: Caller, blocks: int) -> None:
        """Blocks were handed out under a lease."""
        self.tenants[caller.tenant_id].hit_blocks += blocks
        account = self._account(caller)
        if account is not None:
            account.hit_blocks += blocks

    def missed(self, caller: Caller, cause: Cause, blocks: int) -> None:
        """A chain broke off: the first block is missing for `cause`, and those behind it go with it."""
        self.misses[cause] += blocks
        self.tenants[caller.tenant_id].missed_blocks += blocks
        account = self._account(caller)
        if account is not None:
            account.missed_blocks += blocks

    def misses_by_name(self) -> dict[str, int]:
        """Blocks missed since the start, by the cause's name as `kvctl explain` shows it."""
        return {cause.name.lower(): blocks for cause, blocks in self.misses.items()}

    def _account(self, caller: Caller) -> TenantFlow | None:
        if not caller.account:
            return None
        accounts = self.accounts[caller.tenant_id]
        flow = accounts.get(caller.account)
        if flow is None and len(accounts) < MAX_ACCOUNTS:
            flow = accounts[caller.account] = TenantFlow()
        return flow
