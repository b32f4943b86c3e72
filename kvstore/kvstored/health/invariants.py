"""The invariant checker: when the daemon is idle it compares residency with itself and with the tiers' slots.

Owns when to walk and what is reported; the judgement is `residency.check` and the tier's own (`check_books`,
`check_held`). The walk is cut into slices of half a millisecond; what takes longer in one piece is done in a thread, on
a copy. What changes meanwhile would look like a broken invariant: a walk during which anything moved counts for
nothing, and a finding is looked for a second time, at once and in one piece, before it is reported. A broken
invariant is a mistake of ours: it is logged once, loudly, and shown until the restart.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain

import numpy as np

from kvstored.clock import NS_PER_S
from kvstored.store.assembly import Store
from kvstored.store.blocks.check import Walk, check

log = logging.getLogger(__name__)
SLICE_NS = 500_000
PAUSE_S = 0.005
BUSY_S, LAST_BUSY_S = 1.0, 60.0  # before the next try, longer after each walk during which something moved
MAX_REPORTED = 8
SLICE_ROWS = 4096


@dataclass
class InvariantReport:
    walks: int = 0
    last_walk_s: float = 0.0
    rows: int = 0
    broken: list[str] = field(default_factory=list)


class InvariantChecker:
    """`run` is a task until it is cancelled."""

    def __init__(self, store: Store, is_idle: Callable[[], bool]) -> None:
        self._store = store
        self._is_idle = is_idle
        self.report = InvariantReport()

    async def run(self, interval_s: float) -> None:
        while True:
            await asyncio.sleep(interval_s)
            pause_s = BUSY_S
            while not self._is_idle() or not await self.walk():
                await asyncio.sleep(pause_s)
                pause_s = min(LAST_BUSY_S, 2 * pause_s)

    async def walk(self) -> bool:
        """One walk; False when something moved meanwhile."""
        store, now_ns = self._store, self._store.clock.monotonic_ns
        before = self._state()
        walk = Walk(store.residency)
        slice_ended_ns = now_ns() + SLICE_NS
        held: list[str] = []
        for _ in chain(walk.steps(), self._check_held(held)):
            if now_ns() >= slice_ended_ns:
                await asyncio.sleep(PAUSE_S)
                if self._state() != before:
                    return False
                slice_ended_ns = now_ns() + SLICE_NS
        shared = await asyncio.to_thread(walk.shared)
        if self._state() != before:
            return False
        faults = walk.faults or held or shared
        if faults:  # seen twice, the second time in one piece: then it is true
            held = []
            deque(self._check_held(held), maxlen=0)
            faults = check(store.residency) + held
        report = self.report
        report.walks += 1
        report.rows = walk.rows
        report.last_walk_s = store.clock.wall_ns() / NS_PER_S
        self._report_faults(faults)
        return True

    def _report_faults(self, faults: list[str]) -> None:
        new = [fault for fault in faults if fault not in self.report.broken]
        if not new:
            return
        self._store.counters.add("broken_invariants", len(new))
        self.report.broken = (self.report.broken + new)[:MAX_REPORTED]
        log.critical(
            "the daemon's own books do not agree, please report this as a bug (%d findings): %s",
            len(new), "; ".join(new[:MAX_REPORTED]),
        )  # fmt: skip

    def _state(self) -> object:
        """What differs whenever something moved. What only reads, the scrubber above all, moves nothing."""
        return self._store.residency.changes

    def _check_held(self, faults: list[str]) -> Iterator[None]:
        """Whether the NVMe tier agrees that each copy's slot is taken, in that generation; adds to `faults`."""
        store, copies = self._store, self._store.residency.copies[-1]
        if store.nvme is None:
            return
        faults += store.nvme.check_books()
        for first in range(0, len(copies.state), SLICE_ROWS):
            rows = first + np.flatnonzero(np.frombuffer(copies.state, np.uint8)[first : first + SLICE_ROWS])
            faults += store.nvme.check_held(
                np.frombuffer(copies.container, np.uint32)[rows],
                np.frombuffer(copies.offset, np.uint64)[rows],
                np.frombuffer(copies.generation, np.uint64)[rows],
            )
            yield
