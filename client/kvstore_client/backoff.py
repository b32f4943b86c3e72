"""When to try again, and when to stop sending requests: two small pure state machines.

`Backoff` is exponential with full jitter (M. Brooker, "Exponential Backoff and Jitter", AWS Architecture
Blog, 2015):
many engines that lost one daemon do not return in step. `Breaker` counts timeouts in a row. Neither reads a
clock.
"""

from __future__ import annotations

import random


class Backoff:
    """Delays between attempts: uniform in [floor, ceiling], the ceiling doubling up to `maximum_s`."""

    def __init__(
        self, rng: random.Random, *, initial_s: float = 0.05, maximum_s: float = 2.0, floor_s: float = 0.01
    ) -> None:
        self._rng = rng
        self._initial_s = initial_s
        self._maximum_s = maximum_s
        self._floor_s = floor_s
        self._ceiling_s = initial_s

    def next_delay_s(self) -> float:
        delay_s = self._rng.uniform(self._floor_s, self._ceiling_s)
        self._ceiling_s = min(self._ceiling_s * 2, self._maximum_s)
        return delay_s

    def reset(self) -> None:
        self._ceiling_s = self._initial_s


class Breaker:
    """Opens after `limit` timeouts with no answer between them; any answer closes it."""

    def __init__(self, limit: int = 3) -> None:
        self._limit = limit
        self._timeouts = 0

    @property
    def is_open(self) -> bool:
        return self._timeouts >= self._limit

    def timed_out(self) -> None:
        self._timeouts += 1

    def answered(self) -> None:
        self._timeouts = 0
