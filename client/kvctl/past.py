"""The daemon's samples, ready to be asked: series by name, rates, and sums over the last seconds.

Reads one HistoryReply; never asks the daemon. Series that the daemon does not know are NaN throughout, so that a view
draws a gap instead of a zero.
"""

from __future__ import annotations

import math

from kvstore_console.terminal import known
from kvstore_proto.v1 import admin_pb2 as wire

Values = list[float]


class Past:
    """One resolution's samples, oldest first."""

    def __init__(self, reply: wire.HistoryReply) -> None:
        self.resolution_s = reply.resolution_s
        self.at_s: Values = list(reply.at_s)
        self.span_s: Values = list(reply.span_s)
        self.misses = dict(reply.misses)
        self._series = {(series.scope, series.subject, series.name): series.values for series in reply.series}

    def __len__(self) -> int:
        return len(self.at_s)

    def subjects(self, scope: str) -> list[str]:
        """Tiers, tenants, lanes, verbs or causes, in the daemon's order."""
        return list(dict.fromkeys(subject for kind, subject, _ in self._series if kind == scope))

    def values(self, scope: str, subject: str, name: str) -> Values:
        """Levels as they were, or counts of each sample."""
        found = self._series.get((scope, subject, name))
        return [math.nan] * len(self) if found is None else list(found)

    def rates(self, scope: str, subject: str, name: str) -> Values:
        """Counts of each sample a second."""
        counts = self.values(scope, subject, name)
        return [count / span if span > 0 else math.nan for count, span in zip(counts, self.span_s, strict=True)]

    def lately(self, scope: str, subject: str, name: str, seconds: float) -> float:
        """Counted in the last `seconds` of samples; 0 when nothing is known."""
        return sum(known(self.values(scope, subject, name)[self._first(seconds) :]))

    def rate_lately(self, scope: str, subject: str, name: str, seconds: float) -> float:
        """The same a second."""
        covered_s = sum(self.span_s[self._first(seconds) :])
        return self.lately(scope, subject, name, seconds) / covered_s if covered_s > 0 else 0.0

    def worst_lately(self, scope: str, subject: str, name: str, seconds: float) -> float:
        """The highest level of the last `seconds`; NaN when nothing is known."""
        return max(known(self.values(scope, subject, name)[self._first(seconds) :]), default=math.nan)

    def middle_lately(self, scope: str, subject: str, name: str, seconds: float) -> float:
        """The median level of the last `seconds`; NaN when nothing is known."""
        levels = sorted(known(self.values(scope, subject, name)[self._first(seconds) :]))
        return levels[len(levels) // 2] if levels else math.nan

    def _first(self, seconds: float) -> int:
        """Index of the first sample that ends in the last `seconds` before the newest one."""
        if not self.at_s:
            return 0
        since_s = self.at_s[-1] - seconds
        return next(index for index, at_s in enumerate(self.at_s) if at_s > since_s + 1e-3)
