"""Verifying DRAM copies before a lease is given on them: off, the first time a copy is leased, or each time; where
clients can write to the memory, each time in any case.

Owns which copies were verified. The checksums are computed on the host tier's copy threads, without the GIL; what fails
is handled by `Damage`. Catches what memory did to a block since it was stored: ECC counts on errors of one bit, a
stray write on none.
Invariant: the rows are pinned by the caller while they are verified.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Sequence
from functools import partial

from kvstore_proto.arena import ALIGNMENT_BYTES
from kvstore_tiers.base import Outcome, OutcomeKind, Slot
from kvstore_tiers.host import HostTier
from kvstored.completions import CompletionQueue
from kvstored.store.blocks import Residency
from kvstored.store.transfer.damage import Damage
from kvstored.telemetry import Counters

_NOWHERE = 0xFFFFFFFFFFFFFFFF


class _Verified:
    """By row, which copy was verified: its place and its generation there. 12 bytes a row up to the last one noted."""

    def __init__(self) -> None:
        self._place = array("Q")
        self._generation = array("I")

    def note(self, row: int, slot: Slot) -> None:
        missing = row + 1 - len(self._place)
        if missing > 0:
            missing = max(missing, len(self._place) // 8)
            self._place.extend(array("Q", [_NOWHERE]) * missing)
            self._generation.extend(array("I", [0]) * missing)
        self._place[row], self._generation[row] = _place(slot), slot.generation & 0xFFFFFFFF

    def has(self, row: int, slot: Slot) -> bool:
        if row >= len(self._place) or self._place[row] != _place(slot):
            return False
        return self._generation[row] == slot.generation & 0xFFFFFFFF


def _place(slot: Slot) -> int:
    return slot.container << 32 | slot.offset // ALIGNMENT_BYTES


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
        self._verified = _Verified()

    def wanted(self, rows: Sequence[int]) -> list[int]:
        """Which of `rows` have a DRAM copy that has to be verified before it is leased."""
        writable, residency = self._host.writable, self._residency
        if self._mode == "off" and not writable:
            return []
        mapped = [row for row in rows if residency.has(row, residency.mapped)]
        if self._mode == "always":
            return mapped
        container = residency.copies[residency.mapped].container
        return [row for row in mapped if container[row] in writable or not self._is_trusted(row)]

    def _is_trusted(self, row: int) -> bool:
        return self._mode == "off" or self._verified.has(row, self._residency.slot(row, self._residency.mapped))

    async def verify(self, rows: Sequence[int]) -> set[int]:
        """The tokens of those of `rows` whose DRAM copy is damaged. Each is handled already."""
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
            still_there = self._residency.current(token) == row and self._residency.has(row, self._residency.mapped)
            if outcome.ok:
                if self._mode == "first" and still_there:
                    self._verified.note(row, slot)
            elif outcome.kind is OutcomeKind.CORRUPT:
                bad.add(token)
                if still_there and self._residency.slot(row, self._residency.mapped) == slot:
                    self._damage.found(self._residency.mapped, row, outcome.message)
            if not left and not ended.done():
                ended.set_result(None)

        for row in wanted:
            slot = self._residency.slot(row, self._residency.mapped)
            done = self._completions.to_loop(partial(judge, row, self._residency.token(row), slot))
            self._host.verify(slot, self._residency.key(row), done)
        await asyncio.shield(ended)
        return bad
