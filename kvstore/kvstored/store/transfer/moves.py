"""Moves carry blocks along a link from one tier to another, each block once however many callers ask.

A block is pinned, a slot is found, the copy is attached as FILLING, the transfer waits in the lane; then the copy is
published, or its slot is freed. Blocks that begin together can be one transfer. Promotion, demotion, write-back,
sharing and straight reads decide which block moves, when, and what follows: each of them gives a coroutine that awaits
`copied` and judges the outcome. When the destination has a codec, the block gets its coded form before it gets a slot
(`staging.py`). Invariants: a block is pinned from `add` until `end`. A block has one move of a kind at a time. A slot
is readable only after its bytes were verified, and is given back if it is not used. Staged data is released once.
Damage removes blocks by force, pinned or not, so each wait is followed by a new lookup of the token. No call blocks.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Any, Generic, TypeVar

from kvstore_tiers.base import Completion, Outcome, Slot
from kvstored.store.blocks import Residency
from kvstored.store.transfer.lane import Priority, Refused
from kvstored.store.transfer.link import TierLink
from kvstored.store.transfer.mover import LaneTransfer
from kvstored.store.transfer.staging import StagedImage

log = logging.getLogger(__name__)
MAX_ROOMLESS = 4096
RUN_BYTES, RUN_BLOCKS = 256 << 10, 64  # of one transfer: a thread takes some milliseconds, then others have their turn
LONG_RUN_BYTES = 6 << 20  # of one that a request waits for, behind others


class Unmoved(Enum):
    """The reason why the copying of a block to another tier did not begin; it is returned instead of an outcome."""

    NO_ROOM = "no room"
    IN_VAIN = "the copy to read from has gone, another one is there already, or nothing waits for it"
    LANE_FULL = "the lane is full"


@dataclass(slots=True, eq=False)
class BlockMove:
    """The move of one block along `link`. `waiters` counts the callers that still want the block; the last of them
    stops waiting at `due_ns`. `ticket` is its ticket in the lane, 0 while it has none. `is_asked_again` is set when
    another caller asked after the transfer had ended.
    """

    token: int
    nbytes: int  # of a slot for it as it is
    tenant: int
    link: TierLink
    priority: Priority
    due_ns: int | None = None
    waiters: int = 1
    ticket: int = 0
    slot_bytes: int = 0  # of the slot that it got
    is_asked_again: bool = False
    began_s: float = 0.0  # by the loop's clock
    ended: asyncio.Future[bool] | None = None  # once it has begun: whether the block has its copy
    outcome: asyncio.Future[Outcome | Unmoved] | None = None  # once it has a slot
    together: Sequence[BlockMove] = ()  # that are in the lane as one transfer, itself included

    @property
    def has_ended(self) -> bool:
        """True when the transfer has ended or was refused, and the coroutine that follows it has not run since."""
        return self.outcome is not None and self.outcome.done()

    @property
    def is_refused(self) -> bool:
        """True when the transfer was refused at once, for example because the lane was full."""
        return self.outcome is not None and self.outcome.done() and isinstance(self.outcome.result(), Unmoved)

    def raise_priority(self, priority: Priority, due_ns: int | None = None) -> None:
        self.priority, self.due_ns = priority, due_ns
        if self.ticket:
            self.link.mover.raise_priority(self.link.lane.name, self.ticket, priority, due_ns)

    def cancel(self) -> None:
        """End the copying of this block as cancelled if it waits in the lane's queue; a copy that has begun ends by
        itself."""
        if self.ticket:
            self.link.mover.cancel(self.link.lane.name, self.ticket)

    def give_up(self) -> None:
        """Note that one caller no longer waits for this move. When no caller is left for any move of its transfer, they
        are cancelled if they are still queued."""
        self.waiters -= 1
        if not any(move.waiters for move in self.together):
            self.cancel()


Kind = TypeVar("Kind", bound=BlockMove)
Follow = Callable[[Kind], Coroutine[Any, Any, bool]]


@dataclass(slots=True)
class _Run(Generic[Kind]):
    """The blocks of one transfer along `link`, in columns. `staged` is the coded form of a single one. `number` is the
    transfer's for the link's breaker, and `outcomes` has one for each block, once the tier has had them."""

    link: TierLink
    staged: StagedImage | None
    moves: list[Kind] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    keys: list[bytes] = field(default_factory=list)
    sources: list[Slot] = field(default_factory=list)
    slots: list[Slot] = field(default_factory=list)
    errors: list[float] = field(default_factory=list)  # the bound of a lossy copy
    number: int = 0
    outcomes: Sequence[Outcome] = ()
    has_bad_source: bool = False

    def source_is_bad(self) -> None:
        self.has_bad_source = True


def _runs(moves: Sequence[Kind], slots: Sequence[Slot]) -> Iterator[tuple[list[Kind], list[Slot]]]:
    """Divide the moves that have `slots` into runs of neighbours for one transfer each. What a request waits for is in
    longer runs the more is before it: its first blocks come soon, and the others cost less."""
    first, nbytes = 0, 0
    for at, slot in enumerate(slots):
        nbytes += slot.nbytes
        link = moves[at].link
        like = (link, moves[at].priority, moves[at].tenant)
        is_next = link.takes_runs and like == (moves[first].link, moves[first].priority, moves[first].tenant)
        is_short = nbytes <= RUN_BYTES or (
            moves[at].priority is Priority.DEMAND
            and nbytes <= LONG_RUN_BYTES
            and at - first < 2 * first // link.lane.settings.max_in_flight
        )
        if at > first and not (is_next and is_short and at - first < RUN_BLOCKS):
            yield list(moves[first:at]), list(slots[first:at])
            first, nbytes = at, slot.nbytes
    if slots:
        yield list(moves[first : len(slots)]), list(slots[first:])


class Moves(Generic[Kind]):
    """The moves of one kind (promotions, say) that are under way, by the token of the block. `allocate(nbytes, tenant)`
    makes room for a move that has no slot yet.
    """

    def __init__(self, residency: Residency, allocate: Callable[[int, int], Awaitable[Slot | None]]) -> None:
        self._residency = residency
        self._allocate = allocate
        self.under_way: dict[int, Kind] = {}  # oldest first
        self.without_slot: set[int] = set()  # tokens of those for which room will be made
        self._roomless: dict[int, None] = {}  # tokens of those for which none could be made, the oldest first
        self._following: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self.under_way)

    def __contains__(self, token: int) -> bool:
        return token in self.under_way

    def find(self, token: int) -> Kind | None:
        return self.under_way.get(token)

    def lacks_room(self, token: int, patience_s: float) -> bool:
        """Return whether room for the block that `token` names could not be made the last time, or has been sought for
        `patience_s` seconds."""
        if token not in self.without_slot:
            return token in self._roomless
        return asyncio.get_running_loop().time() >= self.under_way[token].began_s + patience_s

    def copies_of(self, tokens: Collection[int]) -> list[asyncio.Future[bool]]:
        """Return the ends of moves under way for the blocks that `tokens` name."""
        return [move.ended for token, move in self.under_way.items() if token in tokens and move.ended is not None]

    def add(self, move: Kind) -> None:
        """Register `move` and pin its block; its transfer begins later."""
        self.under_way[move.token] = move
        self._residency.pin(self._residency.current(move.token))

    def begin(self, moves: Sequence[Kind], follow: Follow[Kind], slots: Sequence[Slot] = ()) -> None:
        """Register `moves`, queue the first ones at once, into `slots`, and have `follow(move)` run for each, which
        awaits the move's end and returns whether the block has its copy. A move goes on if its caller does not wait.
        """
        loop = asyncio.get_running_loop()
        for move in moves:
            if move.token not in self.under_way:
                self.add(move)
            move.began_s, move.ended = loop.time(), loop.create_future()
        for run, places in _runs(moves, slots):
            self.queue(run, places)
            self._spawn(self._follow_run(run, follow))
        for move in moves[len(slots) :]:
            self.without_slot.add(move.token)
            self._spawn(self._follow(move, follow))

    def begin_one(self, move: Kind, follow: Follow[Kind], slot: Slot | None) -> None:
        """Begin `move` as `begin` does, into `slot` if there is one."""
        self.begin([move], follow, () if slot is None else (slot,))

    def _spawn(self, following: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(following)
        self._following.add(task)
        task.add_done_callback(self._following.discard)

    async def _follow_run(self, run: Sequence[Kind], follow: Follow[Kind]) -> None:
        """Follow the moves of one transfer, which end together: one after another, unless one has more to wait for."""
        for move in run:
            outcome = None if move.outcome is None else await move.outcome
            if isinstance(outcome, Outcome) and outcome.ok:
                await self._follow(move, follow)
            else:
                self._spawn(self._follow(move, follow))

    async def _follow(self, move: Kind, follow: Follow[Kind]) -> None:
        assert move.ended is not None
        is_copied = False
        try:
            is_copied = await follow(move)
        except Exception:  # a mistake of ours must not leave its block pinned and its waiters waiting for ever
            log.exception("moving a block failed")
        finally:
            self.end(move)
            move.ended.set_result(is_copied)

    async def copied(self, move: Kind) -> Outcome | Unmoved:
        """Make room for `move` if it has no slot yet, queue it, and wait for its transfer. Return the outcome, or why
        no transfer began.
        """
        if move.outcome is None:
            try:
                hindrance = await self._queue_in_new_slot(move)
            finally:
                self.without_slot.discard(move.token)
            if hindrance is not None:
                return hindrance
        assert move.outcome is not None
        outcome = await move.outcome
        move.ticket, move.outcome, move.together = 0, None, ()
        return outcome

    async def _queue_in_new_slot(self, move: Kind) -> Outcome | Unmoved | None:
        """Make room for `move` and queue it; return None, or why that is not possible."""
        if not self._is_wanted(move, self._residency.current(move.token)):
            return Unmoved.IN_VAIN
        while True:
            staged = await self._stage(move) if move.link.staging is not None else None
            if isinstance(staged, Outcome | Unmoved):
                return staged
            slot = await self._find_room(move, move.nbytes if staged is None else staged.slot_bytes)
            if slot is None:
                self._release(move, staged)
                self._roomless[move.token] = None
                if len(self._roomless) > MAX_ROOMLESS:
                    del self._roomless[next(iter(self._roomless))]
                return Unmoved.NO_ROOM
            if staged is None or not staged.error or self._takes_lossy(self._residency.current(move.token)):
                self.queue([move], [slot], staged)
                return None
            move.link.destination_tier.free(slot)  # an exact put has come meanwhile
            self._release(move, staged)

    async def _stage(self, move: Kind) -> StagedImage | Outcome | Unmoved:
        """Bring the block into the destination's form. Meanwhile its copy may be removed by force, and the slot may be
        used again."""
        residency, link = self._residency, move.link
        row = residency.current(move.token)
        source = residency.slot(row, link.source)
        try:
            staged = await link.stage(source, residency.key(row), move.nbytes, takes_lossy=self._takes_lossy(row))
        except RuntimeError:  # the source was not allocated any more
            return Unmoved.IN_VAIN
        row = residency.current(move.token)
        if self._is_wanted(move, row) and residency.slot(row, link.source) == source:
            return staged
        if isinstance(staged, StagedImage):
            self._release(move, staged)
        return Unmoved.IN_VAIN

    def _takes_lossy(self, row: int) -> bool:
        residency = self._residency
        return row >= 0 and residency.exactness.takes_lossy(row, residency.tenant_of(row))

    def _release(self, move: Kind, staged: StagedImage | None) -> None:
        if staged is not None and move.link.staging is not None:
            move.link.staging.release(staged)

    async def _find_room(self, move: Kind, nbytes: int) -> Slot | None:
        try:
            return await self._allocate(nbytes, move.tenant)
        except Exception:  # a mistake of ours: the move ends as any other that finds no room
            log.exception("making room in tier %s failed", move.link.destination_tier.info.name)
            return None

    def queue(self, moves: Sequence[Kind], slots: Sequence[Slot], staged: StagedImage | None = None) -> None:
        """Queue one transfer of the blocks of `moves` into `slots`, or of the coded form `staged` of a single one. If
        no caller wants a move any more, free its slot instead."""
        residency, link, loop = self._residency, moves[0].link, asyncio.get_running_loop()
        run = _Run[Kind](link, staged)
        for move, slot in zip(moves, slots, strict=True):
            move.outcome, row = loop.create_future(), residency.current(move.token)
            self._roomless.pop(move.token, None)
            if not self._is_wanted(move, row):
                link.destination_tier.free(slot)
                self._release(move, staged)
                move.outcome.set_result(Unmoved.IN_VAIN)
                continue
            move.slot_bytes, source = slot.nbytes, residency.slot(row, link.source)
            error = max(residency.exactness.error(row, link.source), 0.0 if staged is None else staged.error)
            run.moves.append(move)
            run.rows.append(row)
            run.keys.append(residency.key(row))
            run.sources.append(source)
            run.slots.append(slot)
            run.errors.append(error)
        if not run.moves:
            return
        residency.attach_run(run.rows, link.destination, run.slots)
        for row, error in zip(run.rows, run.errors, strict=True):
            if error:
                residency.exactness.note(row, link.destination, error)
        transfer = LaneTransfer(partial(self._start, run), partial(self._end, run), len(run.moves))
        nbytes = sum([slot.nbytes for slot in (run.sources if staged is None else run.slots)])
        first = min(run.moves, key=lambda move: move.priority)
        ticket = link.mover.submit(link.lane.name, first.priority, nbytes, transfer, first.due_ns)
        if isinstance(ticket, Refused):
            self._release(run.moves[0], staged)
            for move, row in zip(run.moves, run.rows, strict=True):
                link.destination_tier.free(residency.detach(row, link.destination))
                assert move.outcome is not None
                move.outcome.set_result(Unmoved.LANE_FULL)
            return
        for move in run.moves:
            move.ticket, move.together = ticket, run.moves

    def _start(self, run: _Run[Kind], done: Completion) -> None:
        link = run.link
        if link.breaker is not None:
            run.number = link.breaker.began()

        def ended(outcomes: Sequence[Outcome]) -> None:
            run.outcomes = outcomes
            done(next((outcome for outcome in outcomes if not outcome.ok), outcomes[0]))

        if link.takes_runs:
            link.carry_run(run.sources, run.slots, run.keys, ended)
        else:
            image = None if run.staged is None else run.staged.image
            link.carry(run.sources[0], run.slots[0], run.keys[0], image, done, run.source_is_bad)
        self._begun(run.moves)

    def _end(self, run: _Run[Kind], outcome: Outcome) -> None:
        """Publish the copies that are whole, and free the slots of the others. `outcome` is of all blocks, where they
        have none each."""
        residency, link = self._residency, run.link
        outcomes = run.outcomes or [outcome] * len(run.moves)
        whole: list[int] = []
        for row, error, each in zip(run.rows, run.errors, outcomes, strict=True):
            link.judge(run.number, each, is_of_another=run.has_bad_source)
            if each.ok:
                if (header := each.header) is None:  # it is as in the source
                    residency.note_stored(row, link.destination, 0, 0, error)
                else:
                    residency.note_stored(row, link.destination, header.codec, header.stored_bytes, header.error)
                whole.append(row)
            else:
                link.destination_tier.free(residency.detach(row, link.destination))
        for chain in residency.rows.chains_of(whole):
            residency.publish_run(chain, link.destination, link.clock.monotonic_ns())
        self._release(run.moves[0], run.staged)
        for move, each in zip(run.moves, outcomes, strict=True):
            self._ended(move, each)
            assert move.outcome is not None
            if not move.outcome.done():
                move.outcome.set_result(each)

    def end(self, move: Kind) -> None:
        """Remove `move` from the moves under way, and unpin its block. A second call does nothing."""
        if self.under_way.get(move.token) is move:
            del self.under_way[move.token]
            self.without_slot.discard(move.token)
            self._residency.unpin_run([move.token])

    def _is_wanted(self, move: Kind, row: int) -> bool:
        residency, link = self._residency, move.link
        is_there = row >= 0 and residency.has(row, link.source)
        if is_there and link.is_for_exact and residency.exactness.is_lossy(row, link.source):
            return False
        return is_there and move.waiters > 0 and not residency.is_in(row, link.destination)

    def _begun(self, moves: Sequence[Kind]) -> None:
        """Note that the destination has the transfer of `moves`."""

    def _ended(self, move: Kind, outcome: Outcome) -> None:
        """Note that the transfer has ended, in this turn of the loop; `copied` returns in the next turn."""
