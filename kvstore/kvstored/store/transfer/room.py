"""Making room in a tier: allocate, and while that fails, evict what the policy names.

Owns the loop from "there is no slot" to a slot, and a tenant's quota. Victims whose slots can serve are evicted,
neighbours of a chain together; where slots of another size or owner are in the way, a container is emptied for it
(`evacuation`). Invariants: never evicts a pinned copy, never leaves a hole in a chain, never frees a slot that has
readers (limbo does); evicts for one block at most a container's worth and the block's own size, where a tier has
containers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Container, Sequence
from enum import Enum, auto

from kvstore_tiers.arena import writable_owner
from kvstore_tiers.base import Slot, Tier, TierState
from kvstored.lifecycle import Cause
from kvstored.store.blocks import Residency
from kvstored.store.policies import EvictionPolicy
from kvstored.store.transfer.evacuation import BUSY, Evacuation
from kvstored.store.transfer.eviction import SLICE_EVICTIONS, Allowance, Eviction
from kvstored.store.transfer.victims import SkippedRows, Victims
from kvstored.tier_set import TierSet

MAX_ATTEMPTS = 4096  # for one allocation
PATIENCE, PATIENCE_S = 20, 0.005  # how often, and how long, to wait for copies in flight
UNLIMITED = 1 << 62
_TAKES_BLOCKS = (TierState.OK, TierState.FULL)


class NoSlot(Enum):
    """The reason why a block got no slot."""

    NO_ROOM = auto()  # nothing (more) may be evicted now, or the tier takes nothing
    OVER_QUOTA = auto()  # the tenant is at its quota, and none of its own blocks may be evicted now
    DECLINED = auto()  # the policy would rather keep what would have to go


class Room:
    """The allocator of slots in `tier`; it evicts blocks when the tier is full. `eviction` evicts them, and knows the
    tier's position in the block index."""

    def __init__(
        self, tier: Tier, residency: Residency, victims: Victims, eviction: Eviction, evacuation: Evacuation
    ) -> None:
        self._tier = tier
        self._residency = residency
        self._victims = victims
        self._eviction = eviction
        self._evacuation = evacuation
        self._position = eviction.position

    def follow(self, policy: EvictionPolicy) -> None:
        """Let `policy` choose the blocks to evict from now on."""
        self._victims.policy = policy

    def allocate_now(self, nbytes: int, tenant: int, *, writable: bool = False) -> Slot | None:
        """Return a free slot of `nbytes` if there is one and `tenant` is below its quota, otherwise None; evict
        nothing. `writable`: take it from an arena that the tenant's clients can write.
        """
        found = self.allocate_run(1, nbytes, tenant, writable=writable)
        return found[0] if found else None

    def allocate_run(
        self, most: int, nbytes: int, tenant: int, *, writable: bool = False, evicting: bool = False
    ) -> list[Slot]:
        """Return up to `most` free slots of `nbytes`, as `allocate_now` would return them one by one. With `evicting`,
        evict blocks that may go at once for slots that are lacking."""
        left_bytes = self._left_of_quota(tenant)
        if left_bytes is not None:
            most = min(most, max(left_bytes, 0) // nbytes)
        owner = self._owner(tenant, writable)
        found = self._tier.allocate_run(most, nbytes, owner) if most else []
        while evicting and len(found) < most and self.make_room(most - len(found), nbytes, tenant):
            more = self._tier.allocate_run(most - len(found), nbytes, owner)
            if not more:
                break
            found += more
        return found

    def next_victim(self, nbytes: int, tenant: int, exclude: Container[int] = ()) -> int:
        """Return the row of the block that would be evicted to store `nbytes` of `tenant`, if those in `exclude` may
        not be. Return -1 when there is none, or when a whole arena or slab would have to be emptied."""
        is_confined = self.is_over_quota(tenant, nbytes)
        row = self._victims.next(exclude, tenant if is_confined else None)
        if row < 0 or is_confined:
            return row
        container = self._residency.copies[self._position].container[row]
        return row if self._tier.makes_room(container, nbytes, self._owner(tenant, writable=False)) else -1

    def announce(self, tenant: int, parent: int, keys: Sequence[bytes]) -> None:
        """Announce to the policy that `tenant` is about to store the blocks `keys`, which continue the block at row
        `parent`.
        """
        self._victims.announce(tenant, parent, keys)

    async def allocate(self, nbytes: int, tenant: int, *, is_patient: bool = True) -> Slot | None:
        """Return a slot of `nbytes` for `tenant`, evicting the policy's victims for it; None when no more may be
        evicted. With `is_patient` it waits a little for copies in flight and for other callers that make room.
        """
        free = self.allocate_now(nbytes, tenant)
        slot = free if free is not None else await self.allocate_for(None, nbytes, tenant, is_patient=is_patient)
        return slot if isinstance(slot, Slot) else None

    async def allocate_for(
        self,
        newcomer: tuple[bytes, int] | None,
        nbytes: int,
        tenant: int,
        *,
        parent: int = -1,
        is_patient: bool = True,
        writable: bool = False,
    ) -> Slot | NoSlot:
        """Return a slot of `nbytes` for a new block of `tenant`, evicting other blocks for it, or the reason why there
        is none.

        `newcomer` is the block's key and depth, for a policy that may decline it; None: it may not. The block at row
        `parent`, the one before it in its chain, is not evicted for it."""
        if self._tier.state not in _TAKES_BLOCKS:
            return NoSlot.NO_ROOM  # it takes nothing, however much is evicted
        copies, owner = self._residency.copies[self._position], self._owner(tenant, writable)
        allowance = Allowance(nbytes, self._tier.info.container_bytes or UNLIMITED)
        passed = SkippedRows(copies, self._not_for(parent))
        patience = turns = PATIENCE if is_patient else 0
        for attempt in range(MAX_ATTEMPTS):
            slot = self.allocate_now(nbytes, tenant, writable=writable)
            if slot is not None:
                return slot
            confined = tenant if self.is_over_quota(tenant, nbytes) else None
            refused = NoSlot.NO_ROOM if confined is None else NoSlot.OVER_QUOTA
            row = self._next(passed, confined)
            if row >= 0 and newcomer is not None and self._victims.keeps(row, tenant, newcomer):
                return NoSlot.DECLINED
            if row < 0:
                if passed.containers and patience:  # copies in flight end soon, and their containers may be emptied
                    patience -= 1
                    await asyncio.sleep(PATIENCE_S)
                elif turns and self._evacuation.is_under_way:
                    turns -= 1  # else callers that wait without effect would keep each other waiting
                    if not await self._evacuation.wait():
                        return refused
                elif not is_patient or not await self._eviction.demoter.progress():
                    return refused
                # A block may be evicted now, or its container be emptied.
                passed = SkippedRows(copies, self._not_for(parent))
                continue
            if confined is not None or self._tier.makes_room(copies.container[row], nbytes, owner):
                if not await self._evict(row, Cause.EVICTED if confined is None else Cause.QUOTA, allowance, passed):
                    return refused
            else:
                container = copies.container[row]
                found = await self._evacuation.convert(
                    container, nbytes, owner, allowance, passed.rows, insists=is_patient and patience < PATIENCE
                )
                if isinstance(found, Slot):
                    return found
                if found is BUSY:
                    return refused
                if found is None:  # none of that kind can be emptied now
                    passed.containers |= self._evacuation.kind_of(container)
            if attempt % SLICE_EVICTIONS == SLICE_EVICTIONS - 1:
                await asyncio.sleep(0)
        return refused

    def make_room(
        self, most: int, nbytes: int, tenant: int, *, parent: int = -1, newcomers: Sequence[tuple[bytes, int]] = ()
    ) -> int:
        """Evict at once up to `most` of the blocks that `allocate_for` would evict one after another for new blocks of
        `tenant`, each for a slot of `nbytes`. Return their number. It is 0 where no block may go at once: then
        `allocate_for` finds out why. `parent` and `newcomers`, in their order, are as in that method."""
        if self._tier.state not in _TAKES_BLOCKS:
            return 0
        run, kept, owner = self._victims.next_run(most), self._not_for(parent), self._owner(tenant, writable=False)
        containers, aside, fits = self._residency.copies[self._position].container, self._evacuation.aside, set[int]()
        for at, row in enumerate(run):
            if (number := containers[row]) not in fits:
                if number in aside or not self._tier.makes_room(number, nbytes, owner):
                    run = run[:at]
                    break
                fits.add(number)
            if row in kept or (newcomers and self._victims.keeps(run[0], tenant, newcomers[at])):
                run = run[:at]
                break
        run = run[: self._eviction.may_go_at_once(run)]
        if run:
            self._eviction.take_run(run)
        return len(run)

    async def _evict(self, row: int, cause: Cause, allowance: Allowance, passed: SkippedRows) -> bool:
        """Evict a victim, or pass it over if it cannot be evicted. Return False when no more blocks may be evicted for
        one block.
        """
        nbytes = self._residency.copies[self._position].nbytes[row]
        if not allowance.covers(nbytes):
            return False
        if await self._eviction.evict(row, cause):
            allowance.spent_bytes += nbytes
        else:
            passed.rows.add(row)
        return True

    def _next(self, passed: SkippedRows, confined: int | None) -> int:
        """Return the next victim; the blocks of a container that is being emptied are not evicted for others."""
        passed.begin()
        aside = self._evacuation.aside - passed.containers
        passed.containers |= aside
        row = self._victims.next(passed.shortest, confined)
        passed.containers -= aside
        return -1 if passed.is_exhausted else row

    async def settle(self, timeout_s: float) -> None:
        """Wait until the emptying of arenas or slabs that is under way has ended, for `timeout_s` seconds at most; then
        the tier may be closed."""
        await self._evacuation.settle(timeout_s)

    async def vacate(self, container: int) -> bool:
        """Evict or move all blocks of the arena or slab with the number `container`, so that it can be given back.
        Return False when that cannot be done now."""
        return await self._evacuation.vacate(container)

    def expire(self, row: int) -> bool:
        """Evict the copy of the block at `row`, which was idle for too long, if it may be evicted. Return whether it is
        gone.
        """
        return self._eviction.expire(row)

    def _not_for(self, parent: int) -> set[int]:
        """Return what must not be evicted: row `parent`, unless it has a copy further down, or will be given one."""
        only_here = parent >= 0 and self._residency.tier_mask(parent) == TierSet.of(self._position)
        return {parent} if only_here and not self._eviction.demoter.wants(parent) else set()

    def is_over_quota(self, tenant: int, nbytes: int) -> bool:
        """Say whether `nbytes` more would take the tenant over its quota, the most of the tier that it may take: then
        it has to make room from its own blocks."""
        left_bytes = self._left_of_quota(tenant)
        return left_bytes is not None and nbytes > left_bytes

    def _left_of_quota(self, tenant: int) -> int | None:
        """Return how many bytes more the tenant may take of the tier; None where it has no quota."""
        share = self._victims.policy.shares.get(tenant)
        if share is None or share.max_bytes is None:
            return None
        residency, tier = self._residency, self._position
        held_bytes = sum(
            residency.tenant_bytes(charged, tier) + residency.reserved_bytes(charged, tier)
            for charged in share.charged_with or (tenant,)
        )
        return share.max_bytes - held_bytes

    def _owner(self, tenant: int, writable: bool) -> str:
        name = self._residency.tenants[tenant].name
        return writable_owner(name) if writable else name
