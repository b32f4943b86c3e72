"""Charts as inline SVG: lines and stacked areas over time, with axes, units, a legend, and values under the pointer.

Pure text out of numbers. Colours are CSS classes, so that the page's light and dark themes apply. Invariants: every
text that comes from outside is escaped; a gap in the data is a gap in the drawing; no script, nothing from elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from kvstore_client.cli.past import known
from kvstore_client.cli.scales import Scale, Unit, clock_text, time_scale

WIDTH, HEIGHT = 600, 230
_LEFT, _RIGHT, _TOP, _BOTTOM = 72, 14, 10, 26
COLOURS = 8
MAX_POINTS = 240
_POINTER_COLUMNS = 80
_SAME = 1.5  # units of the drawing: lines nearer than that cannot be told apart


@dataclass(frozen=True, slots=True)
class Curve:
    """One series. `mark` draws it in grey and never stacks it: "limit" dashed, "outline" as a thin line."""

    label: str
    values: Sequence[float]
    mark: str = ""
    is_peak: bool = False  # thinned by its highest value, not its mean


@dataclass(frozen=True, slots=True)
class Chart:
    """What is drawn. With `is_stacked` the curves lie upon each other."""

    title: str
    unit: Unit
    at_s: Sequence[float]
    curves: Sequence[Curve]
    is_stacked: bool = False
    note: str = ""


def draw(chart: Chart) -> str:
    """A `<figure>`."""
    chart = _thinned(chart)
    drawn = [curve for curve in chart.curves if known(curve.values)]
    is_empty = len(chart.at_s) < 2 or not drawn
    body = '<p class="nothing">nothing to show yet</p>' if is_empty else _svg(chart, drawn)
    note = f"<small>{escape(chart.note)}</small>" if chart.note else ""
    return f"<figure><figcaption>{escape(chart.title)}{note}</figcaption>{body}</figure>"


def _svg(chart: Chart, curves: Sequence[Curve]) -> str:
    tops = _stacked([curve for curve in curves if not curve.mark]) if chart.is_stacked else []
    marks = [curve for curve in curves if curve.mark]
    seen = [value for values in tops for value in values] if chart.is_stacked else []
    seen += [value for curve in (marks if chart.is_stacked else curves) for value in curve.values]
    across, up = time_scale(chart.at_s[0], chart.at_s[-1]), chart.unit.scale(seen)
    xs = [_x(across, at_s) for at_s in chart.at_s]
    parts = [_grid(across, up)]
    colour = 0
    floor = [0.0] * len(xs)
    shown: list[tuple[str, str]] = []
    for curve in curves:
        if curve.mark:
            style = curve.mark
            parts.append(_path(xs, [_y(up, value) for value in curve.values], style))
        elif chart.is_stacked:
            style = f"a{colour % COLOURS}"
            ceiling = tops[colour]
            parts.append(_area(xs, [_y(up, value) for value in floor], [_y(up, value) for value in ceiling], style))
            floor = [low if math.isnan(high) else high for low, high in zip(floor, ceiling, strict=True)]
            colour += 1
        else:
            style = f"s{colour % COLOURS}" + (" wide" if _is_covered(curve, curves, up) else "")
            parts.append(_path(xs, [_y(up, value) for value in curve.values], style))
            colour += 1
        shown.append((style, curve.label))
    parts.append(_pointer(chart, curves, xs))
    label = escape(chart.title, quote=True)
    svg = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">{"".join(parts)}</svg>'
    return svg + _legend(shown)


def _is_covered(curve: Curve, curves: Sequence[Curve], up: Scale) -> bool:
    """Whether a line that is drawn later would hide half of this one or more: it is drawn wide then."""
    heights = [_y(up, value) for value in curve.values]
    for other in curves[1 + curves.index(curve) :]:
        apart = [abs(ours - _y(up, value)) for ours, value in zip(heights, other.values, strict=True)]
        if 2 * sum(distance < _SAME for distance in apart) >= len(known(heights)):
            return True
    return False


def _grid(across: Scale, up: Scale) -> str:
    parts = []
    for tick in up.ticks:
        y = _y(up, tick.value)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(
            f'<text class="tick" x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{escape(tick.label)}</text>'
        )
    for tick in across.ticks:
        x = _x(across, tick.value)
        anchor = "end" if x > WIDTH - _RIGHT - 20 else "middle"
        parts.append(f'<line class="tickmark" x1="{x:.1f}" x2="{x:.1f}" y1="{_floor()}" y2="{_floor() + 4}"/>')
        parts.append(f'<text class="tick" x="{x:.1f}" y="{_floor() + 17}" text-anchor="{anchor}">{tick.label}</text>')
    parts.append(f'<line class="axis" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{_floor()}" y2="{_floor()}"/>')
    return "".join(parts)


def _path(xs: Sequence[float], ys: Sequence[float], style: str) -> str:
    """A line with gaps; a value alone between gaps is a dot."""
    parts = []
    for run in _runs(ys):
        if len(run) == 1:
            parts.append(f"M{xs[run[0]]:.1f},{ys[run[0]]:.1f}h0.1")
        else:
            parts.append("M" + "L".join(f"{xs[place]:.1f},{ys[place]:.1f}" for place in run))
    return f'<path class="{style}" d="{"".join(parts)}"/>'


def _area(xs: Sequence[float], low: Sequence[float], high: Sequence[float], style: str) -> str:
    parts = []
    for run in _runs(high):
        above = [f"{xs[place]:.1f},{high[place]:.1f}" for place in run]
        below = [f"{xs[place]:.1f},{low[place]:.1f}" for place in reversed(run)]
        parts.append("M" + "L".join([*above, *below]) + "Z")
    return f'<path class="{style}" d="{"".join(parts)}"/>'


def _runs(values: Sequence[float]) -> list[list[int]]:
    """Places of values that follow each other without a gap."""
    runs: list[list[int]] = [[]]
    for place, value in enumerate(values):
        if math.isnan(value):
            runs.append([])
        else:
            runs[-1].append(place)
    return [run for run in runs if run]


def _pointer(chart: Chart, curves: Sequence[Curve], xs: Sequence[float]) -> str:
    """Invisible columns that tell the values when the pointer is over them."""
    stride = max(1, math.ceil(len(xs) / _POINTER_COLUMNS))
    parts = []
    for first in range(0, len(xs), stride):
        last = min(first + stride, len(xs) - 1)
        place = min(first + stride // 2, len(xs) - 1)
        told = [clock_text(chart.at_s[place], with_seconds=True)]
        for curve in curves:
            value = curve.values[place]
            told.append(f"{curve.label}: {'-' if math.isnan(value) else chart.unit.text(value)}")
        width = max(xs[last] - xs[first], 1.0)
        parts.append(
            f'<rect class="under" x="{xs[first]:.1f}" y="{_TOP}" width="{width:.1f}" height="{_floor() - _TOP}">'
            f"<title>{escape(chr(10).join(told))}</title></rect>"
        )
    return "".join(parts)


def _legend(shown: Sequence[tuple[str, str]]) -> str:
    items = "".join(f'<span><i class="key {style}"></i>{escape(label)}</span>' for style, label in shown)
    return f'<div class="legend">{items}</div>'


def _stacked(curves: Sequence[Curve]) -> list[list[float]]:
    """Upper edge of each curve's area; a gap counts as nothing for those above it."""
    tops: list[list[float]] = []
    below = [0.0] * (len(curves[0].values) if curves else 0)
    for curve in curves:
        tops.append(
            [low + (0.0 if math.isnan(value) else value) for low, value in zip(below, curve.values, strict=True)]
        )
        below = tops[-1]
    return tops


def _thinned(chart: Chart) -> Chart:
    """At most `MAX_POINTS` samples: neighbours are averaged, peaks kept."""
    stride = math.ceil(len(chart.at_s) / MAX_POINTS)
    if stride <= 1:
        return chart
    firsts = range(0, len(chart.at_s), stride)
    curves = [
        Curve(
            curve.label,
            [_merged(curve.values[first : first + stride], is_peak=curve.is_peak) for first in firsts],
            curve.mark,
            curve.is_peak,
        )
        for curve in chart.curves
    ]
    at_s = [chart.at_s[min(first + stride, len(chart.at_s)) - 1] for first in firsts]
    return Chart(chart.title, chart.unit, at_s, curves, chart.is_stacked, chart.note)


def _merged(values: Sequence[float], *, is_peak: bool) -> float:
    numbers = known(values)
    if not numbers:
        return math.nan
    return max(numbers) if is_peak else sum(numbers) / len(numbers)


def _x(across: Scale, at_s: float) -> float:
    return _LEFT + across.share(at_s) * (WIDTH - _LEFT - _RIGHT)


def _y(up: Scale, value: float) -> float:
    return math.nan if math.isnan(value) else _floor() - up.share(value) * (_floor() - _TOP)


def _floor() -> int:
    return HEIGHT - _BOTTOM
