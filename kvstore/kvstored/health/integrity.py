"""The integrity of a running daemon: the scrubber, the orphans, the invariant checker.

The module composes and reports; each part decides for itself. No request waits for any of it.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from kvstored.clock import NS_PER_S
from kvstored.health.scrub.scrubber import Scrubber, ScrubPositionStore, ScrubReport
from kvstored.health.scrub.worker import ScrubSettings
from kvstored.store.assembly import Store
from kvstored.store.blocks.check import TreeCheck, check
from kvstored.store.blocks.orphans import find, none_of, snapshot
from kvstored.store.blocks.rows import as_array

if TYPE_CHECKING:
    from kvstored.health.scrub.device_scrubber import DeviceScrubber

log = logging.getLogger(__name__)
Task = Callable[[], Coroutine[Any, Any, None]]
ORPHANS_S = 1.0  # how soon after a block was taken by force its descendants are the first to leave
ORPHANS_REST = 50  # ... or this multiple of the time that finding them takes
SLICE_NS = 500_000
PAUSE_S = 0.005
BUSY_S, LAST_BUSY_S = 1.0, 60.0  # before the next try, longer after each walk during which something moved
MAX_REPORTED = 8
SLICE_ROWS = 4096


@dataclass
class InvariantReport:
    """The results of the invariant checks: how many there were, when the last one ended (wall-clock seconds), and the
    broken invariants in words.
    """

    walks: int = 0
    last_walk_s: float = 0.0
    rows: int = 0
    broken: list[str] = field(default_factory=list)


class InvariantChecker:
    """A checker that compares the block index with itself and with the tiers' slots while the daemon is idle, as
    `is_idle()` says. A broken invariant is a bug in the daemon: it is logged once, at error level, and shown until the
    restart.

    The index is checked in slices of half a millisecond; longer pieces are done in a thread, on a copy. A check during
    which anything changed counts for nothing, and a finding is looked for a second time, at once and in one piece,
    before it is reported."""

    def __init__(self, store: Store, is_idle: Callable[[], bool]) -> None:
        self._store = store
        self._is_idle = is_idle
        self.report = InvariantReport()

    async def run(self, interval_s: float) -> None:
        """Check the block index every `interval_s` seconds, as soon as the daemon is idle. Run it as a task; it does
        not end by itself."""
        while True:
            await asyncio.sleep(interval_s)
            pause_s = BUSY_S
            while not self._is_idle() or not await self.walk():
                await asyncio.sleep(pause_s)
                pause_s = min(LAST_BUSY_S, 2 * pause_s)

    async def walk(self) -> bool:
        """Check the whole block index once. Return False if it changed meanwhile, so that the check counts for
        nothing."""
        store, now_ns = self._store, self._store.clock.monotonic_ns
        before = self._state()
        walk = TreeCheck(store.residency)
        slice_ended_ns = now_ns() + SLICE_NS
        held: list[str] = []
        for _ in chain(walk.walk_in_steps(), self._check_held(held)):
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
        """Return a value that differs whenever something moved. Readers, such as the scrubber, move nothing."""
        residency = self._store.residency
        return residency.changes, len(residency.tenants)

    def _check_held(self, faults: list[str]) -> Iterator[None]:
        """Ask the NVMe tier whether it agrees that each copy's slot is taken, in that generation; add faults to
        `faults`.
        """
        store, copies = self._store, self._store.residency.copies[-1]
        if store.nvme is None:
            return
        faults += store.nvme.check_books()
        for first in range(0, len(copies.state), SLICE_ROWS):
            rows = first + np.flatnonzero(np.frombuffer(copies.state, np.uint8)[first : first + SLICE_ROWS])
            faults += store.nvme.check_held(
                as_array(copies.container)[rows],
                as_array(copies.offset)[rows],
                as_array(copies.generation)[rows],
            )
            yield


@dataclass
class IntegrityReport:
    """A report on the integrity of the store, as `kvctl status` shows it: the scrubber, the invariant checks, and the
    number of orphans (blocks without a stored parent).
    """

    scrub: ScrubReport = field(default_factory=ScrubReport)
    books: InvariantReport = field(default_factory=InvariantReport)
    orphaned_blocks: int = 0


class Integrity:
    """The integrity checks of a running daemon. `tasks` returns the tasks that do them. `is_idle()` says whether the
    daemon has no request. `place` keeps the position of the scrubber (which reads NVMe in the background) over
    restarts."""

    def __init__(self, store: Store, is_idle: Callable[[], bool], place: ScrubPositionStore) -> None:
        self._store = store
        self._counted_at = -1  # how many blocks damage had orphaned then; recovery may have found some before
        self.report = IntegrityReport()
        self.scrubber = self._make_scrubber(place)
        if self.scrubber is not None:
            self.report.scrub = self.scrubber.report
        self.device_scrubber: DeviceScrubber | None = None
        if store.device_check.tiers and store.config.scrub.enabled:
            from kvstored.health.scrub.device_scrubber import DeviceScrubber  # few nodes have a tier in a device

            self.device_scrubber = DeviceScrubber(store)
        self.books = InvariantChecker(store, is_idle)
        self.report.books = self.books.report

    def tasks(self) -> dict[str, Task]:
        """Return the tasks that check the daemon, by name. They run until they are cancelled."""
        scrub = self._store.config.scrub
        wanted: dict[str, Task] = {"orphans": self._watch_orphans}
        if scrub.books_s:
            wanted["books"] = lambda: self.books.run(scrub.books_s)
        if self.scrubber is not None:
            wanted["scrubber"] = self.scrubber.run
        if self._store.device_check.tiers:
            wanted["device-check"] = self._store.device_check.settle
        if self.device_scrubber is not None:
            wanted["device-scrubber"] = self.device_scrubber.run
        return wanted

    def _make_scrubber(self, place: ScrubPositionStore) -> Scrubber | None:
        store, scrub = self._store, self._store.config.scrub
        if store.writeback is None or not scrub.enabled:
            return None
        settings = ScrubSettings(
            directory=str(store.config.nvme.path),
            position="",
            rate_bytes=scrub.rate_bytes,
            interval_s=scrub.interval_s,
        )
        return Scrubber(settings, store, place)

    async def _watch_orphans(self) -> None:
        now_ns = self._store.clock.monotonic_ns
        while True:
            began_ns = now_ns()
            if self._counted_at != self._store.counters["orphaned_blocks"] or self.report.orphaned_blocks:
                await self.count_orphans()
            await asyncio.sleep(max(ORPHANS_S, ORPHANS_REST * (now_ns() - began_ns) / NS_PER_S))

    async def count_orphans(self) -> None:
        """Find the orphans (stored blocks that cannot be reached, because a block before them is gone), and have them
        evicted first. A thread does the search."""
        self._counted_at = self._store.counters["orphaned_blocks"]
        tiers = len(self._store.tiers)
        chains = snapshot(self._store.residency)
        orphans = none_of(tiers) if chains is None else await asyncio.to_thread(find, chains, tiers)
        self.report.orphaned_blocks = len(orphans.tokens)
        self._store.orphans.replace(orphans.by_tier)
