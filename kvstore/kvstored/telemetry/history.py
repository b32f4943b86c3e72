"""The recent past: rings of samples, fine for minutes and coarse for a day.

A sample holds levels at its end, counts during it, and latency quantiles of the requests in it. The module owns the
rings; it never reads a clock or asks a part: it receives `Reading`s. Invariants: memory is bounded by `MAX_SERIES`
4-byte numbers a sample, however busy the daemon is; samples are in order of time; a series that a sample does not know
is NaN there.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from kvstored.telemetry.latency import NO_COUNTS, Counts, quantile_ns

_Number = TypeVar("_Number", int, float)

NS_PER_S = 1_000_000_000
MAX_SERIES = 112  # 2,040 samples of so many take 914 kB


class Resolution(NamedTuple):
    period_s: int
    samples: int


RESOLUTIONS = (Resolution(1, 600), Resolution(60, 1440))  # ten minutes; a day


class SeriesKey(NamedTuple):
    """The name of a series of samples, in three parts, such as "tier", "host", "used_bytes"."""

    scope: str
    subject: str
    name: str


@dataclass(frozen=True, slots=True)
class Reading:
    """The daemon's figures at one moment. `levels` go up and down, `totals` only grow; `latencies` has a histogram of
    request times for each verb (kind of request)."""

    levels: Mapping[SeriesKey, float]
    totals: Mapping[SeriesKey, int]
    latencies: Mapping[str, Counts] = field(default_factory=dict)


class MetricSeries(NamedTuple):
    key: SeriesKey
    is_flow: bool
    values: Sequence[float]


class Window(NamedTuple):
    """Consecutive samples of one resolution, the oldest first. `at_ns` is the end of each sample, `span_s` its length
    in seconds."""

    resolution_s: int
    at_ns: Sequence[int]
    span_s: Sequence[float]
    series: Sequence[MetricSeries]


class History:
    """The samples of all series (figures over time), in one ring for each resolution. `started_ns` is the monotonic
    time when counting began."""

    def __init__(self, started_ns: int, resolutions: Sequence[Resolution] = RESOLUTIONS) -> None:
        self._rings = [_Ring(resolution, started_ns) for resolution in resolutions]

    @property
    def resolutions_s(self) -> list[int]:
        return [ring.resolution.period_s for ring in self._rings]

    @property
    def nbytes(self) -> int:
        """The memory in bytes that the samples take."""
        return sum(ring.nbytes for ring in self._rings)

    def due(self, now_ns: int) -> bool:
        """Return whether a new reading of the figures is due at `now_ns`, for any resolution."""
        return any(ring.due(now_ns) for ring in self._rings)

    def add(self, reading: Reading, now_ns: int) -> None:
        for ring in self._rings:
            if ring.due(now_ns):
                ring.add(reading, now_ns)

    def window(self, resolution_s: int, since_ns: int) -> Window:
        """Return the samples of the resolution `resolution_s` (seconds a sample) that end after the monotonic time
        `since_ns`. Raises KeyError for a resolution that is not kept."""
        ring = next((ring for ring in self._rings if ring.resolution.period_s == resolution_s), None)
        if ring is None:
            raise KeyError(resolution_s)
        return ring.window(since_ns)


class _Ring:
    """Columns of equal length, written round and round."""

    def __init__(self, resolution: Resolution, started_ns: int) -> None:
        self.resolution = resolution
        self._period_ns = resolution.period_s * NS_PER_S
        self._last_ns = started_ns
        self._due_ns = started_ns + self._period_ns
        self._taken = 0
        self._at_ns = array("q", bytes(8 * resolution.samples))
        self._span_s = array("f", bytes(4 * resolution.samples))
        self._columns: dict[SeriesKey, array[float]] = {}
        self._flows: set[SeriesKey] = set()
        self._totals: Mapping[SeriesKey, int] = {}
        self._latencies: Mapping[str, Counts] = {}

    @property
    def nbytes(self) -> int:
        per_sample = self._at_ns.itemsize + self._span_s.itemsize * (1 + len(self._columns))
        return per_sample * self.resolution.samples

    def due(self, now_ns: int) -> bool:
        return now_ns >= self._due_ns

    def add(self, reading: Reading, now_ns: int) -> None:
        place = self._taken % self.resolution.samples
        self._at_ns[place] = now_ns
        self._span_s[place] = (now_ns - self._last_ns) / NS_PER_S
        for column in self._columns.values():
            column[place] = math.nan
        for key, level in reading.levels.items():
            self._set(key, place, level)
        for key, total in reading.totals.items():
            self._set(key, place, total - self._totals.get(key, 0), is_flow=True)
        for verb, counts in reading.latencies.items():
            self._set_latency(verb, place, _difference(counts, self._latencies.get(verb, NO_COUNTS)))
        self._totals, self._latencies = reading.totals, reading.latencies
        self._taken += 1
        self._last_ns = now_ns
        # On the grid of periods since the start, so that a late tick does not shift all that follow.
        self._due_ns += ((now_ns - self._due_ns) // self._period_ns + 1) * self._period_ns

    def window(self, since_ns: int) -> Window:
        """Return copies, made of slices: a few microseconds a series, so the control thread may ask."""
        at_ns = self._latest(self._at_ns, self._kept)
        count = self._kept - bisect_right(at_ns, since_ns)
        series = [
            MetricSeries(key, key in self._flows, self._latest(column, count)) for key, column in self._columns.items()
        ]
        return Window(self.resolution.period_s, at_ns[self._kept - count :], self._latest(self._span_s, count), series)

    @property
    def _kept(self) -> int:
        return min(self._taken, self.resolution.samples)

    def _latest(self, column: array[_Number], count: int) -> array[_Number]:
        """Return the last `count` samples in order of time."""
        end = self._taken % self.resolution.samples
        if count <= end:
            return column[end - count : end]
        return column[len(column) - (count - end) :] + column[:end]

    def _set_latency(self, verb: str, place: int, counts: Counts) -> None:
        self._set(SeriesKey("verb", verb, "requests"), place, sum(counts), is_flow=True)
        for name, share in (("p50_us", 0.5), ("p99_us", 0.99)):
            time_ns = quantile_ns(counts, share)
            self._set(SeriesKey("verb", verb, name), place, math.nan if time_ns is None else time_ns / 1000)

    def _set(self, key: SeriesKey, place: int, value: float, *, is_flow: bool = False) -> None:
        column = self._columns.get(key)
        if column is None:
            if len(self._columns) >= MAX_SERIES:
                return
            column = self._columns[key] = array("f", [math.nan]) * self.resolution.samples
            if is_flow:
                self._flows.add(key)
        column[place] = value


def _difference(after: Counts, before: Counts) -> Counts:
    return tuple(late - early for late, early in zip(after, before, strict=True))
