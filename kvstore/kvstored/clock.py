"""The clock as a parameter: only this file of the daemon reads the operating system's clocks.

It has the `Clock` protocol and its two implementations. Policies, residency and lanes never hold a clock: their calls
get `now_ns`, so that the simulator and the tests drive them in virtual time.
"""

from __future__ import annotations

import time
from typing import Protocol

NS_PER_S = 1_000_000_000
NS_PER_MS = 1_000_000


class Clock(Protocol):
    def monotonic_ns(self) -> int:
        """Return a time in nanoseconds that never goes back, from an arbitrary origin. Use it for leases, deadlines,
        ages and rates.
        """

    def wall_ns(self) -> int:
        """Return the nanoseconds since the epoch, which may jump. Use it for times that people read or that outlive the
        process.
        """


class SystemClock:
    """A clock that reads the operating system's clocks."""

    monotonic_ns = staticmethod(time.monotonic_ns)
    wall_ns = staticmethod(time.time_ns)


class ManualClock:
    """A clock that stands still until a caller moves it, for tests and the simulator."""

    def __init__(self, monotonic_ns: int = 0, wall_ns: int = 1_700_000_000 * NS_PER_S) -> None:
        self._monotonic_ns = monotonic_ns
        self._wall_offset_ns = wall_ns - monotonic_ns

    def monotonic_ns(self) -> int:
        return self._monotonic_ns

    def wall_ns(self) -> int:
        return self._monotonic_ns + self._wall_offset_ns

    def advance(self, *, s: float = 0.0, ns: int = 0) -> int:
        """Move the clock forward by `s` seconds and `ns` nanoseconds, and return the new monotonic time in ns. Raises
        RuntimeError on a step back.
        """
        return self.set_ns(self._monotonic_ns + round(s * NS_PER_S) + ns)

    def set_ns(self, monotonic_ns: int) -> int:
        if monotonic_ns < self._monotonic_ns:
            raise RuntimeError(f"clock moved back from {self._monotonic_ns} to {monotonic_ns} ns")
        self._monotonic_ns = monotonic_ns
        return monotonic_ns
