"""The state of the tier, judged by how its transfers end.

Owns the state and the reason for it. Never retries anything itself. ENOSPC and similar errors make the tier FULL: it
keeps the slabs it has and tries a new one again after a pause. EROFS, or several write errors in a row, make it
READ_ONLY; several read errors in a row make it FAILED. Both last until a probe (probe.py) wrote, synced and read back:
a medium that did this is trusted again only on proof.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable

from kvstore_tiers.base import Outcome, OutcomeKind, TierState
from kvstore_tiers.failures import ERRORS_IN_A_ROW, NO_ROOM

RETRY_FULL_AFTER_S = 30.0


class TierHealth:
    """Fed with every outcome, from any thread. `clock` gives monotonic seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._write_errors = 0
        self._read_errors = 0
        self._full_since_s = 0.0
        self.state = TierState.OK
        self.message = ""

    @property
    def may_grow(self) -> bool:
        """Whether a new slab file may be tried."""
        if self.state is TierState.FULL:
            return self._clock() - self._full_since_s >= RETRY_FULL_AFTER_S
        return self.state is TierState.OK

    @property
    def may_write(self) -> bool:
        return self.state in (TierState.OK, TierState.FULL)

    def watch_write(self, outcome: Outcome) -> Outcome:
        """Judge the end of a write or a sync; returns it."""
        if outcome.kind is OutcomeKind.FAILED:
            with self._lock:
                if outcome.errno in NO_ROOM:
                    self._full_since_s = self._clock()
                    self._worsen(TierState.FULL, outcome)
                else:
                    self._write_errors += 1
                    if outcome.errno == errno.EROFS or self._write_errors >= ERRORS_IN_A_ROW:
                        self._worsen(TierState.READ_ONLY, outcome)
        elif outcome.ok:
            self._write_errors = 0
        return outcome

    def watch_read(self, outcome: Outcome) -> Outcome:
        """Judge the end of a read; returns it."""
        if outcome.kind is OutcomeKind.FAILED and outcome.errno:
            with self._lock:
                self._read_errors += 1
                if self._read_errors >= ERRORS_IN_A_ROW:
                    self._worsen(TierState.FAILED, outcome)
        elif outcome.ok:
            self._read_errors = 0
        return outcome

    def hold_back(self, reason: str) -> None:
        """Allow no write before a probe went well."""
        self.state, self.message = TierState.READ_ONLY, reason

    def note_growth(self) -> None:
        """A slab file was made: the medium has room again."""
        with self._lock:
            if self.state is TierState.FULL:
                self.state, self.message = TierState.OK, ""

    def note_probe(self, free_bytes: int, slab_bytes: int) -> None:
        """A probe went well, and the file system has so much room."""
        with self._lock:
            if self.state is TierState.FULL and free_bytes < slab_bytes:
                return
            self._write_errors = self._read_errors = 0
            self.state, self.message = TierState.OK, ""

    def _worsen(self, state: TierState, outcome: Outcome) -> None:
        order = (TierState.OK, TierState.FULL, TierState.READ_ONLY, TierState.FAILED)
        if order.index(state) > order.index(self.state):
            self.state, self.message = state, outcome.message
