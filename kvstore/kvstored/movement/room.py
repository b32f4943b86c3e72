"""Making room in a tier: allocate, and while that fails, let the policy's victims go.

Owns the step from "which block" (policy) to "its bytes are free": dropping a copy that another tier has, demoting the
last copy, or forgetting the block. Memory that a client may map belongs to one tenant and one slot size an arena; when
the victim lies in an arena of another kind, its whole arena is reclaimed, because single free slots there are no use.

Invariants: never evicts a pinned copy, never leaves a hole in a chain, never frees a slot that has readers (limbo
does).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from enum import Enum
from typing import Final, Protocol

from kvstore_tiers.base import Slot, Tier, TierState
from kvstored.clock import Clock
from kvstored.lifecycle import Cause
from kvstored.movement.cut_off import CutOff
from kvstored.policies import Policy
from kvstored.residency import Residency
from kvstored.telemetry import Counters, Flows

SLICE_EVICTIONS = 16  # between two looks at the loop: about 0.3 ms
MAX_EVICTIONS = 4096  # for one allocation


class Bypass(Enum):
    """Instead of a slot: the policy would rather keep what would have to go for it."""

    BYPASSED = "bypassed"


BYPASSED: Final = Bypass.BYPASSED


class Demoter(Protocol):
    """Whoever can give a block a copy further down."""

    def wants(self, row: int) -> bool:
        """Whether the block's last copy is worth a write, or has to be kept for its children's sake."""
        ...

    def write_back(self, row: int) -> Awaitable[bool]: ...

    async def progress(self) -> bool:
        """Wait until a write under way has ended; False when there is none. Blocks being written cannot leave."""
        ...


class NoDemotion:
    """Below the slowest tier there is nothing."""

    def wants(self, row: int) -> bool:
        return False

    async def write_back(self, row: int) -> bool:
        return False

    async def progress(self) -> bool:
        return False


class Room:
    """Room in `tier`, whose position in residency is `position`. `retire(slot, tenant)` takes slots that were left."""

    def __init__(
        self,
        tier: Tier,
        position: int,
        policy: Policy,
        residency: Residency,
        retire: Callable[[Slot, int], None],
        may_linger: Callable[[Slot, int], bool],
        clock: Clock,
        counters: Counters,
        flows: Flows,
        *,
        separates_owners: bool,
    ) -> None:
        self._tier = tier
        self._position = position
        self._policy = policy
        self._residency = residency
        self._retire = retire
        self._may_linger = may_linger
        self._clock = clock
        self._counters = counters
        self._flows = flows
        self._separates_owners = separates_owners
        self.demoter: Demoter = NoDemotion()
        self.cut_off: CutOff | None = None  # blocks that go before the policy is asked

    def allocate_now(self, nbytes: int, tenant: int) -> Slot | None:
        """A slot if one is free and the tenant is below its maximum; evicts nothing."""
        share = self._policy.shares.get(tenant)
        if share is not None and share.max_bytes is not None:
            used_bytes = self._residency.tenant_bytes(tenant, self._position)
            if used_bytes + nbytes > share.max_bytes:
                return None
        return self._tier.allocate(nbytes, self._owner(tenant))

    def announce(self, tenant: int, parent: int, keys: Sequence[bytes]) -> None:
        """Blocks `keys`, which continue row `parent`, are about to ask for room."""
        self._policy.arriving(tenant, parent, keys, self._clock.monotonic_ns())

    async def allocate(self, nbytes: int, tenant: int) -> Slot | None:
        """A slot, evicting for it what the policy names; None when nothing (more) may go."""
        slot = await self.allocate_for(None, nbytes, tenant)
        return None if slot is BYPASSED else slot

    async def allocate_for(
        self, newcomer: tuple[bytes, int] | None, nbytes: int, tenant: int, *, parent: int = -1
    ) -> Slot | Bypass | None:
        """As `allocate`, for the block of this key and depth: BYPASSED when the policy would rather keep its victim.

        Row `parent`, which the block continues, is not given up for it: the block could not be reached without it, and
        its client has just been told that it is there.
        """
        if self._tier.statistics().state not in (TierState.OK, TierState.FULL):
            return None  # it takes nothing, however much is evicted
        stuck = self._not_for(parent)
        for attempt in range(MAX_EVICTIONS):
            slot = self.allocate_now(nbytes, tenant)
            if slot is not None:
                return slot
            confined = self._confined(nbytes, tenant)
            row = self.cut_off.next(self._policy, stuck, confined) if self.cut_off is not None else -1
            if row < 0:
                now_ns = self._clock.monotonic_ns()
                row = self._policy.next_victim(now_ns, exclude=stuck, tenant=confined)
                if row >= 0 and newcomer is not None and self._policy.declines(tenant, *newcomer, row, now_ns):
                    return BYPASSED
            if row < 0:
                if not await self.demoter.progress():
                    return None
                # A write behind has ended: its block may leave now, and its arena be reclaimed.
                stuck = self._not_for(parent)
                continue
            if self._is_of_use(row, nbytes, tenant):
                if not await self.evict(row, Cause.EVICTED if confined is None else Cause.QUOTA):
                    stuck.add(row)
            elif not await self.vacate(self._residency.slot(row, self._position).container):
                stuck.add(row)
            if attempt % SLICE_EVICTIONS == SLICE_EVICTIONS - 1:
                await asyncio.sleep(0)
        return None

    def _not_for(self, parent: int) -> set[int]:
        """Rows that room must not be made of: `parent`, unless it has a copy further down, or will be given one."""
        only_here = parent >= 0 and self._residency.tier_mask(parent) == 1 << self._position
        return {parent} if only_here and not self.demoter.wants(parent) else set()

    async def evict(self, row: int, cause: Cause) -> bool:
        """Take the copy out of this tier. False when it must stay: leased, or the only one a chain hangs on."""
        residency, position = self._residency, self._position
        if not residency.may_leave(row, position) or not self._lingers(row):
            return False
        if residency.tier_mask(row) == 1 << position and self.demoter.wants(row):
            token = residency.token(row)
            written = await self.demoter.write_back(row)
            row = residency.current(token)
            if row < 0:
                return True
            if not residency.may_leave(row, position) or not self._lingers(row):
                return False
            if not written and not residency.may_forget(row):
                return False  # below is no room for it; a leaf is given up then, so that new blocks find room
        self.take(row, cause)
        return residency.has(row, position) is False

    def expire(self, row: int) -> None:
        """Let a block whose time to live is over go, if it may."""
        if self._residency.may_leave(row, self._position) and self._lingers(row):
            self.take(row, Cause.EXPIRED)

    def take(self, row: int, cause: Cause) -> None:
        """Take a copy that may leave: by itself where another tier has one, else the block goes with it."""
        residency, position = self._residency, self._position
        tenant = residency.tenant_of(row)
        if residency.tier_mask(row) & ~(1 << position):
            self._retire(residency.detach(row, position), tenant)
        elif residency.may_forget(row):
            for taken in residency.remove(row, cause, self._clock.monotonic_ns()):
                self._retire(taken.slot, tenant)
            self._counters.add("expired_blocks" if cause is Cause.EXPIRED else "evicted_blocks")
        else:
            return
        flow = self._flows.tiers[position]
        if cause is Cause.EXPIRED:
            flow.expired_blocks += 1
        else:
            flow.evicted_blocks += 1

    async def vacate(self, container: int) -> bool:
        """Empty a whole arena or slab, children before parents: to become another kind of one, or to be given back."""
        residency = self._residency
        rows = residency.rows_in(self._position, container)
        tokens = [residency.token(row) for row in sorted(rows, key=residency.depth, reverse=True)]
        if any(residency.pin_count(row) for row in rows):
            return False
        emptied = True
        for token in tokens:
            row = residency.current(token)
            if row >= 0 and residency.has(row, self._position):
                emptied = await self.evict(row, Cause.EVICTED) and emptied
        return emptied

    def _is_of_use(self, row: int, nbytes: int, tenant: int) -> bool:
        """Whether the victim's slot could serve this allocation."""
        same_owner = not self._separates_owners or self._residency.tenant_of(row) == tenant
        return same_owner and self._residency.slot(row, self._position).nbytes == nbytes

    def _confined(self, nbytes: int, tenant: int) -> int | None:
        """The tenant itself, when it is at its own maximum and must make room from its own blocks."""
        share = self._policy.shares.get(tenant)
        if share is None or share.max_bytes is None:
            return None
        over = self._residency.tenant_bytes(tenant, self._position) + nbytes > share.max_bytes
        return tenant if over else None

    def _lingers(self, row: int) -> bool:
        return self._may_linger(self._residency.slot(row, self._position), self._residency.tenant_of(row))

    def _owner(self, tenant: int) -> str:
        return self._residency.tenants[tenant].name
