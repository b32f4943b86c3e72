"""Axes of charts: their ends, the marks between them, and the text beside a mark.

Pure arithmetic and text. Invariants: marks are round numbers of their unit, ascending, inside the axis; an axis that a
`Unit` makes holds all the values, and its labels differ from each other; a linear axis begins at 0.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from kvstore_console.terminal import known
from kvstore_console.units import human_bytes, human_seconds, short_count

Show = Callable[[float], str]
_TIME_STEPS_S = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400)
_LEAST = 1e-9  # a value below it is nothing


@dataclass(frozen=True, slots=True)
class Axis:
    """An axis of a chart for values from `low` to `high`. `marks` are the values that are labelled, and `show` writes a
    value as text. `high` is above `low`; on a logarithmic axis (`is_log`) `low` is above 0.
    """

    low: float
    high: float
    marks: Sequence[float]
    show: Show
    label: str = ""
    is_log: bool = False

    def at(self, value: float) -> float:
        """Return the position of `value` along the axis, from 0 (the low end) to 1 (the high end). A value outside the
        axis gets the nearer end.
        """
        low, high = self.low, self.high
        if self.is_log:
            low, high, value = math.log(low), math.log(high), math.log(max(value, low))
        return min(1.0, max(0.0, (value - low) / (high - low)))


@dataclass(frozen=True, slots=True)
class Unit:
    """A kind of number on a chart's axis, such as bytes or seconds. `show` writes a number as text, `base` (10 or 2)
    decides which marks are round, `is_log` makes the axis logarithmic, and `top` is a fixed upper end of the axis, or 0
    for none.
    """

    show: Show
    base: int = 10
    is_log: bool = False
    top: float = 0.0  # the axis ends here for any values

    def axis(self, values: Iterable[float], marks: int = 4) -> Axis:
        """Return an axis for `values` with about `marks` marks. It goes from 0 to a round number above the highest
        value, or, if logarithmic, over whole decades around the values.
        """
        found = known(list(values))
        if self.is_log:
            positive = [max(value, _LEAST) for value in found if value > 0]
            low = 10.0 ** math.floor(math.log10(min(positive, default=1.0)) + 1e-9)
            high = 10.0 ** math.ceil(math.log10(max(positive, default=10.0)) - 1e-9)
            return log_axis(low, max(high, low * 10), self.show)
        high = self.top or max(found, default=0.0)
        if high < _LEAST:
            high = 1.0
        step = 2.0 ** max(0, _power(high / marks)) if self.base == 2 else _round_step(high / marks)
        last = self.top or step * max(1, math.ceil(high / step - 1e-9))
        return Axis(0.0, last, [step * number for number in range(round(last / step) + 1)], self.show)


def linear_axis(low: float, high: float, show: Show, label: str = "") -> Axis:
    """Return a linear axis from `low` to `high` with marks at round numbers. `show` writes a value as text, and `label`
    stands beside the axis.
    """
    high = high if high > low else low + 1
    step = _round_step((high - low) / 5)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return Axis(low, high, [step * number for number in range(first, last + 1)], show, label)


def log_axis(low: float, high: float, show: Show, label: str = "", marks: Sequence[float] = ()) -> Axis:
    """Return a logarithmic axis from `low` to `high`. `marks` are the values to label, by default some of 1, 2 and 5
    times powers of ten. `show` writes a value as text, and `label` stands beside the axis.
    """
    low, high = max(low, _LEAST), max(high, low * 1.0001, _LEAST * 10)
    if not marks:
        decades = range(math.floor(math.log10(low) + 1e-9), math.ceil(math.log10(high) - 1e-9) + 1)
        for factors in ((1, 2, 5), (1, 3), (1,)):
            marks = [factor * 10.0**decade for decade in decades for factor in factors]
            marks = [mark for mark in marks if low * 0.999 <= mark <= high * 1.001] or [low]
            if len(marks) <= 8:
                break
    return Axis(low, high, sorted(set(marks)), show, label, is_log=True)


def time_axis(first_s: float, last_s: float, marks: int = 6) -> Axis:
    """Return an axis of wall times from `first_s` to `last_s`, in seconds since the epoch, with about `marks` marks at
    round local times.
    """
    last_s = max(last_s, first_s + 1)
    wanted_s = (last_s - first_s) / marks
    step_s = next((step for step in _TIME_STEPS_S if step >= wanted_s), 86400 * math.ceil(wanted_s / 86400))
    offset_s = time.localtime(last_s).tm_gmtoff
    mark_s = math.ceil((first_s + offset_s) / step_s) * step_s - offset_s
    marked = [mark_s + step_s * number for number in range(int((last_s - mark_s) // step_s) + 1)]
    return Axis(first_s, last_s, marked, lambda at_s: clock_text(at_s, with_seconds=step_s < 60))


def clock_text(at_s: float, *, with_seconds: bool = True) -> str:
    return time.strftime("%H:%M:%S" if with_seconds else "%H:%M", time.localtime(round(at_s)))


def _bytes(value: float) -> str:
    return human_bytes(value).replace(".0 ", " ") if value else "0"


def _round_step(step: float) -> float:
    """Return the smallest of 1, 2, 2.5, 5 times a power of ten that is not below `step`."""
    power = 10.0 ** math.floor(math.log10(step))
    return next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= step * (1 - 1e-9))


def _power(step: float) -> int:
    """Return the exponent of the smallest power of two that is not below `step`."""
    return math.ceil(math.log2(step) - 1e-9)


BYTES = Unit(_bytes, base=2)
BYTES_A_SECOND = Unit(lambda value: f"{_bytes(value) if value else '0 B'}/s", base=2)
COUNT = Unit(short_count)
COUNT_A_SECOND = Unit(lambda value: f"{short_count(value)}/s")
PERCENT = Unit(lambda share: f"{share * 100:.4g} %", top=1.0)
SECONDS = Unit(human_seconds)
LATENCY = Unit(human_seconds, is_log=True)
