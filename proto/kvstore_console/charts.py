"""Charts as SVG inside HTML: curves, stacked areas, bars, with axes, a legend, and values where the pointer is.

Pure text out of numbers; colours are CSS classes of the page. Invariants: a gap (NaN) in the data is a gap in the
drawing; colour follows the thing, in a fixed order, and the legend names it; a curve that a later one hides is drawn
wide; every text from outside is escaped; no script, nothing loaded from elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from html import escape
from typing import TypeVar

from kvstore_console.axes import Axis, Show
from kvstore_console.page import COLOURS

WIDTH, HEIGHT = 640, 280
_LEFT, _RIGHT, _TOP, _BOTTOM = 68, 16, 12, 42
_BAR, _GAP, _VALUE_WIDTH = 22, 8, 110
_DASHES = 3
_SAME = 1.5  # units of the drawing: points nearer than that look like one
Points = Sequence[tuple[float, float]]
_Item = TypeVar("_Item")


@dataclass(frozen=True, slots=True)
class Curve:
    """One curve of a chart, through `points` (x, y). If `mark` is "limit" or "outline", it is drawn grey and never
    stacked. Curves with the same `colour` and `dash` look alike; without a colour, the curve's place among the
    others decides. With `has_dots` each point has a dot that shows its value.
    """

    label: str
    points: Points
    mark: str = ""
    has_dots: bool = False
    colour: int | None = None
    dash: int = 0
    is_strong: bool = False


def line_chart(
    title: str, note: str, curves: Sequence[Curve], x: Axis, y: Axis, point: Show | None = None, over: str = ""
) -> str:
    """Return a line chart of `curves` as HTML, with the axes `x` and `y`. Colours are given in the order of the curves.
    `point` writes the value of a dot as text; `over` is SVG drawn on top.
    """
    placed = [[_place(x, y, each) for each in curve.points] for curve in curves]
    drawn, labels, number, marked = [], [], 0, 0
    for at, curve in enumerate(curves):
        look = _look(curve, marked if curve.mark else number)
        number, marked = number + (not curve.mark), marked + bool(curve.mark)
        look += " wide" * any(_is_hidden(placed[at], later) for later in placed[at + 1 :])
        drawn.append(f'<path class="curve {look}" d="{_line(placed[at])}"><title>{escape(curve.label)}</title></path>')
        if curve.has_dots:
            drawn += _dots(curve, placed[at], look.split()[0], x.show, point or y.show)
        labels.append((curve.label, f'<svg class="swatch"><path class="curve {look}" d="M0,5H26"/></svg>'))
    return _figure(title, note, _axes(x, y) + "".join(drawn) + over, labels)


def area_chart(title: str, note: str, curves: Sequence[Curve], x: Axis, y: Axis, over: str = "") -> str:
    """Return a chart of `curves` as HTML, stacked as areas from the bottom up; they share their x values. Curves with a
    mark are drawn as lines on top. `over` is SVG drawn last.
    """
    drawn, labels, number = [], [], 0
    below: Points = []
    for curve in curves:
        if curve.mark:
            continue
        below = below or [(at, 0.0) for at, _ in curve.points]
        above = stacked(below, curve.points)
        colour = (number if curve.colour is None else curve.colour) % COLOURS
        shape = _area([_place(x, y, each) for each in below], [_place(x, y, each) for each in above])
        drawn.append(f'<path class="area k{colour}" d="{shape}"><title>{escape(curve.label)}</title></path>')
        labels.append((curve.label, _square(colour)))
        below = [low if math.isnan(high[1]) else high for low, high in zip(below, above, strict=True)]
        number += 1
    for curve in curves:
        if curve.mark:
            drawn.append(f'<path class="curve {curve.mark}" d="{_line([_place(x, y, p) for p in curve.points])}"/>')
            labels.append((curve.label, f'<svg class="swatch"><path class="curve {curve.mark}" d="M0,5H26"/></svg>'))
    return _figure(title, note, "".join(drawn) + _axes(x, y) + over, labels)


def bar_chart(
    title: str, note: str, groups: Sequence[tuple[str, Sequence[float]]], series: Sequence[str], show: Show
) -> str:
    """Return a chart of horizontal bars as HTML. Each of `groups` is a name and its values, one value for each name in
    `series`. All bars have one scale, from zero to the largest value. `show` writes a value as text.
    """
    most = max((value for _, values in groups for value in values), default=0.0) or 1.0
    drawn, down = [], 8.0
    for name, values in groups:
        drawn.append(f'<text class="name" x="0" y="{down + 13:.0f}">{escape(name)}</text>')
        down += 20
        for number, value in enumerate(values):
            width, text = max(1.0, value / most * (WIDTH - _VALUE_WIDTH)), escape(show(value))
            drawn.append(
                f'<rect class="area k{number % COLOURS}" x="0" y="{down:.0f}" width="{width:.1f}" '
                f'height="{_BAR - 6}" rx="3"><title>{escape(series[number])}: {text}</title></rect>'
                f'<text class="tick" x="{width + 6:.1f}" y="{down + 12:.0f}">{text}</text>'
            )
            down += _BAR
        down += _GAP
    labels = [(name, _square(number)) for number, name in enumerate(series)]
    return _figure(title, note, "".join(drawn), labels, max(60, round(down)))


def empty_chart(title: str, note: str) -> str:
    """Return the HTML figure, with `title` and `note`, that is shown when a chart has no data."""
    return _framed(title, note, '<p class="nothing">nothing to show yet</p>')


def stacked(below: Points, points: Points) -> list[tuple[float, float]]:
    """Return the upper edge of an area: the y of each of `points` added to the y of the same position in `below`. A gap
    (NaN) stays a gap.
    """
    return [(at, low + value) for (_, low), (at, value) in zip(below, points, strict=True)]


def merged(curves: Sequence[Curve], x: Axis, y: Axis) -> list[Curve]:
    """Return `curves`, with curves that coincide on the drawing merged into one curve that has all their names. `x` and
    `y` are the chart's axes.
    """
    groups: dict[tuple[tuple[int, int], ...], list[Curve]] = {}
    for curve in curves:
        pixels = tuple((round(_across(x, at)), round(_down(y, value))) for at, value in curve.points)
        groups.setdefault(pixels, []).append(curve)
    return [replace(same[0], label=" = ".join(curve.label for curve in same)) for same in groups.values()]


def columns(x: Axis, at: Sequence[float], texts: Sequence[str]) -> str:
    """Return SVG of invisible columns over a chart with the x axis `x`. Column number i reaches from the x value
    `at[i]` to the next one, and shows the text `texts[i]` while the pointer is over it.
    """
    edges = [_across(x, each) for each in [*at, x.high]]
    return "".join(
        f'<rect class="under" x="{first:.1f}" y="{_TOP}" width="{max(last - first, 1.0):.1f}" '
        f'height="{HEIGHT - _TOP - _BOTTOM}"><title>{escape(text)}</title></rect>'
        for first, last, text in zip(edges, edges[1:], texts, strict=False)
    )


def _look(curve: Curve, place: int) -> str:
    """Return the CSS classes of colour, dash and width. Curves without a colour of their own go through all colours,
    then dashed.
    """
    if curve.mark:
        return curve.mark + (f" d{1 + place % _DASHES}" if curve.mark == "limit" and place else "")
    rounds, number = divmod(place if curve.colour is None else curve.colour, COLOURS)
    dash = (rounds + curve.dash) % (_DASHES + 1)
    return f"c{number}" + (f" d{dash}" if dash else "") + " strong" * curve.is_strong


def _dots(curve: Curve, placed: Points, colour: str, at: Show, value: Show) -> Iterator[str]:
    for (across, down), point in zip(placed, curve.points, strict=True):
        text = escape(f"{curve.label}: {value(point[1])} at {at(point[0])}")
        yield f'<circle class="dot {colour}" cx="{across:.1f}" cy="{down:.1f}" r="3"><title>{text}</title></circle>'


def _is_hidden(points: Points, later: Points) -> bool:
    """Return whether the curve `later`, drawn after this one, covers at least half of it."""
    if len(points) != len(later):
        return False
    near = sum(abs(a[0] - b[0]) + abs(a[1] - b[1]) < _SAME for a, b in zip(points, later, strict=True))
    return near > 0 and 2 * near >= sum(not math.isnan(down) for _, down in points)


def _line(placed: Points) -> str:
    """Return the SVG path through `placed`, broken at gaps; a value alone between gaps is a dot."""
    return "".join(
        "M" + "L".join(f"{across:.1f},{down:.1f}" for across, down in run) + ("h0.1" if len(run) == 1 else "")
        for run in _runs(placed, lambda point: point[1])
    )


def _area(below: Points, above: Points) -> str:
    shapes = []
    for run in _runs(list(zip(below, above, strict=True)), lambda pair: pair[1][1]):
        shapes.append([*(high for _, high in run), *(low for low, _ in reversed(run))])
    return "".join("M" + "L".join(f"{across:.1f},{down:.1f}" for across, down in shape) + "Z" for shape in shapes)


def _runs(items: Sequence[_Item], height: Callable[[_Item], float]) -> list[list[_Item]]:
    """Return the runs of `items` that follow each other without a gap. A gap is an item whose `height` is NaN."""
    runs: list[list[_Item]] = [[]]
    for item in items:
        if math.isnan(height(item)):
            runs.append([])
        else:
            runs[-1].append(item)
    return [run for run in runs if run]


def _place(x: Axis, y: Axis, point: tuple[float, float]) -> tuple[float, float]:
    return _across(x, point[0]), math.nan if math.isnan(point[1]) else _down(y, point[1])


def _across(x: Axis, value: float) -> float:
    return _LEFT + x.at(value) * (WIDTH - _LEFT - _RIGHT)


def _down(y: Axis, value: float) -> float:
    return _TOP + (1 - y.at(value)) * (HEIGHT - _TOP - _BOTTOM)


def _axes(x: Axis, y: Axis) -> str:
    parts = []
    for value in y.marks:
        down, text = _down(y, value), escape(y.show(value))
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{down:.1f}" y2="{down:.1f}"/>')
        parts.append(f'<text class="tick" x="{_LEFT - 6}" y="{down + 4:.1f}" text-anchor="end">{text}</text>')
    floor = HEIGHT - _BOTTOM
    for value in x.marks:
        across, text = _across(x, value), escape(x.show(value))
        anchor = "start" if x.at(value) < 0.04 else "end" if x.at(value) > 0.96 else "middle"
        parts.append(f'<line class="axis" x1="{across:.1f}" x2="{across:.1f}" y1="{floor}" y2="{floor + 4}"/>')
        parts.append(f'<text class="tick" x="{across:.1f}" y="{floor + 18}" text-anchor="{anchor}">{text}</text>')
    parts.append(f'<line class="axis" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{floor}" y2="{floor}"/>')
    middle = (_LEFT + WIDTH - _RIGHT) / 2
    parts.append(f'<text class="tick" x="{middle}" y="{HEIGHT - 4}" text-anchor="middle">{escape(x.label)}</text>')
    return "".join(parts)


def _square(number: int) -> str:
    return f'<i class="key k{number % COLOURS}"></i>'


def _figure(title: str, note: str, drawn: str, labels: Sequence[tuple[str, str]], height: int = HEIGHT) -> str:
    """Return the figure as HTML. `labels`: pairs of a curve's name and the markup of the sign that stands for it."""
    legend = "".join(f"<span>{mark}{escape(label)}</span>" for label, mark in labels)
    svg = f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(title)}">{drawn}</svg>'
    return _framed(title, note, f'{svg}<div class="legend">{legend}</div>')


def _framed(title: str, note: str, body: str) -> str:
    small = f"<small>{escape(note)}</small>" if note else ""
    return f"<figure><figcaption>{escape(title)}{small}</figcaption>{body}</figure>"
