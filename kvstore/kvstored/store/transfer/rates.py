"""Rates of one medium: a token bucket (a budget), a decaying meter (what was moved lately), a model of a device's
service time fitted from completions, and the pauses of demand. Pure arithmetic over `now_ns`; nothing here reads a
clock.
"""

from __future__ import annotations

import math

NS_PER_S = 1_000_000_000
HARMLESS_SHARE = 0.08
_LONG_PAUSES = 6.0
_PAUSE_WEIGHT = 1 / 16


class TokenBucket:
    """A budget of bytes that grows by a rate; at most `burst_bytes` are saved up. It may run into debt: an item larger
    than what is saved passes when the bucket is not empty, and the next ones wait until the debt is paid."""

    __slots__ = ("_at_ns", "_burst_bytes", "_bytes_per_s", "_level_bytes")

    def __init__(self, bytes_per_s: float | None, burst_bytes: int) -> None:
        self._bytes_per_s = bytes_per_s
        self._burst_bytes = burst_bytes
        self._level_bytes = float(burst_bytes)
        self._at_ns: int | None = None

    def _refill(self, now_ns: int) -> None:
        if self._at_ns is not None and self._bytes_per_s is not None:
            earned = (now_ns - self._at_ns) * self._bytes_per_s / NS_PER_S
            self._level_bytes = min(float(self._burst_bytes), self._level_bytes + earned)
        self._at_ns = now_ns

    def ready(self, now_ns: int) -> bool:
        self._refill(now_ns)
        return self._bytes_per_s is None or self._level_bytes > 0

    def follow(self, bytes_per_s: float, now_ns: int) -> None:
        """Set the rate to `bytes_per_s` from `now_ns` on."""
        self._refill(now_ns)
        self._bytes_per_s = bytes_per_s

    def spend(self, nbytes: int) -> None:
        if self._bytes_per_s is not None:
            self._level_bytes -= nbytes

    def ready_at_ns(self, now_ns: int) -> int:
        """Return when (monotonic ns) the bucket has bytes to spend again; `now_ns` if it has some now."""
        if self.ready(now_ns) or self._bytes_per_s is None:
            return now_ns
        return now_ns + math.floor(-self._level_bytes * NS_PER_S / self._bytes_per_s) + 1


class RateMeter:
    """A meter of bytes a second: an average in which older bytes count less and less. `window_s` is its time constant
    in seconds."""

    __slots__ = ("_at_ns", "_bytes_per_s", "_window_s")

    def __init__(self, window_s: float = 2.0) -> None:
        self._window_s = window_s
        self._bytes_per_s = 0.0
        self._at_ns = 0

    def add(self, nbytes: int, now_ns: int) -> None:
        self._bytes_per_s = self.read(now_ns) + nbytes / self._window_s
        self._at_ns = now_ns

    def read(self, now_ns: int) -> float:
        return self._bytes_per_s * math.exp(-max(0, now_ns - self._at_ns) / (self._window_s * NS_PER_S))


class ServiceModel:
    """A model of a device, learned from completed transfers: its byte rate while busy, and the least time that an item
    takes (latency).

    The rate is the bytes completed, divided by the time during which anything was in flight; older bytes count less.
    The latency is the average time of an item, less the time that its bytes take at that rate."""

    __slots__ = ("_busy_ns", "_bytes", "_has_moved", "_latency_ns", "_since_ns")

    _MEMORY_BYTES = 256 << 20
    _WEIGHT = 1 / 32

    def __init__(self, prior_bytes_per_s: float, prior_latency_us: float, prior_bytes: int = 16 << 20) -> None:
        self._bytes = float(prior_bytes)  # the prior counts as so much seen
        self._busy_ns = self._bytes * NS_PER_S / prior_bytes_per_s
        self._latency_ns = prior_latency_us * 1000
        self._since_ns = 0
        self._has_moved = False

    def answered(self, seconds: float) -> None:
        """Learn from a request without payload that took `seconds`. It sets the latency of the model until bytes have
        been moved."""
        if not self._has_moved:
            self._latency_ns = max(self._latency_ns, seconds * NS_PER_S)

    @property
    def bytes_per_s(self) -> float:
        return self._bytes * NS_PER_S / self._busy_ns

    def idle_ended(self, now_ns: int) -> None:
        """Note that a transfer begins at `now_ns` while no other is in flight."""
        self._since_ns = now_ns

    def completed(self, nbytes: int, started_ns: int, shared_bytes: int, now_ns: int) -> None:
        """Learn from an item of `nbytes` that was in flight from `started_ns` to `now_ns`. `shared_bytes` were in
        flight when it started, its own included.
        """
        self._has_moved = True
        self._busy_ns += max(1, now_ns - self._since_ns)
        self._since_ns = now_ns
        self._bytes += nbytes
        if self._bytes > self._MEMORY_BYTES:
            keep = self._MEMORY_BYTES / self._bytes
            self._bytes *= keep
            self._busy_ns *= keep
        fixed_ns = max(0.0, now_ns - started_ns - shared_bytes * NS_PER_S / self.bytes_per_s)
        self._latency_ns += self._WEIGHT * (fixed_ns - self._latency_ns)

    def estimate_us(self, nbytes: int) -> float:
        return (self._latency_ns + nbytes * NS_PER_S / self.bytes_per_s) / 1000


class DemandPauses:
    """A record of one lane's bursts of demand (copies that requests wait for), which says when prefetch may use the
    pauses between them.

    A burst lasts while any demand is queued or in flight. A prefetch in flight when demand arrives delays it by up to
    its own service time. If that is little against a get of many blocks (below `HARMLESS_SHARE` of it), a short quiet
    time after demand is enough. Otherwise prefetch waits until the pause has outlasted nearly all recent ones: with
    random arrivals a pause of six times the mean is seen once in four hundred, so the p99 of demand does not change."""

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
            self._mean_pause_ns += _PAUSE_WEIGHT * (pause_ns - self._mean_pause_ns)

    def added(self, nbytes: int) -> None:
        self._burst_bytes += nbytes

    @property
    def burst_bytes(self) -> float:
        """Return the bytes of a burst, on average; 0 before the first has ended."""
        return self._mean_burst_bytes

    def ended(self, now_ns: int) -> None:
        weight = _PAUSE_WEIGHT if self._ended_ns is not None else 1.0
        self._mean_burst_bytes += weight * (self._burst_bytes - self._mean_burst_bytes)
        self._burst_bytes = 0
        self._ended_ns = now_ns

    def prefetch_from_ns(self, in_flight_bytes: int, now_ns: int) -> int:
        """Return the time (monotonic ns) from which `in_flight_bytes` of prefetched blocks may be in flight, if no
        request's copy is queued before. A time up to `now_ns` means at once."""
        if self._ended_ns is None:
            return now_ns
        if in_flight_bytes <= HARMLESS_SHARE * self._mean_burst_bytes:
            return self._ended_ns + self._short_ns
        quiet_ns = max(self._short_ns, min(self._long_ns, round(_LONG_PAUSES * self._mean_pause_ns)))
        return self._ended_ns + quiet_ns
