"""Verification of one block on NVMe through the daemon's own read path, at the priority of maintenance.

Owns a buffer of one block for as long as a verification runs. What it reads is discarded.
Invariant: the row is pinned while its slot is read, so the answer is about that very block.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from kvstore_tiers.base import Completion, Outcome, OutcomeKind, Tier
from kvstore_tiers.segments import AlignedBuffer
from kvstored.store.blocks import Residency
from kvstored.store.degraded.breaker import TierBreaker
from kvstored.store.transfer.lane import Priority, Refused
from kvstored.store.transfer.link import Mover, Transfer, lane_name


class Verification:
    """`on_damage(row, reason)` is called for a damaged block; the breaker judges these reads as all others."""

    def __init__(
        self,
        residency: Residency,
        nvme: Tier,
        mover: Mover,
        breaker: TierBreaker,
        on_damage: Callable[[int, str], None],
    ) -> None:
        self._residency = residency
        self._nvme = nvme
        self._mover = mover
        self._breaker = breaker
        self._on_damage = on_damage

    async def verify(self, row: int) -> Outcome | None:
        """How reading the NVMe copy of `row` ended; None when that cannot be said now. A bad one is dealt with."""
        residency, breaker = self._residency, self._breaker
        if not breaker.serves_reads:
            return None
        durable = residency.durable
        lane = lane_name(residency.tiers, durable, residency.mapped)
        slot, key, token = residency.slot(row, durable), residency.key(row), residency.token(row)
        buffer = AlignedBuffer(slot.nbytes)
        ended: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        number = 0

        def start(done: Completion) -> None:
            nonlocal number
            number = breaker.began()
            self._nvme.read(slot, key, [buffer.segment(slot.nbytes)], done)

        def done(outcome: Outcome) -> None:
            breaker.ended(number, "read", outcome)
            ended.set_result(outcome)

        residency.pin(row)
        try:
            ticket = self._mover.submit(lane, Priority.MAINTENANCE, slot.nbytes, Transfer(start, done))
            if isinstance(ticket, Refused):
                return None
            outcome = await asyncio.shield(ended)
        finally:
            if residency.current(token) == row:
                residency.unpin(row)
        if outcome.kind is not OutcomeKind.CORRUPT:
            return outcome if outcome.ok else None
        if residency.current(token) == row and residency.has(row, durable) and residency.slot(row, durable) == slot:
            if residency.being_filled(row):
                return None  # it is being promoted: that read finds it out, and deals with it
            self._on_damage(row, outcome.message)
        return outcome
