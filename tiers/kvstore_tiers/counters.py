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
    """Counts of a tier's reads, writes, bytes, errors and corrupt blocks since it was opened. Any thread may count."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    def watch(self) -> TransferCounters:
        """Return this object for a `with` block, `with counters.watch() as count:`. An exception in the block is
        counted as an error and raised on.
        """
        return self

    def __enter__(self) -> TransferCounters:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception):
            self.failed()

    def read(self, outcome: Outcome) -> Outcome:
        """Count one read of a block, which ended with `outcome`, and return the outcome unchanged."""
        return self._count(outcome, "reads", "bytes_read")

    def wrote(self, outcome: Outcome) -> Outcome:
        """Count one write of a block, which ended with `outcome`, and return the outcome unchanged."""
        return self._count(outcome, "writes", "bytes_written")

    def wrote_all(self, blocks: int, nbytes: int) -> None:
        """Count the writes of `blocks` blocks, which have all succeeded, with `nbytes` bytes together."""
        with self._lock:
            self._counts["writes"] += blocks
            self._counts["bytes_written"] += nbytes

    def failed(self) -> None:
        """Count one error that is not the outcome of a transfer."""
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
        """Return `space`, a tier's statistics with sizes and state, with these counts filled in."""
        with self._lock:
            counts: dict[str, Any] = dict(self._counts)
        return replace(space, **counts)
