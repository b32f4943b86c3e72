"""Axes: where the ticks go, what stands beside them, and where a value lies between the edges of a chart.

Pure arithmetic and text. Invariants: ticks are round numbers of their unit, ascending, inside the scale; a linear scale
begins at 0; labels of one axis differ from each other.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvstore_client.cli.past import known

_TIME_STEPS_S = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400)
_LEAST = 1e-3  # below it a series is nothing
_BYTE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


@dataclass(frozen=True, slots=True)
class Tick:
    value: float
    label: str


@dataclass(frozen=True, slots=True)
class Scale:
    """From `low` to `high`; `share` tells where a value lies, from 0 to 1."""

    low: float
    high: float
    ticks: tuple[Tick, ...]
    is_log: bool = False

    def share(self, value: float) -> float:
        if self.is_log:
            value = max(value, self.low)
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)


@dataclass(frozen=True, slots=True)
class Unit:
    """How a kind of number is written, and in what steps its axis goes."""

    text: Callable[[float], str]
    base: int = 10
    is_log: bool = False
    top: float = 0.0  # the axis ends here, whatever the values

    def scale(self, values: Sequence[float], ticks: int = 4) -> Scale:
        """A scale that holds all values."""
        if self.is_log:
            return _log_scale(values, self)
        high = self.top or max(known(values), default=0.0)
        if high < _LEAST:
            high = 1.0
        step = _byte_step(high / ticks) if self.base == 2 else _round_step(high / ticks)
        last = self.top or step * math.ceil(high / step - 1e-9)
        marks = [step * number for number in range(round(last / step) + 1)]
        return Scale(0.0, last, tuple(Tick(mark, self.text(mark)) for mark in marks))


def bytes_text(value: float, suffix: str = "") -> str:
    """1536 -> "1.5 KiB"; three digits at most before the unit changes."""
    if value == 0:
        return f"0{suffix and ' B' + suffix}"
    unit = 0
    while value >= 1024 and unit < len(_BYTE_UNITS) - 1:
        value /= 1024
        unit += 1
    return f"{value:.3g} {_BYTE_UNITS[unit]}{suffix}" if value < 1000 else f"{value:.0f} {_BYTE_UNITS[unit]}{suffix}"


def count_text(value: float, suffix: str = "") -> str:
    """12500 -> "12.5k"."""
    for limit, letter in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if value >= limit:
            divided = value / (1e3 if letter == "k" else limit)
            return f"{divided:.3g}{letter}{suffix}"
    return f"{value:,.0f}{suffix}" if value >= 100 or value == int(value) else f"{value:.3g}{suffix}"


def microseconds_text(value: float) -> str:
    """1500 -> "1.5 ms"."""
    if value >= 1e6:
        return f"{value / 1e6:.3g} s"
    return f"{value / 1e3:.3g} ms" if value >= 1e3 else f"{value:.3g} µs"


BYTES = Unit(bytes_text, base=2)
BYTES_A_SECOND = Unit(lambda value: bytes_text(value, "/s"), base=2)
COUNT = Unit(count_text)
BLOCKS_A_SECOND = REQUESTS_A_SECOND = Unit(lambda value: count_text(value, "/s"))
SHARE = Unit(lambda value: f"{value:.4g} %", top=100.0)
LATENCY = Unit(microseconds_text, is_log=True)


def time_scale(first_s: float, last_s: float, ticks: int = 6) -> Scale:
    """Of wall times, with ticks at round local times."""
    last_s = max(last_s, first_s + 1)
    wanted_s = (last_s - first_s) / ticks
    step_s = next((step for step in _TIME_STEPS_S if step >= wanted_s), 86400 * math.ceil(wanted_s / 86400))
    offset_s = time.localtime(last_s).tm_gmtoff
    mark = math.ceil((first_s + offset_s) / step_s) * step_s - offset_s
    marks: list[Tick] = []
    while mark <= last_s:
        marks.append(Tick(mark, clock_text(mark, with_seconds=step_s < 60)))
        mark += step_s
    return Scale(first_s, last_s, tuple(marks))


def clock_text(at_s: float, *, with_seconds: bool) -> str:
    return time.strftime("%H:%M:%S" if with_seconds else "%H:%M", time.localtime(round(at_s)))


def _round_step(step: float) -> float:
    """The next of 1, 2, 2.5, 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(step))
    return next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= step * (1 - 1e-9))


def _byte_step(step: float) -> float:
    """The next power of two."""
    return 2.0 ** max(0, math.ceil(math.log2(step) - 1e-9))


def _log_scale(values: Sequence[float], unit: Unit) -> Scale:
    """Whole decades around the values; ticks at 1 and, where there is room, at 2 and 5."""
    positive = [max(value, _LEAST) for value in known(values) if value > 0]
    low = 10.0 ** math.floor(math.log10(min(positive, default=1.0)) + 1e-9)
    high = 10.0 ** math.ceil(math.log10(max(positive, default=10.0)) - 1e-9)
    if high <= low:
        high = low * 10
    decades = round(math.log10(high / low))
    factors = (1, 2, 5) if decades <= 2 else (1,)
    marks = [low * 10**decade * factor for decade in range(decades) for factor in factors] + [high]
    return Scale(low, high, tuple(Tick(mark, unit.text(mark)) for mark in marks), is_log=True)
