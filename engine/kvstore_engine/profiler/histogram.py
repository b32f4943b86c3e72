"""Quantiles of a stream of durations in little memory, without a longest duration.

The module owns log-spaced buckets, as in HdrHistogram (Tene) and DDSketch (Masson et al., 2019), kept sparsely: a
bucket exists once a value fell into it. So there is no range to choose and nothing to clip: a value of a week gets a
bucket of its own. Invariants: a quantile is within `ERROR` (relative) of the sample of that rank; least, greatest,
count and sum are exact, and quantiles 0 and 1 are therefore exact too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

ERROR = 0.005
_RATIO = (1 + ERROR) / (1 - ERROR)  # of a bucket's bounds: its middle is within ERROR of both
_LOG_RATIO = math.log(_RATIO)
QUANTILES = (0.5, 0.9, 0.95, 0.99, 0.999)


class Histogram:
    """A histogram of numbers of 0 and more, from which quantiles can be read. A bucket's width grows with its values,
    so that a quantile is wrong by at most the share `ERROR` of its value.
    """

    def __init__(self, values: Iterable[float] = ()) -> None:
        self.count, self.sum = 0, 0.0
        self.least, self.greatest = math.inf, 0.0
        self._zeros = 0
        self._buckets: dict[int, int] = {}
        for value in values:
            self.add(value)

    def add(self, value: float) -> None:
        """Add `value` to the histogram. Raises ValueError if it is negative or not finite."""
        if not 0 <= value < math.inf:
            raise ValueError(f"{value} is no duration")
        self.count += 1
        self.sum += value
        self.least, self.greatest = min(self.least, value), max(self.greatest, value)
        if value == 0:
            self._zeros += 1
            return
        bucket = math.ceil(math.log(value) / _LOG_RATIO)
        self._buckets[bucket] = self._buckets.get(bucket, 0) + 1

    @property
    def mean(self) -> float:
        return self.sum / self.count if self.count else 0.0

    def quantile(self, share: float) -> float:
        """Return the quantile `share` (0 to 1) of all counted values: the least value that this share of them does not
        exceed. Return 0 if no value was counted. Raises ValueError for another `share`.
        """
        if not 0 <= share <= 1:
            raise ValueError(f"{share} is no share: 0 to 1")
        if not self.count:
            return 0.0
        rank = max(1, math.ceil(share * self.count))
        if rank == self.count:
            return self.greatest
        if rank == 1:
            return self.least
        seen = self._zeros
        if rank <= seen:
            return 0.0
        for bucket in sorted(self._buckets):
            seen += self._buckets[bucket]
            if rank <= seen:
                middle = _RATIO**bucket * (1 - ERROR)
                return min(max(middle, self.least), self.greatest)
        raise AssertionError("the buckets hold fewer values than were counted")

    def cumulative(self) -> list[tuple[float, float]]:
        """Return the points of the cumulative distribution, in order: pairs of a value and the share (0 to 1) of all
        counted values that do not exceed it.
        """
        if not self.count:
            return []
        seen = self._zeros
        points = [(0.0, seen / self.count)] if seen else []
        for bucket in sorted(self._buckets):
            seen += self._buckets[bucket]
            points.append((min(_RATIO**bucket, self.greatest), seen / self.count))
        return points

    def as_json(self) -> dict[str, float]:
        """Return the count, the mean, the least and greatest value and the quantiles by name, such as "p50", as a
        dictionary.
        """
        named = {f"p{share * 100:g}": self.quantile(share) for share in QUANTILES}
        return {
            "count": self.count,
            "mean": self.mean,
            "min": self.least if self.count else 0.0,
            **named,
            "max": self.greatest,
        }
