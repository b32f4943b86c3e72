"""The rates of a medium and of the codecs on it, as the threads that read and decode measure them.

A steady rate is the one which a part of the last runs reached. Runs side by side share the time that passes, so it is
what all threads reach together. Three of four runs count for whole reads: one that lost its core now and then says
nothing, and where many do, the machine has no core to spare. One of four counts for the medium, and for the cores that
decoding can have, since the others may have waited for a core or for the interpreter. The rate of a core counts the
processor time of a thread alone, so no waiting is in it: a few reads among others tell what decoding costs. Any thread
may call.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

MEMORY_BYTES = 64 << 20
RUNS, FEWEST_RUNS = 31, 5
MOST, SOME = 3 / 4, 1 / 4  # of the runs
FEWEST_SERVED, RECENT_S = 12, 60.0  # of whole reads


class SteadyRate:
    """The rate that a `part` of the last runs reached, of all threads together; not known before `fewest` of them.
    `total_s` is the time of all runs. `seconds` returns the time."""

    def __init__(
        self, seconds: Callable[[], float] = time.monotonic, fewest: int = FEWEST_RUNS, part: float = MOST
    ) -> None:
        self._seconds, self._fewest, self._part, self._lock = seconds, fewest, part, threading.Lock()
        self._pace: deque[tuple[float, float]] = deque(maxlen=RUNS)  # seconds a byte: of its share, of the whole run
        self._shared_s = self._since_s = 0.0  # time divided by the runs under way
        self._under_way = 0
        self.total_s = 0.0

    def begin(self) -> tuple[float, float]:
        """Note that a run begins. Return what `end` takes."""
        return self._pass(1)

    def end(self, began: tuple[float, float], nbytes: int) -> None:
        """Note that the run ends which has begun at `began`, and handled `nbytes`; 0 when it failed, and does not
        count."""
        ended_s, until_s = self._pass(-1)
        began_s, shared_s = began
        if nbytes:
            self.total_s += ended_s - began_s
            if until_s > shared_s:
                self._pace.append(((until_s - shared_s) / nbytes, (ended_s - began_s) / nbytes))

    @contextmanager
    def work(self, nbytes: int) -> Iterator[None]:
        """Measure the body of the `with` block, which handles `nbytes`. A run that raises an error does not count."""
        began, done_bytes = self.begin(), 0
        try:
            yield
            done_bytes = nbytes
        finally:
            self.end(began, done_bytes)

    def _pass(self, change: int) -> tuple[float, float]:
        """Note that a run begins or ends. Return the time, and the time that a run has had for itself if it was always
        under way."""
        now_s = self._seconds()
        with self._lock:
            if now_s > self._since_s:
                self._shared_s += (now_s - self._since_s) / (self._under_way or 1)
                self._since_s = now_s
            self._under_way += change
            return now_s, self._shared_s

    @property
    def bytes_per_s(self) -> float:
        """Return the rate; 0 while it is not known."""
        return _reached([share for share, _ in tuple(self._pace)], self._fewest, self._part)

    @property
    def recent_bytes_per_s(self) -> float:
        """Return the rate; 0 while it is not known, and when all of it is older than `RECENT_S`."""
        return self.bytes_per_s if self._seconds() - self._since_s <= RECENT_S else 0.0

    @property
    def runs_at_a_time(self) -> float:
        """Return the number of runs that were under way at a time, on average; 0 before the first one."""
        pace = tuple(self._pace)
        return sum(whole / share for share, whole in pace) / len(pace) if pace else 0.0


class CoreRate:
    """The rate at which one core handles bytes, in the median of the last runs; not known before `FEWEST_RUNS` of
    them. `total_s` is the time of all runs, with all waiting. `core_seconds` returns the processor time of the calling
    thread, `seconds` the time."""

    def __init__(
        self, seconds: Callable[[], float] = time.monotonic, core_seconds: Callable[[], float] = time.thread_time
    ) -> None:
        self._seconds, self._core_seconds = seconds, core_seconds
        self._pace: deque[float] = deque(maxlen=RUNS)  # seconds a byte
        self._since_s = self.total_s = 0.0

    def begin(self) -> tuple[float, float]:
        """Return what `end`, on the same thread, takes."""
        return self._seconds(), self._core_seconds()

    def end(self, began: tuple[float, float], nbytes: int) -> None:
        """Note that a run has handled `nbytes` since `began`; 0 when it failed, and does not count."""
        if nbytes:
            core_s, self._since_s = self._core_seconds() - began[1], self._seconds()
            self.total_s += self._since_s - began[0]
            self._pace.append(core_s / nbytes)

    @property
    def bytes_per_s(self) -> float:
        """Return the rate; 0 while it is not known."""
        return _reached(self._pace.copy(), FEWEST_RUNS, 1 / 2)

    @property
    def recent_bytes_per_s(self) -> float:
        """Return the rate; 0 while it is not known, and when all of it is older than `RECENT_S`."""
        return self.bytes_per_s if self._seconds() - self._since_s <= RECENT_S else 0.0


def _reached(pace: Iterable[float], fewest: int, part: float) -> float:
    """Return the rate that a `part` of the runs reached, whose seconds a byte are `pace`; 0 of fewer than `fewest`."""
    known = sorted(pace)
    if len(known) < fewest or not (slowest := known[int(len(known) * part)]):
        return 0.0
    return 1 / slowest


class CodecRates:
    """The rates of one tier, by the number of the codec, 0 for none: `medium` in stored bytes; in payload bytes
    `decoding` and `encoding`, what all threads reach together, and `decoding_core`, `read_core`, what a core does, of
    measurements and of reads; `served` of whole reads; and what blocks shrank to. `read_core` of codec 0 is of whole
    reads, as nothing is decoded. `threads` threads read and decode side by side."""

    def __init__(
        self, seconds: Callable[[], float] = time.monotonic, core_seconds: Callable[[], float] = time.thread_time
    ) -> None:
        self.medium = SteadyRate(seconds, part=SOME)
        self.decoding: defaultdict[int, SteadyRate] = defaultdict(lambda: SteadyRate(seconds, part=SOME))
        self.encoding: defaultdict[int, SteadyRate] = defaultdict(lambda: SteadyRate(seconds))
        self.decoding_core: defaultdict[int, CoreRate] = defaultdict(lambda: CoreRate(seconds, core_seconds))
        self.read_core: defaultdict[int, CoreRate] = defaultdict(lambda: CoreRate(seconds, core_seconds))
        self.served: defaultdict[int, SteadyRate] = defaultdict(lambda: SteadyRate(seconds, FEWEST_SERVED))
        self.threads = 1
        self._shrunk: dict[int, tuple[float, float]] = {}
        self._guessed: dict[int, float] = {}

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
        return payload / stored if stored else self._guessed.get(codec, 1.0)

    def guess_ratio(self, codec: int, payload_bytes: int, stored_bytes: int) -> None:
        """Note that a made-up payload became `stored_bytes`, which counts until a real one was encoded."""
        self._guessed[codec] = payload_bytes / stored_bytes
