"""The integrity of a running daemon: the scrubber, the orphans, the invariant checker.

Composes and reports; each part decides for itself. No request waits for any of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from kvstored.clock import NS_PER_S
from kvstored.health.invariants import InvariantChecker, InvariantReport
from kvstored.health.scrub.device_scrubber import DeviceScrubber
from kvstored.health.scrub.scrubber import POSITION_FILE, Scrubber, ScrubReport
from kvstored.health.scrub.verification import Verification
from kvstored.health.scrub.worker import Settings
from kvstored.store.assembly import Store
from kvstored.store.blocks.orphans import find, none_of, snapshot
from kvstored.unsaved import Unsaved

Task = Callable[[], Coroutine[Any, Any, None]]
ORPHANS_S = 1.0  # how soon after a block was taken by force its descendants are the first to leave
ORPHANS_REST = 50  # ... or this multiple of the time that finding them takes


@dataclass
class IntegrityReport:
    """What `kvctl status` shows."""

    scrub: ScrubReport = field(default_factory=ScrubReport)
    books: InvariantReport = field(default_factory=InvariantReport)
    orphaned_blocks: int = 0


class Integrity:
    """`tasks` run until they are cancelled. `is_idle()` says whether the daemon has no request."""

    def __init__(self, store: Store, is_idle: Callable[[], bool], unsaved: Unsaved | None = None) -> None:
        self._store = store
        self._counted_at = -1  # how many blocks damage had orphaned then; recovery may have found some before
        self.report = IntegrityReport()
        self.scrubber = self._make_scrubber()
        if self.scrubber is not None:
            self.scrubber.unsaved = unsaved or self.scrubber.unsaved
            self.report.scrub = self.scrubber.report
        self.device_scrubber = self._make_device_scrubber()
        self.books = InvariantChecker(store, is_idle)
        self.report.books = self.books.report

    def tasks(self) -> dict[str, Task]:
        """By name, what to run."""
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

    def _make_device_scrubber(self) -> DeviceScrubber | None:
        store = self._store
        if not store.device_check.tiers or not store.config.scrub.enabled:
            return None
        return DeviceScrubber(store.config.scrub, store.residency, store.device_check, store.counters)

    def _make_scrubber(self) -> Scrubber | None:
        store, scrub = self._store, self._store.config.scrub
        if store.nvme is None or store.writeback is None or store.breaker is None or not scrub.enabled:
            return None
        settings = Settings(
            directory=str(store.config.nvme.path),
            position=str(store.config.daemon.state_dir / POSITION_FILE),
            rate_bytes=scrub.rate_bytes,
            interval_s=scrub.interval_s,
        )
        verification = Verification(
            store.residency,
            store.nvme,
            store.mover,
            store.breaker,
            partial(store.damage.found, store.residency.durable),
        )
        return Scrubber(
            settings, store.residency, store.nvme, verification, store.writeback.sync, store.clock, store.counters,
            start_s=scrub.start_s,
        )  # fmt: skip

    async def _watch_orphans(self) -> None:
        now_ns = self._store.clock.monotonic_ns
        while True:
            began_ns = now_ns()
            if self._counted_at != self._store.counters["orphaned_blocks"] or self.report.orphaned_blocks:
                await self.count_orphans()
            await asyncio.sleep(max(ORPHANS_S, ORPHANS_REST * (now_ns() - began_ns) / NS_PER_S))

    async def count_orphans(self) -> None:
        """Find them, and have them leave first; a thread does the walking."""
        self._counted_at = self._store.counters["orphaned_blocks"]
        tiers = len(self._store.tiers)
        chains = snapshot(self._store.residency)
        orphans = none_of(tiers) if chains is None else await asyncio.to_thread(find, chains, tiers)
        self.report.orphaned_blocks = len(orphans.tokens)
        self._store.orphans.replace(orphans.by_tier)
