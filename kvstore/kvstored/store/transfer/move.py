"""A move: one block gets a copy in another tier, once however many callers ask.

Pin, make room, queue, wait, unpin stands here for every movement. Which block moves, when, and what follows belong to
promotion, demotion, write-back, sharing and straight reads: each gives a coroutine that awaits `copied` and judges its
outcome. Owns the moves under way of one kind.
Invariants: a block is pinned from `add` until `end`; a slot that is not used is given back; a block has one move of a
kind at a time; damage removes blocks by force, pinned or not, so the token is looked up again after each wait.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Coroutine
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any, Generic, TypeVar

from kvstore_tiers.base import Outcome, Slot
from kvstored.store.blocks import Residency
from kvstored.store.transfer.lane import Priority
from kvstored.store.transfer.link import Link
from kvstored.store.transfer.room import Room

log = logging.getLogger(__name__)


class Unmoved(Enum):
    """Why no transfer of a block began, instead of its outcome."""

    NO_ROOM = "no room"
    IN_VAIN = "the copy to read from has gone, another one is there already, or nothing waits for it"
    LANE_FULL = "the lane is full"


@dataclass(slots=True, eq=False)
class Move:
    """One block on its way along `link`. `waiters` are the callers who still want it; the last of those that wait first
    stops waiting at `due_ns`. `ticket` is its place in the lane, 0 while it has none."""

    token: int
    nbytes: int  # of its slot
    tenant: int
    link: Link
    priority: Priority
    due_ns: int | None = None
    waiters: int = 1
    ticket: int = 0
    began_s: float = 0.0  # by the loop's clock
    task: asyncio.Task[bool] | None = None
    outcome: asyncio.Future[Outcome | Unmoved] | None = None  # once it has a slot

    @property
    def is_refused(self) -> bool:
        """Say whether the move came to nothing as soon as it had a slot."""
        return self.outcome is not None and self.outcome.done() and isinstance(self.outcome.result(), Unmoved)

    def raise_priority(self, priority: Priority, due_ns: int | None = None) -> None:
        self.priority, self.due_ns = priority, due_ns
        if self.ticket:
            self.link.raise_priority(self.ticket, priority, due_ns)

    def cancel(self) -> None:
        """End the move as cancelled if its transfer waits in the lane; what is in flight ends by itself."""
        if self.ticket:
            self.link.cancel(self.ticket)

    def give_up(self) -> None:
        """One caller waits no longer. Without any the move is cancelled."""
        self.waiters -= 1
        if not self.waiters:
            self.cancel()


Kind = TypeVar("Kind", bound=Move)


class Moves(Generic[Kind]):
    """The moves of one kind under way, by token, into the tier of `room`. Where room is made for one, `is_patient` says
    whether it waits a little for copies in flight."""

    def __init__(self, residency: Residency, room: Room, *, is_patient: bool = True) -> None:
        self._residency = residency
        self._room = room
        self._is_patient = is_patient
        self.under_way: dict[int, Kind] = {}  # oldest first

    def __len__(self) -> int:
        return len(self.under_way)

    def __contains__(self, token: int) -> bool:
        return token in self.under_way

    def find(self, token: int) -> Kind | None:
        return self.under_way.get(token)

    def copies_of(self, tokens: Collection[int]) -> list[asyncio.Task[bool]]:
        """Return the tasks of the moves of these blocks that are under way."""
        return [move.task for token, move in self.under_way.items() if token in tokens and move.task is not None]

    def add(self, move: Kind) -> None:
        """Pin the block of `move`, which begins later."""
        self.under_way[move.token] = move
        self._residency.pin(self._residency.current(move.token))

    def begin(self, move: Kind, follow: Callable[[Kind], Coroutine[Any, Any, bool]], slot: Slot | None) -> Kind:
        """Queue `move` at once where it has a `slot`, and let `follow` await its end. `follow` returns whether the
        block has its copy. The move goes on if its caller does not wait for it."""
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
        """Make room for `move` where it has none yet, queue it, and wait for the end of its transfer."""
        if move.outcome is None:
            if not self._is_wanted(move, self._residency.current(move.token)):
                return Unmoved.IN_VAIN
            slot = await self._room.allocate(move.nbytes, move.tenant, is_patient=self._is_patient)
            if slot is None:
                return Unmoved.NO_ROOM
            self.queue(move, slot)
        assert move.outcome is not None
        outcome = await move.outcome
        move.ticket, move.outcome = 0, None
        return outcome

    def queue(self, move: Kind, slot: Slot) -> None:
        """Queue the transfer of `move` into `slot`, unless it is in vain by now."""
        residency, link = self._residency, move.link
        move.outcome = asyncio.get_running_loop().create_future()
        row = residency.current(move.token)
        if not self._is_wanted(move, row):
            link.free(slot)
            move.outcome.set_result(Unmoved.IN_VAIN)
            return
        ended, begun = partial(self._ended, move, move.outcome), partial(self._begun, move)
        ticket = link.begin(row, slot, move.priority, ended, begun, move.due_ns)
        if ticket is None:
            move.outcome.set_result(Unmoved.LANE_FULL)
        else:
            move.ticket = ticket

    def end(self, move: Kind) -> None:
        """Forget `move` and unpin its block. Idempotent."""
        if self.under_way.get(move.token) is move:
            del self.under_way[move.token]
            self._residency.unpin_run([move.token])

    def _is_wanted(self, move: Kind, row: int) -> bool:
        residency, link = self._residency, move.link
        is_there = row >= 0 and residency.has(row, link.source)
        return is_there and move.waiters > 0 and not residency.is_in(row, link.destination)

    def _begun(self, move: Kind) -> None:
        """The destination has the transfer."""

    def _ended(self, move: Kind, outcome: asyncio.Future[Outcome | Unmoved], ended: Outcome) -> None:
        """The transfer has ended, in this turn of the loop; `copied` returns in the next."""
        if not outcome.done():
            outcome.set_result(ended)
