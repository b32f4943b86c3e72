"""The rates of a medium and of the codecs on it, as the threads that read and decode measure them.

A rate is bytes over the time during which anything was under way, so overlap and waiting for a core are in it. Old
measurements fade: each counter halves when it has seen twice `MEMORY_BYTES`. Any thread may call.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

MEMORY_BYTES = 64 << 20
FEWEST_BYTES = 1 << 20  # before them a rate is not known


class BusyRate:
    """One rate. `seconds` returns the time."""

    def __init__(self, seconds: Callable[[], float] = time.monotonic) -> None:
        self._seconds, self._lock = seconds, threading.Lock()
        self._bytes = self._busy_s = self._since_s = 0.0
        self._under_way = 0
        self.total_s = 0.0  # of all work, never faded

    @contextmanager
    def work(self, nbytes: int) -> Iterator[None]:
        """Measure the body of the `with` block, which handles `nbytes`. Work that raises an error does not count."""
        began_s = self._seconds()
        with self._lock:
            self._since_s = self._since_s if self._under_way else began_s
            self._under_way += 1
        done_bytes = 0
        try:
            yield
            done_bytes = nbytes
        finally:
            ended_s = self._seconds()
            with self._lock:
                self._under_way -= 1
                self._busy_s += max(0.0, ended_s - self._since_s)
                self._since_s = ended_s
                self._bytes += done_bytes
                self.total_s += ended_s - began_s
                if self._bytes > 2 * MEMORY_BYTES:
                    self._bytes, self._busy_s = self._bytes / 2, self._busy_s / 2

    @property
    def bytes_per_s(self) -> float:
        """Return the rate; 0 while it is not known."""
        with self._lock:
            return self._bytes / self._busy_s if self._bytes >= FEWEST_BYTES and self._busy_s > 0 else 0.0


class CodecRates:
    """The rates of one tier: `medium` in stored bytes, `decoding` and `encoding` in payload bytes by the number of the
    codec, and what blocks shrank to."""

    def __init__(self, seconds: Callable[[], float] = time.monotonic) -> None:
        self.medium = BusyRate(seconds)
        self.decoding: defaultdict[int, BusyRate] = defaultdict(lambda: BusyRate(seconds))
        self.encoding: defaultdict[int, BusyRate] = defaultdict(lambda: BusyRate(seconds))
        self._shrunk: dict[int, tuple[float, float]] = {}

    def shrank(self, codec: int, payload_bytes: int, stored_bytes: int) -> None:
        """Note that a payload became `stored_bytes`."""
        payload, stored = self._shrunk.get(codec, (0.0, 0.0))
        if payload > 2 * MEMORY_BYTES:
            payload, stored = payload / 2, stored / 2
        self._shrunk[codec] = payload + payload_bytes, stored + stored_bytes

    def ratio(self, codec: int) -> float:
        """Return the bytes of payloads for one stored byte; 1 while it is not known."""
        payload, stored = self._shrunk.get(codec, (0.0, 0.0))
        return payload / stored if stored else 1.0
