"""Emptying one container of a tier, so that it can take slots of another size or owner, or be given back.

An arena or slab holds slots of one size, for one owner. When a block of another kind needs room, a whole container has
to become free. The coldest blocks of the container's kind leave, in the order of eviction and wherever they are, until
the rest of the container fits into the places that are free; the rest is copied there. So one change of kind costs at
most one container's worth of evicted blocks, and none that is worth more than what stays.

Owns which container is emptied, and the order: set aside, make places, copy, move the index, free.
Invariants: one container of a tier at a time; a block with a pin or a reader does not move; a slot is freed only after
its block's copy is whole and, on a durable tier, synced; what is evicted stays within `Allowance`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

import numpy as np

from kvstore_tiers.base import ContainerReport, OutcomeKind, Slot, Tier
from kvstored.lifecycle import Cause, CopyState
from kvstored.movement.eviction import Eviction
from kvstored.movement.relocation import Copy, Relocation
from kvstored.movement.slot_exit import SlotExit
from kvstored.movement.victims import Victims
from kvstored.residency import Residency
from kvstored.telemetry import Counters

log = logging.getLogger(__name__)
SLICE_EVICTIONS = 16  # between two looks at the loop: about 0.3 ms
MAX_CONTAINERS = 8  # looked at for one allocation


@dataclass(slots=True)
class Allowance:
    """How much may be evicted for one allocation: a container's worth and the block itself."""

    left_bytes: int

    def spend(self, nbytes: int) -> None:
        self.left_bytes -= nbytes


class Evacuation:
    """Of `tier`, at `position` in residency. `on_damage(row, reason)`: a copy was found damaged on its way."""

    def __init__(
        self,
        tier: Tier,
        residency: Residency,
        victims: Victims,
        eviction: Eviction,
        exits: SlotExit,
        relocation: Relocation,
        on_damage: Callable[[int, str], None],
        counters: Counters,
    ) -> None:
        self._tier = tier
        self._position = eviction.position
        self._residency = residency
        self._victims = victims
        self._eviction = eviction
        self._exits = exits
        self._relocation = relocation
        self._on_damage = on_damage
        self._counters = counters
        self._turn = asyncio.Lock()
        self._running: set[asyncio.Task[bool]] = set()

    async def convert(
        self, victim: int, nbytes: int, owner: str, allowance: Allowance, spared: AbstractSet[int]
    ) -> bool:
        """Empty a container for slots of `nbytes` of `owner`, of the kind of `victim` if possible, without evicting
        rows that are `spared`. True: ask the tier again. False: none can be emptied now."""
        container = self._residency.slot(victim, self._position).container
        if self._turn.locked():
            async with self._turn:
                return True  # the container that was emptied meanwhile may serve this one too
        async with self._turn:
            return await self._finish(self._convert(container, nbytes, owner, allowance, spared))

    async def vacate(self, container: int) -> bool:
        """Empty this container, whatever that evicts of its kind; whether it is empty."""
        async with self._turn:
            report = next((each for each in self._tier.containers() if each.container == container), None)
            if report is None or self._rows_to_move(report) is None:
                return False
            return await self._finish(self._empty(report, Allowance(2 * report.nbytes), frozenset()))

    async def _finish(self, work: Coroutine[None, None, bool]) -> bool:
        """Run to the end even if the caller is cancelled: copies in flight hold slots."""
        task = asyncio.get_running_loop().create_task(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return await asyncio.shield(task)

    async def _convert(
        self, preferred: int, nbytes: int, owner: str, allowance: Allowance, spared: AbstractSet[int]
    ) -> bool:
        for report in self._by_cost(self._tier.convertible(nbytes, owner), preferred):
            if await self._empty(report, allowance, spared):
                return True
        return False

    def _by_cost(self, reports: Sequence[ContainerReport], preferred: int) -> Iterator[ContainerReport]:
        """Containers that can be emptied: those of the kind of the `preferred` one, which has the block that would go
        first, then the others; of each kind the one with the fewest bytes to move, and of equal ones the one that was
        not used for longest."""
        last_use_ns = self._last_uses()
        first = next(((each.owner, each.slot_bytes) for each in reports if each.container == preferred), None)

        def cost(each: ContainerReport) -> tuple[bool, int, float]:
            is_of_kind = (each.owner, each.slot_bytes) == first
            return not is_of_kind, each.used_slots * each.slot_bytes, last_use_ns.get(each.container, 0.0)

        pinned = {self._residency.copies[self._position].container[row] for row in self._residency.pins}
        found = 0
        for report in sorted(reports, key=cost):
            if report.container in pinned or self._rows_to_move(report) is None:
                continue
            yield report
            found += 1
            if found == MAX_CONTAINERS:
                return

    def _last_uses(self) -> dict[int, float]:
        """By container, when its blocks were last used, on average. A scan: some milliseconds a million rows."""
        copies, rows = self._residency.copies[self._position], self._residency.rows
        held = np.flatnonzero(np.frombuffer(copies.state, np.uint8))
        containers = np.frombuffer(copies.container, np.uint32)[held]
        used_ns = np.frombuffer(rows.last_access_ns, np.uint64)[held]
        numbers, where, counts = np.unique(containers, return_inverse=True, return_counts=True)
        means = np.bincount(where, weights=used_ns.astype(np.float64), minlength=len(numbers)) / counts
        return dict(zip(numbers.tolist(), means.tolist(), strict=True))

    def _rows_to_move(self, report: ContainerReport) -> list[int] | None:
        """The blocks of a container; None when it cannot be emptied now: a block is pinned, read or being written, or
        a slot is held by no block (limbo, quarantine)."""
        rows = self._residency.rows_in(self._position, report.container)
        if len(rows) != report.used_slots or not all(map(self._may_move, rows)):
            return None
        return rows if self._relocation.affords(report.used_slots * report.slot_bytes) else None

    def _may_move(self, row: int) -> bool:
        residency, position = self._residency, self._position
        return (
            not residency.pin_count(row)
            and residency.state(row, position) is CopyState.RESIDENT
            and not self._exits.has_readers(residency.slot(row, position))
        )

    async def _empty(self, report: ContainerReport, allowance: Allowance, spared: AbstractSet[int]) -> bool:
        """One container: set aside, make places, copy what is left, put back."""
        targets: list[Slot] = []
        self._tier.set_aside(report.container)
        try:
            rows = self._rows_to_move(report)
            if rows is not None:
                left = dict.fromkeys(map(self._residency.token, rows))
                if await self._make_places(report, left, targets, allowance, set(spared)):
                    await self._move(report, left, targets)
            for slot in targets:
                self._tier.free(slot)
        except Exception:  # a mistake here must not end the put that waits; the container stays as it is
            log.exception("emptying a container failed")
        return self._tier.put_back(report.container)

    # Places

    async def _make_places(
        self,
        report: ContainerReport,
        left: dict[int, None],
        targets: list[Slot],
        allowance: Allowance,
        stuck: set[int],
    ) -> bool:
        """Evict the coldest blocks of the container's kind until each of `left`, tokens of its blocks, has a place in
        another container; the places go to `targets`. Rows in `stuck` are passed over."""
        search = _Coldest(self._residency, self._position, self._victims, self._tier.containers(), report)
        evictions = 0
        while not self._take_places(report, len(left), targets):
            row = search.next(stuck)
            if row < 0 or allowance.left_bytes < report.slot_bytes:
                return False
            token, slot = self._residency.token(row), self._residency.slot(row, self._position)
            if not await self._eviction.evict(row, Cause.EVICTED):
                stuck.add(row)
                continue
            allowance.spend(slot.nbytes)
            if slot.container == report.container:
                left.pop(token, None)
            evictions += 1
            if evictions % SLICE_EVICTIONS == 0:
                await asyncio.sleep(0)
        return True

    def _take_places(self, report: ContainerReport, wanted: int, targets: list[Slot]) -> bool:
        while len(targets) < wanted:
            slot = self._tier.allocate(report.slot_bytes, report.owner)
            if slot is None:
                return False
            targets.append(slot)
        return True

    # Copies

    async def _move(self, report: ContainerReport, left: dict[int, None], targets: list[Slot]) -> None:
        """Copy the blocks `left` to `targets`, and let the index follow where nothing has changed meanwhile."""
        residency, position = self._residency, self._position
        copies: list[Copy] = []
        tokens: list[int] = []
        for token in left:
            row = residency.current(token)
            if row < 0 or not residency.has(row, position) or not self._may_move(row):
                continue
            slot = residency.slot(row, position)
            if slot.container == report.container:
                residency.pin(row)
                tokens.append(token)
                copies.append(Copy(residency.key(row), slot, targets.pop()))
        outcomes = await self._relocation.copy(copies)
        for token, copy, outcome in zip(tokens, copies, outcomes, strict=True):
            row = residency.current(token)
            if row >= 0:
                residency.unpin(row)
            unchanged = row >= 0 and residency.has(row, position) and residency.slot(row, position) == copy.source
            if outcome.ok and unchanged and self._may_move(row):
                self._tier.free(residency.move(row, position, copy.target))
                self._counters.add("relocated_blocks")
                self._counters.add("relocated_bytes", copy.target.nbytes)
                continue
            targets.append(copy.target)
            if outcome.kind is OutcomeKind.CORRUPT and unchanged:
                self._on_damage(row, outcome.message)


class _Coldest:
    """Which block of a container's kind goes next: the policy's order over all containers of that kind; where that
    takes too long to ask for, the container's own blocks, the one that was not used for longest first."""

    def __init__(
        self,
        residency: Residency,
        position: int,
        victims: Victims,
        containers: Sequence[ContainerReport],
        report: ContainerReport,
    ) -> None:
        kind = (report.owner, report.slot_bytes)
        self._residency = residency
        self._position = position
        self._victims = victims
        self._container = report.container
        self._search = victims.within({each.container for each in containers if (each.owner, each.slot_bytes) == kind})
        self._oldest: Iterator[int] | None = None

    def next(self, exclude: set[int]) -> int:
        if self._oldest is None:
            row = self._search.next(exclude)
            if row >= 0:
                return row
            self._oldest = self._by_last_use()
        return next((row for row in self._oldest if row not in exclude and self._may_go(row)), -1)

    def _by_last_use(self) -> Iterator[int]:
        """Children before their parents: a run of blocks is used at once, and a parent whenever its child is."""
        residency, position = self._residency, self._position
        rows = residency.rows_in(position, self._container)
        rows.sort(key=lambda row: (residency.last_access_ns(row), -residency.depth(row)))
        for token in [residency.token(row) for row in rows]:
            row = residency.current(token)
            if row >= 0 and residency.has(row, position):
                yield row

    def _may_go(self, row: int) -> bool:
        return self._residency.may_leave(row, self._position) and self._victims.spares_minimum(row)
