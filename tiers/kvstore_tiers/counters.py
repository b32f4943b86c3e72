"""Counts of a tier's transfers, kept from many threads.

The module owns the numbers and their lock; it does not judge them. Invariant: each transfer counts once, by how it
ended.
"""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import replace
from typing import Any

from kvstore_tiers.base import Outcome, OutcomeKind, TierStatistics


class TransferCounters:
    """Counts of reads, writes, bytes, errors, corrupt blocks since the tier was opened."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    def watch(self) -> TransferCounters:
        """Return a context manager, `with counters.watch() as count:`, that counts exceptions inside as errors, and
        lets them pass.
        """
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
        """Return these counts together with the tier's report of its space."""
        with self._lock:
            counts: dict[str, Any] = dict(self._counts)
        return replace(space, **counts)
