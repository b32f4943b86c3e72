"""Times and what is said of them. Medians where a figure is typical, percentiles where it is a promise."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence


def time_once(action: Callable[[], object]) -> float:
    """Seconds that one call took."""
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def time_each(action: Callable[[], object], times: int) -> list[float]:
    """Seconds of each of `times` calls, one after the other."""
    return [time_once(action) for _ in range(times)]


def percentile(seconds: Sequence[float], percent: float) -> float:
    """The smallest sample that at least `percent` of all samples do not exceed (nearest rank)."""
    ordered = sorted(seconds)
    return ordered[max(math.ceil(len(ordered) * percent / 100), 1) - 1]


def median(seconds: Sequence[float]) -> float:
    return percentile(seconds, 50)


def warm(once: Callable[[], float], longest_s: float) -> None:
    """Repeat `once`, which says how long it took, for `longest_s`: whatever is compared is as warm."""
    took_s = 0.0
    while took_s < longest_s:
        took_s += once()
