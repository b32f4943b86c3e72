"""Links and moves carry blocks from one tier to another.

A link is one direction between two tiers: its lane, its breaker, and the way in which bytes cross. A move carries one
block along a link, once however many callers ask. The block is pinned, a slot is found, the copy is attached as
FILLING, the transfer waits in the lane; then the copy is published, or its slot is freed. Promotion, demotion,
write-back, sharing and straight reads decide which block moves, when, and what follows: each of them gives a coroutine
that awaits `copied` and judges the outcome. When the destination has a codec, the block gets its coded form before it
gets a slot (`staging.py`). Invariants: a block is pinned from `add` until `end`. A block has one move of a kind at a
time. A slot is readable only after its bytes were verified, and is given back if it is not used. Staged data is
released once. Damage removes blocks by force, pinned or not, so each wait is followed by a new lookup of the token. No
call blocks.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Coroutine, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Generic, TypeVar

from kvstore_tiers.base import Completion, Outcome, OutcomeKind, Slot, Tier
from kvstore_tiers.segments import AlignedBuffer, Segment
from kvstored.clock import NS_PER_S, Clock
from kvstored.store.blocks import Residency
from kvstored.store.degraded.breaker import TierBreaker
from kvstored.store.transfer.lane import Priority, Refused
from kvstored.store.transfer.mover import LaneTransfer, Mover
from kvstored.store.transfer.staging import CodecStaging, StagedImage

log = logging.getLogger(__name__)


def lane_name(tiers: Sequence[str], source: int, destination: int) -> str:
    """Return the name of the lane that copies from the tier at position `source` to the one at `destination`:
    "nvme→host".
    """
    return f"{tiers[source]}→{tiers[destination]}"


class TierLink:
    """A way to copy blocks from the tier at `source` to the tier at `destination`, through the lane `lane`. `breaker`
    belongs to the slower of the two tiers, None when both are memory. `staging` is set when the destination has a
    codec: a block is coded there before it gets a slot.

    The tier that can reach the memory of the other tier moves and verifies the bytes: the source's `move_out` fills the
    destination's slot, or the destination's `move_in` reads the source's slot. When both tiers can, the slower one
    moves the bytes. A source that lends files is read by a destination that loads files. When neither tier can, or when
    the source's bytes must be decoded first, the bytes pass through a buffer that the source fills.
    """

    def __init__(
        self,
        source: int,
        destination: int,
        tiers: Sequence[Tier],
        lane: str,
        mover: Mover,
        clock: Clock,
        breaker: TierBreaker | None = None,
        staging: CodecStaging | None = None,
    ) -> None:
        self.staging = staging
        self.source, self.destination = source, destination
        self.destination_tier = tiers[destination]
        self.lane, self.mover, self.clock = mover.lanes[lane], mover, clock
        self.breaker = breaker
        self._from, self._to = tiers[source], tiers[destination]
        self._is_upwards = destination < source
        self._is_by_file = self._from.info.lends_files and self._to.info.loads_files
        self.is_for_exact = self._to.info.kind == "keyed"  # others find its blocks by their keys alone
        self._is_as_put = self._from.info.is_in_memory and self._from.info.coding.is_none

    @property
    def is_open(self) -> bool:
        """True when blocks may be moved along this link now: the circuit breaker of the slower tier allows it."""
        if self.breaker is None:
            return True
        return self.breaker.serves_reads if self._is_upwards else self.breaker.takes_writes

    @property
    def spare_in_s(self) -> float:
        """The seconds until the lane's byte rate allows a copy that no request waits for; 0 if it allows one now."""
        now_ns = self.clock.monotonic_ns()
        return (self.lane.spare_at_ns(now_ns) - now_ns) / NS_PER_S

    async def stage(self, source: Slot, key: bytes, whole_bytes: int, *, takes_lossy: bool) -> StagedImage | Outcome:
        """Bring the block `key` in the slot `source` into the form of the destination's codec (`CodecStaging.stage`).
        `whole_bytes` is the size of a slot for the block as it is. The destination must have a codec."""
        assert self.staging is not None
        return await self.staging.stage(self._from, source, key, whole_bytes, takes_lossy=takes_lossy)

    def carry(
        self, source: Slot, slot: Slot, key: bytes, image: Segment | None, done: Completion,
        unreadable: Callable[[], None],
    ) -> None:  # fmt: skip
        """Copy the block `key` from the slot `source`, or its coded `image` if there is one, to `slot`, and call `done`
        with the outcome. `unreadable` is called when reading `source` into a buffer between the tiers has failed.
        """
        if image is not None:
            self._to.move_in(slot, image, key, done)
        elif self._is_by_file:
            self._from.lend(source, self._to.loader(slot, key), done)
        elif self._to.info.is_in_memory and (self._is_upwards or not self._is_as_put):
            self._from.move_out(source, self._to.slot_segment(slot), key, done)
        elif self._is_as_put:
            self._to.move_in(slot, self._from.slot_segment(source), key, done)
        else:
            buffer = AlignedBuffer(slot.nbytes).segment(slot.nbytes)

            def store(outcome: Outcome) -> None:
                if outcome.ok:
                    self._to.move_in(slot, buffer, key, done)
                else:
                    unreadable()
                    done(outcome)

            self._from.move_out(source, buffer, key, store)

    def judge(self, number: int, outcome: Outcome, *, is_of_another: bool) -> None:
        """Report the `outcome` of the transfer `number` to the circuit breaker. `is_of_another` is true if the failure
        was in the other tier, which says nothing about the breaker's tier."""
        if self.breaker is None:
            return
        if self._is_by_file:
            is_of_another = outcome.kind is OutcomeKind.FAILED and not outcome.errno
        judged = Outcome(OutcomeKind.CANCELLED) if is_of_another else outcome
        self.breaker.ended(number, "read" if self._is_upwards else "write", judged)


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
    task: asyncio.Task[bool] | None = None
    outcome: asyncio.Future[Outcome | Unmoved] | None = None  # once it has a slot

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
        """Note that one caller no longer waits for this move. When no caller is left, the move is cancelled if it is
        still queued."""
        self.waiters -= 1
        if not self.waiters:
            self.cancel()


Kind = TypeVar("Kind", bound=BlockMove)


class Moves(Generic[Kind]):
    """The moves of one kind (promotions, say) that are under way, by the token of the block. `allocate(nbytes, tenant)`
    makes room for a move that has no slot yet.
    """

    def __init__(self, residency: Residency, allocate: Callable[[int, int], Awaitable[Slot | None]]) -> None:
        self._residency = residency
        self._allocate = allocate
        self.under_way: dict[int, Kind] = {}  # oldest first

    def __len__(self) -> int:
        return len(self.under_way)

    def __contains__(self, token: int) -> bool:
        return token in self.under_way

    def find(self, token: int) -> Kind | None:
        return self.under_way.get(token)

    def copies_of(self, tokens: Collection[int]) -> list[asyncio.Task[bool]]:
        """Return the tasks of moves under way for the blocks that `tokens` name."""
        return [move.task for token, move in self.under_way.items() if token in tokens and move.task is not None]

    def add(self, move: Kind) -> None:
        """Register `move` and pin its block; its transfer begins later."""
        self.under_way[move.token] = move
        self._residency.pin(self._residency.current(move.token))

    def begin(self, move: Kind, follow: Callable[[Kind], Coroutine[Any, Any, bool]], slot: Slot | None) -> Kind:
        """Register `move`, queue it at once if there is a `slot`, and run `follow(move)` in a task, which awaits the
        move's end and returns whether the block has its copy. The move goes on if its caller does not wait for it.
        Return `move`."""
        if move.token not in self.under_way:
            self.add(move)
        if slot is not None:
            self.queue(move, slot)
        loop = asyncio.get_running_loop()
        move.began_s = loop.time()
        move.task = loop.create_task(self._run(move, follow))
        return move

    async def _run(self, move: Kind, follow: Callable[[Kind], Coroutine[Any, Any, bool]]) -> bool:
        try:
            return await follow(move)
        except Exception:  # a mistake of ours must not leave its block pinned and its waiters waiting for ever
            log.exception("moving a block failed")
            return False
        finally:
            self.end(move)

    async def copied(self, move: Kind) -> Outcome | Unmoved:
        """Make room for `move` if it has no slot yet, queue it, and wait for its transfer. Return the outcome, or why
        no transfer began.
        """
        if move.outcome is None:
            if not self._is_wanted(move, self._residency.current(move.token)):
                return Unmoved.IN_VAIN
            while True:
                staged = await self._stage(move) if move.link.staging is not None else None
                if isinstance(staged, Outcome | Unmoved):
                    return staged
                slot = await self._find_room(move, move.nbytes if staged is None else staged.slot_bytes)
                if slot is None:
                    self._release(move, staged)
                    return Unmoved.NO_ROOM
                if staged is None or not staged.error or self._takes_lossy(self._residency.current(move.token)):
                    break
                move.link.destination_tier.free(slot)  # an exact put has come meanwhile
                self._release(move, staged)
            self.queue(move, slot, staged)
        assert move.outcome is not None
        outcome = await move.outcome
        move.ticket, move.outcome = 0, None
        return outcome

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

    def queue(self, move: Kind, slot: Slot, staged: StagedImage | None = None) -> None:
        """Queue the transfer of the block of `move`, or of its coded form `staged`, into `slot`. If no caller wants the
        move any more, free the slot instead."""
        residency, link, tier = self._residency, move.link, move.link.destination_tier
        move.outcome = ended = asyncio.get_running_loop().create_future()
        row = residency.current(move.token)
        if not self._is_wanted(move, row):
            tier.free(slot)
            self._release(move, staged)
            ended.set_result(Unmoved.IN_VAIN)
            return
        move.slot_bytes = slot.nbytes
        source, key = residency.slot(row, link.source), residency.key(row)
        error = max(residency.exactness.error(row, link.source), 0.0 if staged is None else staged.error)
        residency.attach(row, link.destination, slot, link.clock.monotonic_ns(), filling=True)
        if error:
            residency.exactness.note(row, link.destination, error)
        number, bad_sources, image = 0, list[Slot](), None if staged is None else staged.image

        def start(done: Completion) -> None:
            nonlocal number
            if link.breaker is not None:
                number = link.breaker.began()
            link.carry(source, slot, key, image, done, lambda: bad_sources.append(source))
            self._begun(move)

        def end(outcome: Outcome) -> None:
            link.judge(number, outcome, is_of_another=bool(bad_sources))
            self._release(move, staged)
            if outcome.ok:
                header = outcome.header
                if header is None:  # it is as in the source
                    residency.note_stored(row, link.destination, 0, 0, error)
                else:
                    residency.note_stored(row, link.destination, header.codec, header.stored_bytes, header.error)
                residency.publish(row, link.destination, link.clock.monotonic_ns())
            else:
                tier.free(residency.detach(row, link.destination))
            self._ended(move, outcome)
            if not ended.done():
                ended.set_result(outcome)

        transfer = LaneTransfer(start, end)
        nbytes = source.nbytes if staged is None else slot.nbytes
        ticket = link.mover.submit(link.lane.name, move.priority, nbytes, transfer, move.due_ns)
        if isinstance(ticket, Refused):
            self._release(move, staged)
            tier.free(residency.detach(row, link.destination))
            ended.set_result(Unmoved.LANE_FULL)
        else:
            move.ticket = ticket

    def end(self, move: Kind) -> None:
        """Remove `move` from the moves under way, and unpin its block. A second call does nothing."""
        if self.under_way.get(move.token) is move:
            del self.under_way[move.token]
            self._residency.unpin_run([move.token])

    def _is_wanted(self, move: Kind, row: int) -> bool:
        residency, link = self._residency, move.link
        is_there = row >= 0 and residency.has(row, link.source)
        if is_there and link.is_for_exact and residency.exactness.is_lossy(row, link.source):
            return False
        return is_there and move.waiters > 0 and not residency.is_in(row, link.destination)

    def _begun(self, move: Kind) -> None:
        """Note that the destination has the transfer."""

    def _ended(self, move: Kind, outcome: Outcome) -> None:
        """Note that the transfer has ended, in this turn of the loop; `copied` returns in the next turn."""
