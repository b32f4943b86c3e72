"""Taking a copy out of one tier: dropped where another tier has one, demoted where it is the last and should be kept,
else removed with its block.

Owns the step from "this block is evicted" to "its slot is being freed". Never chooses the block. Invariants: a pinned
copy is kept; a chain gets no hole; a slot with readers is held in limbo (kept from reuse), within its tenant's limit.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Protocol

from kvstore_tiers.base import Slot, Tier
from kvstored.clock import Clock
from kvstored.lifecycle import Cause
from kvstored.store.blocks import Residency
from kvstored.telemetry import Counters, Flows
from kvstored.tier_set import ONLY, TIER_SETS

SLICE_EVICTIONS = 16  # between two looks at the loop: about 0.3 ms


class SlotExit(Protocol):
    """A way to free slots of a tier whose block was removed: at once, or when the last client that may read there is
    done. LeaseTable is one, for the tier that clients map."""

    def has_readers(self, slot: Slot) -> bool:
        """Return whether a client may still read `slot`, under a lease or shortly after one."""
        ...

    def may_retire(self, slot: Slot, tenant: int) -> bool:
        """Return whether a block of `tenant` may be evicted from `slot`: False when the tenant has too many slots
        waiting for readers.
        """
        ...

    def retire(self, slot: Slot, tenant: int) -> None:
        """Free `slot`, from which a block of `tenant` was removed, at once or when its last reader is done."""
        ...


class UnmappedExit:
    """A SlotExit for a tier that no client maps: a slot has no readers, and is freed at once."""

    def __init__(self, tier: Tier) -> None:
        self._tier = tier

    def has_readers(self, slot: Slot) -> bool:
        return False

    def may_retire(self, slot: Slot, tenant: int) -> bool:
        return True

    def retire(self, slot: Slot, tenant: int) -> None:
        self._tier.free(slot)


class Demoter(Protocol):
    """A component that copies evicted blocks to the tier below: `WriteBack` if that is NVMe, otherwise `Demotion`."""

    def wants(self, row: int) -> bool:
        """Return whether the evicted block at `row` should get a copy in the tier below, or must get one because
        children need it.
        """
        ...

    def write_back(self, row: int) -> Awaitable[bool]: ...

    async def progress(self) -> bool:
        """Wait until a write under way, whose block cannot be evicted meanwhile, has ended. Return False when none is
        under way."""
        ...


class Copier(Protocol):
    """A component that copies blocks to another tier although no request wants that. Blocks are pinned meanwhile."""

    def copies_of(self, tokens: Collection[int]) -> Sequence[asyncio.Future[Any]]:
        """Return the ends of copies under way for the blocks that `tokens` name."""
        ...


class NoDemotion:
    """A demoter for the slowest tier, below which there is no tier: it wants no block."""

    def wants(self, row: int) -> bool:
        return False

    async def write_back(self, row: int) -> bool:
        return False

    async def progress(self) -> bool:
        return False


@dataclass(slots=True)
class Allowance:
    """A bound on the bytes that may be evicted to store one block: `container_bytes` (one arena or slab) plus
    `block_bytes` (the block itself). `spent_bytes` counts the bytes evicted so far. `searches` is how many more
    containers may be searched for blocks that stay for the sake of others."""

    block_bytes: int
    container_bytes: int
    spent_bytes: int = 0
    searches: int = 16

    def covers(self, nbytes: int) -> bool:
        return self.spent_bytes + nbytes <= self.container_bytes + self.block_bytes


class Eviction:
    """The removal of copies from the tier at `position`, with a demotion to the tier below if it is wanted. `lost` is
    `Boundaries.lost`.
    """

    def __init__(
        self,
        position: int,
        residency: Residency,
        exits: SlotExit,
        demoter: Demoter,
        clock: Clock,
        counters: Counters,
        flows: Flows,
        lost: Callable[[int, bool], None],
    ) -> None:
        self.position = position
        self._residency = residency
        self._exits = exits
        self.demoter = demoter
        self._clock = clock
        self._counters = counters
        self._lost = lost
        self._flow = flows.tiers[position]

    def may_go(self, row: int) -> bool:
        """Return whether the copy of the block at `row` may be evicted from this tier now."""
        residency, position = self._residency, self.position
        return residency.is_evictable(row, position) and self._exits.may_retire(
            residency.slot(row, position), residency.tenant_of(row)
        )

    def may_go_at_once(self, run: Sequence[int]) -> int:
        """Return how many of the leading blocks of `run`, which a policy has named together, `take_run` may take: no
        client reads them, none must be written below first, and each is of no use without the one before it."""
        residency, position, has_readers = self._residency, self.position, self._exits.has_readers
        rows, only, is_above_removed = residency.rows, ONLY[position], False
        for at, row in enumerate(run):
            if residency.stands_alone(row) or self.demoter.wants(row) or has_readers(residency.slot(row, position)):
                return at
            if rows.mask[row] == only and (rows.filling[row] or rows.links[row] != is_above_removed):
                return at  # a child elsewhere needs it
            is_above_removed = rows.mask[row] == only
        return len(run)

    def take_run(self, run: Sequence[int]) -> None:
        """Evict the copies of `run`, which `may_go_at_once`. A block without a copy in another tier is removed."""
        residency, position = self._residency, self.position
        mask, only, now_ns = residency.rows.mask, ONLY[position], self._clock.monotonic_ns()
        tenant = residency.tenant_of(run[0])
        for is_last, rows in groupby(run, key=lambda row: mask[row] == only):
            piece = list(rows)
            if is_last:
                slots = residency.remove_run(piece, position, Cause.EVICTED, now_ns)
            else:
                slots = residency.detach_run(piece, position)
            for slot in slots:
                self._exits.retire(slot, tenant)
            self._counters.add("evicted_blocks", len(piece) if is_last else 0)
        self._flow.evicted_blocks += len(run)

    async def evict(self, row: int, cause: Cause) -> bool:
        """Evict the copy of the block at `row` from this tier, after copying it to the tier below if it is wanted
        there. `cause` is remembered as the reason. Return False when the copy must stay: it is leased, or it is the
        only copy of a block that other blocks need."""
        residency, position = self._residency, self.position
        if not self.may_go(row):
            return False
        if self.demoter.wants(row):
            token = residency.token(row)
            written = await self.demoter.write_back(row)
            row = residency.current(token)
            if row < 0:
                return True
            if not self.may_go(row):
                return False
            is_last = not TIER_SETS[residency.tier_mask(row)].without(position)
            if not written and is_last and not residency.may_forget(row):
                return False  # below is no room for it; a leaf is given up then, so that new blocks find room
        self.take(row, cause)
        return residency.has(row, position) is False

    def expire(self, row: int) -> bool:
        """Evict the copy of the block at `row`, which was idle for too long, if it may be evicted. Return whether it is
        gone.
        """
        if self.may_go(row):
            self.take(row, Cause.EXPIRED)
        return not self._residency.has(row, self.position)

    def take(self, row: int, cause: Cause) -> None:
        """Remove the copy of the block at `row`, which may be evicted, without copying it to the tier below. If no
        other tier has a copy, the whole block is removed with `cause` as the reason."""
        residency, position, retire = self._residency, self.position, self._exits.retire
        tenant = residency.tenant_of(row)
        if TIER_SETS[residency.tier_mask(row)].without(position):
            retire(residency.detach(row, position), tenant)
        elif residency.may_forget(row):
            above, key = residency.parent(row), residency.key(row)
            is_alone = above >= 0 and residency.stands_alone(row)
            for taken in residency.remove(row, cause, self._clock.monotonic_ns()):
                retire(taken.slot, tenant)
            if is_alone and residency.rows.mask[above]:
                self._lost(above, residency.find_any(tenant, key) < 0)
            self._counters.add("expired_blocks" if cause is Cause.EXPIRED else "evicted_blocks")
        else:
            return
        self._flow.evicted_blocks += cause is not Cause.EXPIRED
