"""When requests are sent: by a number of clients that each wait for their answer, or at times of their own.

Owns the two kinds of load. A closed loop slows down with the server and hides its queue; an open loop (Poisson) does
not, and its latencies count from when a request was due, also if it was sent late (no coordinated omission).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvstore_engine.errors import UsageError


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """`concurrency` clients, each with one request at a time."""

    concurrency: int

    def __post_init__(self) -> None:
        if self.concurrency < 1:
            raise UsageError(f"the concurrency must be at least 1, got {self.concurrency}")

    def __str__(self) -> str:
        return f"{self.concurrency} client{'s' if self.concurrency > 1 else ''}"


@dataclass(frozen=True, slots=True)
class OpenLoop:
    """Requests due at random times, `rate` a second on average."""

    rate: float
    seed: int = 1

    def __post_init__(self) -> None:
        if not 0 < self.rate < float("inf"):
            raise UsageError(f"the rate must be over 0 requests a second, got {self.rate}")

    def due_s(self, count: int) -> list[float]:
        """Seconds from the start, one for each request; the same for the same seed."""
        gaps = np.random.Generator(np.random.PCG64(self.seed)).exponential(1 / self.rate, count)
        due: list[float] = np.cumsum(gaps).tolist()
        return due

    def __str__(self) -> str:
        return f"{self.rate:g} requests/s"


Arrivals = ClosedLoop | OpenLoop
