"""Counts of a tier's transfers, kept from many threads.

Owns the numbers and their lock; never judges them. Invariant: each transfer counts once, by how it ended.
"""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import replace
from typing import Any

from kvstore_tiers.base import Outcome, OutcomeKind, TierStatistics


class TransferCounters:
    """Reads, writes, bytes, errors, corrupt blocks since the tier was opened."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    def watch(self) -> TransferCounters:
        """`with counters.watch() as count:` counts what is raised inside as an error, and lets it pass."""
        return self

    def __enter__(self) -> TransferCounters:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception):
            self.failed()

    def read(self, outcome: Outcome) -> Outcome:
        """Count a read by its outcome and return that."""
        return self._count(outcome, "reads", "bytes_read")

    def wrote(self, outcome: Outcome) -> Outcome:
        """Count a write by its outcome and return that."""
        return self._count(outcome, "writes", "bytes_written")

    def failed(self) -> None:
        """Count an error that belongs to no transfer."""
        with self._lock:
            self._counts["errors"] += 1

    def _count(self, outcome: Outcome, transfers: str, nbytes: str) -> Outcome:
        with self._lock:
            if outcome.ok:
                self._counts[transfers] += 1
                self._counts[nbytes] += outcome.nbytes
            elif outcome.kind is OutcomeKind.CORRUPT:
                self._counts["corrupt"] += 1
            elif outcome.kind is OutcomeKind.FAILED:
                self._counts["errors"] += 1
        return outcome

    def report(self, space: TierStatistics) -> TierStatistics:
        """Return these counts together with what the tier says of its space."""
        with self._lock:
            counts: dict[str, Any] = dict(self._counts)
        return replace(space, **counts)
