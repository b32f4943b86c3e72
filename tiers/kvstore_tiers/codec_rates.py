"""The rates of a medium and of the codecs on it, as the threads that read and decode measure them.

The rate of a medium is bytes over the time during which anything was read, so overlap is in it; old reads fade. So is
the rate of whole reads, with checks and decoding, by the form of the blocks: what a machine under load makes of it. The
rate of a codec is what three of four of its last runs on one thread reached: a run that lost its core now and then says
nothing of the codec; where many do, the machine has no core to spare. Any thread may call.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

MEMORY_BYTES = 64 << 20
FEWEST_BYTES = 1 << 20  # before them a rate is not known
RUNS, FEWEST_RUNS = 31, 5
FEWEST_SERVED_BYTES, RECENT_S = 16 << 20, 60.0  # of whole reads


class BusyRate:
    """One rate, not known before `fewest_bytes` passed. `seconds` returns the time."""

    def __init__(self, seconds: Callable[[], float] = time.monotonic, fewest_bytes: int = FEWEST_BYTES) -> None:
        self._seconds, self._lock, self._fewest_bytes = seconds, threading.Lock(), fewest_bytes
        self._bytes = self._busy_s = self._since_s = 0.0
        self._under_way = 0

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
                if self._bytes > 2 * MEMORY_BYTES:
                    self._bytes, self._busy_s = self._bytes / 2, self._busy_s / 2

    @property
    def bytes_per_s(self) -> float:
        """Return the rate; 0 while it is not known."""
        with self._lock:
            return self._bytes / self._busy_s if self._bytes >= self._fewest_bytes and self._busy_s > 0 else 0.0

    @property
    def recent_bytes_per_s(self) -> float:
        """Return the rate; 0 while it is not known, and when all of it is older than `RECENT_S`."""
        return self.bytes_per_s if self._seconds() - self._since_s <= RECENT_S else 0.0


class SteadyRate:
    """The rate of one codec, which three of four of its last runs reached. `total_s` is the time of all runs."""

    def __init__(self, seconds: Callable[[], float] = time.monotonic) -> None:
        self._seconds = seconds
        self._pace: deque[float] = deque(maxlen=RUNS)  # seconds a byte
        self.total_s = 0.0

    @contextmanager
    def work(self, nbytes: int) -> Iterator[None]:
        """Measure the body of the `with` block, which handles `nbytes`. A run that raises an error does not count."""
        began_s = self._seconds()
        yield
        taken_s = self._seconds() - began_s
        self.total_s += taken_s
        if nbytes and taken_s > 0:
            self._pace.append(taken_s / nbytes)

    @property
    def bytes_per_s(self) -> float:
        """Return the rate; 0 while it is not known."""
        pace = sorted(self._pace)
        return 1 / pace[len(pace) * 3 // 4] if len(pace) >= FEWEST_RUNS else 0.0


class CodecRates:
    """The rates of one tier: `medium` in stored bytes, `decoding` and `encoding` in payload bytes by the number of the
    codec, as is `served`, of whole reads (0: of blocks without a codec); and what blocks shrank to."""

    def __init__(self, seconds: Callable[[], float] = time.monotonic) -> None:
        self.medium = BusyRate(seconds)
        self.decoding: defaultdict[int, SteadyRate] = defaultdict(lambda: SteadyRate(seconds))
        self.encoding: defaultdict[int, SteadyRate] = defaultdict(lambda: SteadyRate(seconds))
        self.served: defaultdict[int, BusyRate] = defaultdict(lambda: BusyRate(seconds, FEWEST_SERVED_BYTES))
        self._shrunk: dict[int, tuple[float, float]] = {}

    @property
    def codecs(self) -> list[int]:
        """Return the numbers of the codecs that anything was measured of."""
        return sorted({*self.decoding, *self.encoding, *self._shrunk})

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
