"""Verifying DRAM copies before a lease is given on them: off, the first time a copy is leased, or each time.

Owns which copies were verified. The checksums are computed on the host tier's copy threads, without the GIL; what fails
is `Damage`'s to deal with. Catches what memory did to a block since it was stored: ECC counts on errors of one bit, a
stray write on none.
Invariant: the rows are pinned by the caller while they are verified.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial

from kvstore_tiers.base import Outcome, OutcomeKind, Slot
from kvstore_tiers.host import HostTier
from kvstored.movement.completions import CompletionQueue
from kvstored.movement.damage import Damage
from kvstored.residency import Residency
from kvstored.telemetry import Counters
from kvstored.tiering import HOST


class DramCheck:
    """`mode`: "off" | "first" | "always"."""

    def __init__(
        self,
        mode: str,
        residency: Residency,
        host: HostTier,
        completions: CompletionQueue,
        damage: Damage,
        counters: Counters,
    ) -> None:
        self._mode = mode
        self._residency = residency
        self._host = host
        self._completions = completions
        self._damage = damage
        self._counters = counters
        self._verified: dict[int, Slot] = {}  # by row: the copy that was verified; another copy has another generation

    def wanted(self, rows: Sequence[int]) -> list[int]:
        """Which of `rows` have a DRAM copy that has to be verified before it is leased."""
        if self._mode == "off":
            return []
        residency = self._residency
        mapped = [row for row in rows if residency.has(row, HOST)]
        if self._mode == "always":
            return mapped
        return [row for row in mapped if self._verified.get(row) != residency.slot(row, HOST)]

    async def verify(self, rows: Sequence[int]) -> set[int]:
        """The tokens of those of `rows` whose DRAM copy is damaged. Each is dealt with already."""
        wanted = self.wanted(rows)
        if not wanted:
            return set()
        left = len(wanted)
        bad: set[int] = set()
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def judge(row: int, token: int, slot: Slot, outcome: Outcome) -> None:
            nonlocal left
            left -= 1
            self._counters.add("verified_reads")
            still_there = self._residency.current(token) == row and self._residency.has(row, HOST)
            if outcome.ok:
                if self._mode == "first" and still_there:
                    self._verified[row] = slot
            elif outcome.kind is OutcomeKind.CORRUPT:
                bad.add(token)
                if still_there and self._residency.slot(row, HOST) == slot:
                    self._damage.on_host(row, outcome.message)
            if not left and not ended.done():
                ended.set_result(None)

        for row in wanted:
            slot = self._residency.slot(row, HOST)
            done = self._completions.to_loop(partial(judge, row, self._residency.token(row), slot))
            self._host.verify(slot, self._residency.key(row), done)
        await asyncio.shield(ended)
        return bad
