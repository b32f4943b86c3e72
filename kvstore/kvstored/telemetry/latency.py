"""The time that requests take, by verb: histograms of fixed size that cost well under a microsecond a request.

Buckets grow with the time they hold, four to a power of two, so a quantile is right within an eighth. The module owns
the counts; the caller brings the clock. Invariants: counts only grow, so the difference of two snapshots counts the
requests between them; memory is bounded by `MAX_VERBS`.
"""

from __future__ import annotations

from collections.abc import Sequence

_OCTAVES = 44  # up to five hours, in nanoseconds
BUCKETS = (_OCTAVES + 1) * 4
MAX_VERBS = 16
_FIRST_EDGE_OCTAVE, _LAST_EDGE_OCTAVE = 14, 36  # 16 us, 69 s: the edges that monitoring gets
_LEAST_NS = 4  # what the first bucket starts from

Counts = tuple[int, ...]
NO_COUNTS: Counts = (0,) * BUCKETS


class Latencies:
    """A collection of histograms of request times, one for each verb (kind of request)."""

    __slots__ = ("_counts",)

    def __init__(self) -> None:
        self._counts: dict[str, list[int]] = {}

    def add(self, verb: str, elapsed_ns: int) -> None:
        counts = self._counts.get(verb)
        if counts is None:
            if len(self._counts) >= MAX_VERBS:
                return
            counts = self._counts[verb] = [0] * BUCKETS
        counts[bucket_of(elapsed_ns)] += 1

    def snapshot(self) -> dict[str, Counts]:
        return {verb: tuple(counts) for verb, counts in self._counts.items()}


def bucket_of(elapsed_ns: int) -> int:
    """Return the number of the histogram bucket for a time of `elapsed_ns`."""
    if elapsed_ns < _LEAST_NS:
        return 0
    octave = elapsed_ns.bit_length()
    if octave > _OCTAVES:
        return BUCKETS - 1
    return octave << 2 | elapsed_ns >> octave - 3 & 3


def quantile_ns(counts: Sequence[int], share: float) -> float | None:
    """Return the time in ns below which the fraction `share` of the requests stayed. `counts` has the number of
    requests in each bucket of a histogram. Return None when it has no requests."""
    total = sum(counts)
    if not total:
        return None
    rank = share * total
    passed = 0
    for bucket, count in enumerate(counts):
        if count and passed + count >= rank:
            low_ns, width_ns = _bounds(bucket)
            return low_ns + width_ns * max(0.0, rank - passed) / count
        passed += count
    raise AssertionError("the last bucket takes every rank")


def cumulative_s(counts: Sequence[int]) -> tuple[list[tuple[float, int]], float]:
    """Return a list of pairs (time in seconds, number of requests that took at most that long), one for each power of
    two from 20 us to 70 s, and the sum of all times in seconds. Longer times count in the last pair; each time counts
    as the middle of its bucket.
    """
    edges, passed, sum_ns = [], 0, 0.0
    for bucket, count in enumerate(counts):
        passed += count
        low_ns, width_ns = _bounds(bucket)
        sum_ns += count * (low_ns + width_ns / 2)
        if bucket & 3 == 3 and _FIRST_EDGE_OCTAVE <= bucket >> 2 <= _LAST_EDGE_OCTAVE:
            edges.append(((low_ns + width_ns) / 1e9, passed))
    return edges, sum_ns / 1e9


def _bounds(bucket: int) -> tuple[int, int]:
    """Return lower edge and width of a bucket."""
    octave = bucket >> 2
    if octave < 3:
        return 0, _LEAST_NS
    return (4 + (bucket & 3)) * 2 ** (octave - 3), 2 ** (octave - 3)
