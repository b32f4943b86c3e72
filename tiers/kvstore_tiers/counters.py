"""Counts of a tier's transfers, kept from many threads.

Owns the numbers and their lock; never judges them. Invariant: each transfer counts once, by how it ended.
"""

from __future__ import annotations

import threading

from kvstore_tiers.base import Outcome, OutcomeKind, TierState, TierStatistics


class TransferCounters:
    """Reads, writes, bytes, errors, corrupt blocks since the tier was opened."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._reads = self._writes = self._bytes_read = self._bytes_written = self._errors = self._corrupt = 0

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
        with self._lock:
            if outcome.ok:
                self._reads += 1
                self._bytes_read += outcome.nbytes
            else:
                self._count_failure(outcome)
        return outcome

    def wrote(self, outcome: Outcome) -> Outcome:
        """Count a write by its outcome and return that."""
        with self._lock:
            if outcome.ok:
                self._writes += 1
                self._bytes_written += outcome.nbytes
            else:
                self._count_failure(outcome)
        return outcome

    def failed(self) -> None:
        """Count an error that belongs to no transfer."""
        with self._lock:
            self._errors += 1

    def _count_failure(self, outcome: Outcome) -> None:
        if outcome.kind is OutcomeKind.CORRUPT:
            self._corrupt += 1
        elif outcome.kind is OutcomeKind.FAILED:
            self._errors += 1

    def report(
        self,
        *,
        state: TierState,
        capacity_bytes: int,
        used_bytes: int,
        blocks: int,
        used_by: dict[str, int],
        quarantined_slots: int = 0,
        message: str = "",
    ) -> TierStatistics:
        """These counts together with what the tier says of its space."""
        with self._lock:
            return TierStatistics(
                state, capacity_bytes, used_bytes, blocks, self._bytes_read, self._bytes_written, self._reads,
                self._writes, self._errors, self._corrupt, quarantined_slots, used_by, message,
            )  # fmt: skip
