"""Series over wall time as charts: thinned to what a page can show, with the values of a moment under the pointer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvstore_console.axes import Unit, clock_text, time_axis
from kvstore_console.charts import Curve, area_chart, columns, empty_chart, line_chart, stacked
from kvstore_console.terminal import known, mean

MAX_POINTS = 240
_POINTER_COLUMNS = 80


@dataclass(frozen=True, slots=True)
class ChartSeries:
    """A named series of a chart over time: one value for each sample, NaN for a missing one. `mark` is the mark of its
    `Curve`. If there are too many samples, neighbours are replaced by their mean, or with `is_peak` by their highest
    value.
    """

    label: str
    values: Sequence[float]
    mark: str = ""
    is_peak: bool = False


def history_chart(
    title: str, note: str, unit: Unit, at_s: Sequence[float], series: Sequence[ChartSeries], *, is_stacked: bool = False
) -> str:
    """Return a chart of `series` as HTML, over the wall times `at_s` of the samples, in seconds since the epoch. `unit`
    is the kind of number on the y axis. `is_stacked` draws the series as areas on top of each other, except those
    with a mark.
    """
    at_s, series = _thinned(at_s, series)
    series = [each for each in series if known(each.values)]
    if len(at_s) < 2 or not series:
        return empty_chart(title, note)
    curves = [Curve(each.label, list(zip(at_s, each.values, strict=True)), each.mark) for each in series]
    x = time_axis(at_s[0], at_s[-1])
    y = unit.axis(value for curve in (_edges(curves) if is_stacked else curves) for _, value in curve.points)
    stride = max(1, math.ceil(len(at_s) / _POINTER_COLUMNS))
    texts = [_moment(at_s, series, unit, first, stride) for first in range(0, len(at_s), stride)]
    draw = area_chart if is_stacked else line_chart
    return draw(title, note, curves, x, y, over=columns(x, at_s[::stride], texts))


def _moment(at_s: Sequence[float], series: Sequence[ChartSeries], unit: Unit, first: int, stride: int) -> str:
    """Return the values of all series at the sample in the middle of a stride, one line each."""
    at = min(first + stride // 2, len(at_s) - 1)
    values = [(each.label, each.values[at]) for each in series]
    shown = [f"{label}: {'-' if math.isnan(value) else unit.show(value)}" for label, value in values]
    return "\n".join([clock_text(at_s[at]), *shown])


def _edges(curves: Sequence[Curve]) -> list[Curve]:
    """Return the curves with a mark, and the highest edge of the others when they are stacked."""
    below = [(at, 0.0) for at, _ in curves[0].points]
    for curve in curves:
        if not curve.mark:
            below = stacked(below, [(at, 0.0 if math.isnan(value) else value) for at, value in curve.points])
    return [Curve("", below), *(curve for curve in curves if curve.mark)]


def _thinned(at_s: Sequence[float], series: Sequence[ChartSeries]) -> tuple[Sequence[float], Sequence[ChartSeries]]:
    """Return at most `MAX_POINTS` samples: neighbours are averaged; a series of peaks keeps the highest."""
    stride = math.ceil(len(at_s) / MAX_POINTS)
    if stride <= 1:
        return at_s, series
    firsts = range(0, len(at_s), stride)
    ends = [at_s[min(first + stride, len(at_s)) - 1] for first in firsts]
    merged = [
        replace(each, values=[_merged(each.values[first : first + stride], each.is_peak) for first in firsts])
        for each in series
    ]
    return ends, merged


def _merged(values: Sequence[float], is_peak: bool) -> float:
    return max(known(values), default=math.nan) if is_peak else mean(values)
