"""The data that `top` and `report` show: the daemon's replies of one moment, and its samples, with functions to query
them.

Series that the daemon does not know are NaN throughout, so that a view draws a gap instead of a zero.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from kvctl.connection import AdminSocket
from kvctl.output import plain
from kvstore_console.terminal import known
from kvstore_proto.v1 import admin_pb2 as wire

Values = list[float]


@dataclass(frozen=True, slots=True)
class DaemonSnapshot:
    """The daemon's replies to four requests about its state, taken at one moment and unchanged."""

    status: wire.StatusReply
    tiers: wire.TiersReply
    tenants: wire.TenantsReply
    history: wire.HistoryReply

    @property
    def samples(self) -> SampleHistory:
        return SampleHistory(self.history)

    def document(self) -> dict[str, Any]:
        """Return the snapshot as a document for --json. Unknown values are null, because JSON has no NaN."""
        return {
            "status": plain(self.status),
            "tiers": plain(self.tiers)["tiers"],
            "tenants": plain(self.tenants)["tenants"],
            "history": without_nan(plain(self.history)),
        }


def take_snapshot(
    admin: AdminSocket, *, since_s: float, settings: bool = False, resolution_s: int = 0
) -> DaemonSnapshot:
    """Ask the daemon for its status, tiers, tenants and samples, and return the replies as a snapshot. The samples
    begin `since_s` seconds ago, and each covers `resolution_s` seconds, or the daemon's default if it is 0. With
    `settings` the daemon's settings come too. Raises CommandError.
    """
    request = wire.HistoryRequest(resolution_s=resolution_s, since_s=since_s, settings=settings)
    return DaemonSnapshot(
        admin.call("Status", wire.StatusRequest(), wire.StatusReply),
        admin.call("Tiers", wire.TiersRequest(), wire.TiersReply),
        admin.call("Tenants", wire.TenantsRequest(), wire.TenantsReply),
        admin.call("History", request, wire.HistoryReply),
    )


def without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_nan(item) for key, item in value.items()}
    if isinstance(value, list):
        return [without_nan(item) for item in value]
    return None if isinstance(value, float) and math.isnan(value) else value


class SampleHistory:
    """The daemon's samples of its figures at one resolution, oldest first."""

    def __init__(self, reply: wire.HistoryReply) -> None:
        self.resolution_s = reply.resolution_s
        self.at_s: Values = list(reply.at_s)
        self.span_s: Values = list(reply.span_s)
        self.misses = dict(reply.misses)
        self._series = {(series.scope, series.subject, series.name): series.values for series in reply.series}

    def __len__(self) -> int:
        return len(self.at_s)

    def subjects(self, scope: str) -> list[str]:
        """Return the names in `scope` (tiers, tenants, lanes, verbs or causes) that the samples have figures of, in the
        daemon's order.
        """
        return list(dict.fromkeys(subject for kind, subject, _ in self._series if kind == scope))

    def values(self, scope: str, subject: str, name: str) -> Values:
        """Return the figure `name` of `subject` in `scope` over time: a level, or a count of events, for each
        sample.
        """
        found = self._series.get((scope, subject, name))
        return [math.nan] * len(self) if found is None else list(found)

    def rates(self, scope: str, subject: str, name: str) -> Values:
        """Return the count `name` of `subject` in `scope` over time, as events a second for each sample."""
        counts = self.values(scope, subject, name)
        return [count / span if span > 0 else math.nan for count, span in zip(counts, self.span_s, strict=True)]

    def lately(self, scope: str, subject: str, name: str, seconds: float) -> float:
        """Return the sum of the count `name` of `subject` in `scope` over the samples of the last `seconds`, or 0 if
        nothing is known.
        """
        return sum(known(self.values(scope, subject, name)[self._first(seconds) :]))

    def rate_lately(self, scope: str, subject: str, name: str, seconds: float) -> float:
        """Return the mean rate a second of the count `name` of `subject` over the samples of the last `seconds`."""
        covered_s = sum(self.span_s[self._first(seconds) :])
        return self.lately(scope, subject, name, seconds) / covered_s if covered_s > 0 else 0.0

    def worst_lately(self, scope: str, subject: str, name: str, seconds: float) -> float:
        """Return the highest value of the level `name` of `subject` in the last `seconds`, or NaN if nothing is
        known.
        """
        return max(known(self.values(scope, subject, name)[self._first(seconds) :]), default=math.nan)

    def middle_lately(self, scope: str, subject: str, name: str, seconds: float) -> float:
        """Return the median of the level `name` of `subject` in the last `seconds`, or NaN if nothing is known."""
        levels = sorted(known(self.values(scope, subject, name)[self._first(seconds) :]))
        return levels[len(levels) // 2] if levels else math.nan

    def _first(self, seconds: float) -> int:
        """Return the index of the first sample that ends in the last `seconds` before the newest one."""
        if not self.at_s:
            return 0
        since_s = self.at_s[-1] - seconds
        return next(index for index, at_s in enumerate(self.at_s) if at_s > since_s + 1e-3)


def hit_ratios(samples: SampleHistory) -> list[float]:
    """Return for each sample the share of the blocks requested by gets that the daemon could serve. It is NaN if none
    were requested.
    """
    served = samples.values("daemon", "", "acquired_blocks")
    missed = [0.0] * len(samples)
    for cause in samples.subjects("miss"):
        counts = samples.values("miss", cause, "blocks")
        missed = [sum_ + (0.0 if math.isnan(count) else count) for sum_, count in zip(missed, counts, strict=True)]
    return [hit / (hit + miss) if hit + miss > 0 else math.nan for hit, miss in zip(served, missed, strict=True)]
