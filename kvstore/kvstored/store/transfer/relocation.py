"""Copying blocks from slot to slot of one tier, so that a container can be emptied without evicting them.

Owns how the bytes travel: by the tier's own threads in memory, through the lane of its medium on a disk, where they
are charged to the endurance budget. Never decides which block moves, and changes no index.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from kvstore_tiers.base import Completion, Outcome, OutcomeKind, Slot, Tier
from kvstored.completions import CompletionQueue
from kvstored.store.endurance.budget import medium_bytes
from kvstored.store.transfer.group_commit import GroupCommit
from kvstored.store.transfer.lane import Priority, Refused
from kvstored.store.transfer.mover import LaneTransfer, Mover

AT_ONCE = 32  # copies in flight


class Copy(NamedTuple):
    key: bytes
    source: Slot
    target: Slot


class MemoryRelocation:
    """A component that copies blocks from slot to slot within a tier in memory."""

    def __init__(self, tier: Tier, completions: CompletionQueue) -> None:
        self._tier = tier
        self._completions = completions

    def affords(self, nbytes: int) -> bool:
        """Return whether `nbytes` of slots may be written now; in memory always True."""
        return True

    async def copy(self, copies: Sequence[Copy]) -> list[Outcome]:
        """Copy each block of `copies` to its target slot. Return one outcome for each, in their order."""
        return await _copy_some_at_once(copies, self._start)

    def _start(self, copy: Copy) -> asyncio.Future[Outcome]:
        return self._completions.outcome_of(partial(_relocate, self._tier, copy))


class LaneRelocation:
    """A component that copies blocks from slot to slot within the durable tier, through the lane `lane` of its medium.
    The outcome of each copy is reported to the circuit breaker of `commit`."""

    def __init__(self, tier: Tier, mover: Mover, lane: str, commit: GroupCommit) -> None:
        self._tier = tier
        self._mover = mover
        self._lane = lane
        self._commit = commit
        self._breaker, self._endurance = commit.gate.breaker, commit.gate.endurance

    def affords(self, nbytes: int) -> bool:
        left_bytes = self._endurance.left_bytes
        return self._breaker.takes_writes and (left_bytes is None or left_bytes >= medium_bytes(nbytes))

    async def copy(self, copies: Sequence[Copy]) -> list[Outcome]:
        """Copy each block of `copies` to its target slot, and sync. Return one outcome for each, in their order. An
        outcome has a header when its copy was written, also if the sync after it failed.
        """
        # Two records of one block in one commit would leave it open which is newer.
        synced = await self._commit.sync()
        if not synced.ok:
            return [synced] * len(copies)
        outcomes = await _copy_some_at_once(copies, self._start)
        if not any(outcome.ok for outcome in outcomes):
            return outcomes
        synced = await self._commit.sync()
        if synced.ok:
            return outcomes
        return [synced._replace(header=outcome.header) if outcome.ok else outcome for outcome in outcomes]

    def _start(self, copy: Copy) -> asyncio.Future[Outcome]:
        ended: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        cost_bytes = medium_bytes(copy.target.nbytes)
        if not self._breaker.takes_writes or not self._endurance.charge_unasked(cost_bytes):
            ended.set_result(Outcome(OutcomeKind.CANCELLED, message="writes are refused"))
            return ended
        number = 0

        def start(done: Completion) -> None:
            nonlocal number
            if not self._breaker.takes_writes:
                done(Outcome(OutcomeKind.CANCELLED, message="its tier is shed"))
                return
            if _relocate(self._tier, copy, done):
                number = self._breaker.began()

        def end(outcome: Outcome) -> None:
            if number:
                self._breaker.ended(number, "write", outcome)
            if outcome.kind is OutcomeKind.CANCELLED:
                self._endurance.refund_unasked(cost_bytes)
            ended.set_result(outcome)

        moved_bytes = copy.source.nbytes + copy.target.nbytes  # it is read and written
        ticket = self._mover.submit(self._lane, Priority.DEMOTION, moved_bytes, LaneTransfer(start, end))
        if isinstance(ticket, Refused):
            end(Outcome(OutcomeKind.CANCELLED, message="the lane's queue is full"))
        return ended


Relocation = MemoryRelocation | LaneRelocation


async def _copy_some_at_once(copies: Sequence[Copy], start: Callable[[Copy], asyncio.Future[Outcome]]) -> list[Outcome]:
    outcomes: list[Outcome] = []
    for first in range(0, len(copies), AT_ONCE):
        outcomes += await asyncio.gather(*map(start, copies[first : first + AT_ONCE]))
    return outcomes


def _relocate(tier: Tier, copy: Copy, done: Completion) -> bool:
    """Begin the copy. Return whether it has begun; where it has not, `done` was called."""
    try:
        tier.relocate(copy.source, copy.target, copy.key, done)
    except RuntimeError as error:  # its block was taken by force meanwhile
        done(Outcome(OutcomeKind.CANCELLED, message=str(error)))
        return False
    return True
