"""Emptying one container of a tier, so that it can take slots of another size or owner, or be given back.

An arena or slab holds slots of one size, for one owner. When a block of another kind needs room, a whole container has
to become free. The coldest blocks of the container's kind are evicted, in the policy's order and from any container,
until the rest of the container fits into the places that are free; the rest is copied there. Blocks of an arena that
clients write to may also be copied to the tenant's others. So one change of kind costs at most one container's worth of
evicted blocks, and none that is worth more than what is kept; but where blocks stay because later blocks of their
chains are in containers of another kind, those are evicted before them.

Owns which container is emptied, and the order: set aside, make places, copy, move the index, free.
Invariants: one container of a tier at a time; a block that is held or has a reader does not move; a slot is freed only
after its block's copy is whole and, on a durable tier, synced; what is evicted is within `Allowance`, and nothing is
evicted for an allocation that has ended; no other put waits for an evacuation longer than `TURN_WAIT_S`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from enum import Enum
from itertools import count
from typing import Any, Final, TypeVar

from kvstore_tiers.arena import owners_of_places
from kvstore_tiers.base import ContainerReport, Outcome, OutcomeKind, Slot, Tier
from kvstored.lifecycle import Cause, CopyState
from kvstored.store.blocks import Residency
from kvstored.store.blocks.listing import rows_in, tokens_below
from kvstored.store.transfer.eviction import SLICE_EVICTIONS, Allowance, Eviction, SlotExit
from kvstored.store.transfer.relocation import Copy, Relocation
from kvstored.store.transfer.victims import Coldest, Victims
from kvstored.telemetry import Counters

log = logging.getLogger(__name__)
MAX_SUSPECTS = 4096
ROUNDS, ROUND_S = 10, 0.005  # of moving what was read or written in the round before
STUCK_S = 0.1  # after a caller insisted without success
MAX_INSISTED = 2
MAX_CONTAINERS = 16  # looked at for one allocation
TURN_WAIT_S = 1.0  # for the evacuation of another: a medium that hangs must not hang every put
EVICTION_WAIT_S = 5.0  # for one block's way down

Result = TypeVar("Result")


class Again(Enum):
    """A reason why emptying a container (arena or slab) gave no slot yet. AGAIN: another evacuation has ended, so ask
    the tier for a slot again. BUSY: another evacuation takes too long."""

    AGAIN = "again"
    BUSY = "busy"


AGAIN: Final = Again.AGAIN
BUSY: Final = Again.BUSY


class Evacuation:
    """A component that empties containers (arenas or slabs) of `tier`, one at a time, so that they can hold slots of
    another size or owner: blocks are evicted or moved to other containers. `on_damage(row, reason)` is called for a
    copy that is found damaged while it is moved."""

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
        self._running: set[asyncio.Task[Any]] = set()  # one has the turn, or will have it when it begins
        self._suspects: set[int] = set()  # tokens of blocks that could not be read when they were to move
        self._failed: dict[tuple[int, str], float] = {}  # by kind of slot: when a caller insisted without success
        self.aside: set[int] = set()  # the container that is being emptied: its blocks are not to be evicted for others

    async def convert(
        self,
        container: int,
        nbytes: int,
        owner: str,
        allowance: Allowance,
        spared: AbstractSet[int],
        *,
        insists: bool = False,
    ) -> Slot | Again | None:
        """Empty a container, and return a slot of `nbytes` for `owner` in it, or None when no container can be emptied
        now.

        Containers with the slot size and owner of `container` come first. Rows in `spared` are not evicted, and no more
        bytes than `allowance` permits. With `insists`, set if nothing else can be evicted, it waits a little for blocks
        that are being read or written."""
        if insists and (pause_s := self._pause_s(nbytes, owner)) > 0:
            await asyncio.sleep(pause_s)
            return None
        if self.is_under_way:
            return AGAIN if await self.wait() else BUSY
        task = self._start(self._convert(container, nbytes, owner, allowance, spared, insists))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            task.add_done_callback(self._give_up)
            raise

    async def vacate(self, container: int) -> bool:
        """Empty `container`, however much must be evicted for that. Return whether it is empty."""
        return await asyncio.shield(self._start(self._vacate(container)))

    async def wait(self) -> bool:
        """Wait until the evacuation under way has ended. Return False when that takes longer than `TURN_WAIT_S`."""
        ended, _ = await asyncio.wait(self._running, timeout=TURN_WAIT_S, return_when=asyncio.FIRST_COMPLETED)
        return bool(ended)

    async def settle(self, timeout_s: float) -> None:
        """Wait until the emptying of a container that is under way has ended, for `timeout_s` seconds at most; then the
        tier may be closed."""
        if self._running:
            await asyncio.wait(self._running, timeout=timeout_s)

    def kind_of(self, container: int) -> set[int]:
        """Return the containers with the slot size and owner of `container`, itself included."""
        reports = self._tier.containers()
        kind = next(((each.owner, each.slot_bytes) for each in reports if each.container == container), None)
        return {each.container for each in reports if (each.owner, each.slot_bytes) == kind}

    @property
    def is_under_way(self) -> bool:
        return bool(self._running)

    def _start(self, work: Coroutine[None, None, Result]) -> asyncio.Task[Result]:
        """Run `work` in a task of its own, so that it goes on if the caller is cancelled: copies in flight hold
        slots."""
        task = asyncio.get_running_loop().create_task(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task

    def _give_up(self, task: asyncio.Task[Slot | None]) -> None:
        """Free the slot that the ended `task` has found: the put that needed the slot has been cancelled."""
        if not task.cancelled() and task.exception() is None and (slot := task.result()) is not None:
            self._tier.free(slot)

    async def _convert(
        self,
        preferred: int,
        nbytes: int,
        owner: str,
        allowance: Allowance,
        spared: AbstractSet[int],
        insists: bool,
    ) -> Slot | None:
        async with self._turn:
            slot = self._tier.allocate(nbytes, owner)  # another may have ended since the caller looked
            if slot is not None:
                return slot
            for container in self._by_cost(self._tier.convertible(nbytes, owner), preferred, insists):
                report = self._report(container)
                if report is None or (report.owner, report.slot_bytes) == (owner, nbytes):
                    continue  # it was released or cut anew meanwhile
                allowance.container_bytes = max(allowance.container_bytes, report.nbytes)
                if await self._empty(report, allowance, spared):
                    slot = self._tier.allocate(nbytes, owner)
                    if slot is not None:
                        return slot
            if insists:
                self._failed[nbytes, owner] = asyncio.get_running_loop().time()
            return None

    def _pause_s(self, nbytes: int, owner: str) -> float:
        """Return the seconds to wait because a caller has just insisted in vain: callers then wait together, and not
        one after the other.
        """
        failed_s = self._failed.get((nbytes, owner))
        return 0.0 if failed_s is None else failed_s + STUCK_S - asyncio.get_running_loop().time()

    async def _vacate(self, container: int) -> bool:
        async with self._turn:
            report = self._report(container)
            if report is None or self._rows_to_move(report) is None:
                return False
            return await self._empty(report, Allowance(report.slot_bytes, report.nbytes), frozenset())

    def _report(self, container: int) -> ContainerReport | None:
        return next((each for each in self._tier.containers() if each.container == container), None)

    def _by_cost(self, reports: Sequence[ContainerReport], preferred: int, insists: bool) -> Iterator[int]:
        """Yield containers that can be emptied: the ones of the kind of the `preferred` one, which has the block that
        would go first, then the others; of each kind the one with the fewest bytes to move, of equal ones the
        preferred. An arena that clients write to counts as of the kind of the tenant's others; those count twice, since
        their blocks cannot be copied to it. With `insists` one or two that cannot be emptied as they are."""
        shared = {(owner, each.slot_bytes) for each in reports for owner in owners_of_places(each.owner)[1:]}

        def kind(each: ContainerReport) -> tuple[str, int]:
            return owners_of_places(each.owner)[-1], each.slot_bytes

        first = next((kind(each) for each in reports if each.container == preferred), None)

        def cost(each: ContainerReport) -> tuple[bool, int, bool]:
            weight = 2 if (each.owner, each.slot_bytes) in shared else 1
            return kind(each) != first, each.used_slots * each.slot_bytes * weight, each.container != preferred

        residency = self._residency
        held = {residency.copies[self._position].container[row] for row in residency.pins if residency.is_held(row)}
        likely = [report for report in sorted(reports, key=cost) if report.container not in held]
        for report in likely[:MAX_CONTAINERS]:
            if self._rows_to_move(report) is not None:
                yield report.container
        if insists:
            yield from (report.container for report in sorted(reports, key=cost)[:MAX_INSISTED])

    def _rows_to_move(self, report: ContainerReport) -> list[int] | None:
        """Return the blocks of a container; None when it cannot be emptied now: a block is pinned, read or being
        written, or a slot is held by no block (limbo, quarantine)."""
        rows = rows_in(self._residency, self._position, report.container)
        if len(rows) != report.used_slots or not all(map(self._may_move, rows)):
            return None
        return rows if self._relocation.affords(report.used_slots * report.slot_bytes) else None

    def _may_move(self, row: int) -> bool:
        residency, position = self._residency, self._position
        return (
            not residency.is_held(row)
            and residency.token(row) not in self._suspects
            and residency.state(row, position) is CopyState.RESIDENT
            and not self._exits.has_readers(residency.slot(row, position))
        )

    async def _empty(self, report: ContainerReport, allowance: Allowance, spared: AbstractSet[int]) -> bool:
        """Empty one container: set it aside, make places, copy what is left, put it back."""
        targets: list[Slot] = []
        self._tier.set_aside(report.container)
        self.aside.add(report.container)
        try:
            rows = await self._soon(report)
            if rows is not None:
                left = dict.fromkeys(map(self._residency.token, rows))
                for _ in range(ROUNDS):
                    if not await self._make_places(report, left, targets, allowance, set(spared)):
                        break
                    await self._move(report, left, targets)
                    if not left:
                        break
                    await asyncio.sleep(ROUND_S)  # the rest is read or written: soon it is not
        except Exception:  # a mistake here must not end the put that waits; the container is left as it is
            log.exception("emptying a container failed")
        for slot in targets:
            self._tier.free(slot)
        self.aside.discard(report.container)
        return self._tier.put_back(report.container)

    async def _soon(self, report: ContainerReport) -> list[int] | None:
        """Return the blocks to move, once nothing is written to the container any more; it hands out no slot by now."""
        for _ in range(ROUNDS):
            rows = self._rows_to_move(report)
            if rows is not None:
                return rows
            await asyncio.sleep(ROUND_S)
            report = self._report(report.container) or report  # fewer slots are out perhaps
        return None

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
        owners = owners_of_places(report.owner)
        kind = {
            each.container
            for each in self._tier.containers()
            if each.slot_bytes == report.slot_bytes and each.owner in owners
        }
        search = Coldest(self._residency, self._victims, kind, report, stuck)
        for looks in count(1):
            if self._take_places(report, len(left), targets):  # in the step of the eviction: others want them too
                return True
            if looks % SLICE_EVICTIONS == 0:
                await asyncio.sleep(0)
                continue
            needed_bytes = (len(left) - len(targets)) * report.slot_bytes
            if not allowance.covers(report.slot_bytes) or not self._relocation.affords(needed_bytes):
                break
            row = search.next()
            if row < 0:
                if search.is_of_any_kind or not await self._look_below(report, search, allowance):
                    break
                continue
            token, slot = self._residency.token(row), self._residency.slot(row, self._position)
            # A container of the kind may have become empty and been cut anew meanwhile.
            is_wanted = slot.nbytes == report.slot_bytes or (search.is_of_any_kind and allowance.covers(slot.nbytes))
            evicted = await self._evict(row) if is_wanted else False
            if evicted is None:
                break
            if not evicted:
                stuck.add(row)
                continue
            allowance.spent_bytes += slot.nbytes
            if slot.container == report.container:
                left.pop(token, None)
        return False

    async def _look_below(self, report: ContainerReport, search: Coldest, allowance: Allowance) -> bool:
        """Let `search` go on with the blocks for whose sake blocks of the container stay. Return whether there may be
        some."""
        residency, position = self._residency, self._position
        rows = rows_in(residency, position, report.container)
        if not allowance.searches or not any(residency.children(row, position) for row in rows):
            return False
        allowance.searches -= 1
        search.go_on_with(await tokens_below(residency, position, rows))
        return True

    async def _evict(self, row: int) -> bool | None:
        """Evict a block. Return whether it has left; None on timeout: the block then keeps its place, even if its copy
        further down completes, because a late eviction would not be counted in the allowance."""
        try:
            async with asyncio.timeout(EVICTION_WAIT_S):
                return await self._eviction.evict(row, Cause.EVICTED)
        except TimeoutError:
            return None

    def _take_places(self, report: ContainerReport, wanted: int, targets: list[Slot]) -> bool:
        for owner in owners_of_places(report.owner):
            while len(targets) < wanted and (slot := self._tier.allocate(report.slot_bytes, owner)) is not None:
                targets.append(slot)
        return len(targets) >= wanted

    # Copies

    async def _move(self, report: ContainerReport, left: dict[int, None], targets: list[Slot]) -> None:
        """Copy the blocks `left` to `targets`, and let the index follow where nothing has changed meanwhile. What could
        not move stays in `left`."""
        residency, position = self._residency, self._position
        copies: list[Copy] = []
        tokens: list[int] = []
        for token in list(left):
            row = residency.current(token)
            here = row >= 0 and residency.has(row, position)
            if not here or residency.slot(row, position).container != report.container:
                del left[token]
            elif self._may_move(row):
                slot = residency.slot(row, position)
                residency.pin(row)
                tokens.append(token)
                copies.append(Copy(residency.key(row), slot, targets.pop()))
        try:
            outcomes = await self._relocation.copy(copies)
        except Exception:
            log.exception("copying blocks to other slots failed")
            outcomes = [Outcome(OutcomeKind.FAILED)] * len(copies)
        for token, copy, outcome in zip(tokens, copies, outcomes, strict=True):
            row = residency.current(token)
            if row >= 0:
                residency.unpin(row)
            unchanged = row >= 0 and residency.has(row, position) and residency.slot(row, position) == copy.source
            if outcome.ok and unchanged and self._may_move(row):
                self._tier.free(residency.move(row, position, copy.target))
                self._counters.add("relocated_blocks")
                self._counters.add("relocated_bytes", copy.target.nbytes)
                left.pop(token, None)
                continue
            if outcome.header is None:
                targets.append(copy.target)
            else:  # the copy has a record: it is withdrawn before anything else is written there
                if unchanged:
                    header = replace(outcome.header, generation=copy.source.generation)
                    self._tier.publish_again(copy.source, header)
                self._tier.free(copy.target)
            if outcome.kind is OutcomeKind.FAILED:
                self._suspect(token)
            if outcome.kind is OutcomeKind.CORRUPT and unchanged:
                self._on_damage(row, outcome.message)

    def _suspect(self, token: int) -> None:
        if len(self._suspects) >= MAX_SUSPECTS:
            self._suspects.clear()
        self._suspects.add(token)
