"""When prefetch may use the pauses of demand.

A prefetch in flight when demand arrives delays it by up to its own service time. That is little against a get
of many blocks (below `HARMLESS_SHARE` of it), and a short quiet time after demand is enough. Against small
gets it is a lot; then prefetch waits until the pause has outlasted nearly all recent ones: with random
arrivals a pause of six times the mean is seen once in four hundred, so that p99 of demand does not notice.
"""

from __future__ import annotations

HARMLESS_SHARE = 0.08
_PAUSES = 6.0
_WEIGHT = 1 / 16


class DemandPauses:
    """Follows one lane's bursts of demand: a burst lasts while any demand is queued or in flight."""

    __slots__ = ("_burst_bytes", "_ended_ns", "_long_ns", "_mean_burst_bytes", "_mean_pause_ns", "_short_ns")

    def __init__(self, short_ns: int, long_ns: int) -> None:
        self._short_ns = short_ns
        self._long_ns = long_ns
        self._burst_bytes = 0
        self._mean_burst_bytes = 0.0
        self._mean_pause_ns = 0.0
        self._ended_ns: int | None = None

    def began(self, now_ns: int) -> None:
        if self._ended_ns is not None:
            pause_ns = min(now_ns - self._ended_ns, self._long_ns)
            self._mean_pause_ns += _WEIGHT * (pause_ns - self._mean_pause_ns)

    def added(self, nbytes: int) -> None:
        self._burst_bytes += nbytes

    def ended(self, now_ns: int) -> None:
        weight = _WEIGHT if self._ended_ns is not None else 1.0
        self._mean_burst_bytes += weight * (self._burst_bytes - self._mean_burst_bytes)
        self._burst_bytes = 0
        self._ended_ns = now_ns

    def prefetch_from_ns(self, in_flight_bytes: int, now_ns: int) -> int:
        """When this much prefetch may be in flight, if no demand comes before; `now_ns` or earlier: at once."""
        if self._ended_ns is None:
            return now_ns
        if in_flight_bytes <= HARMLESS_SHARE * self._mean_burst_bytes:
            return self._ended_ns + self._short_ns
        quiet_ns = max(self._short_ns, min(self._long_ns, round(_PAUSES * self._mean_pause_ns)))
        return self._ended_ns + quiet_ns
