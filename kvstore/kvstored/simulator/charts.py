"""Charts as SVG inside HTML: lines, stacked areas, bars. Pure text out of numbers; runs no script, loads nothing.

Owns the look (colours for light and dark, axes, legends). Knows nothing of what it draws; every text that comes from
outside is escaped. Colour follows the thing, in a fixed order, and a legend names it. No two lines of a chart look
alike, up to forty.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import count

WIDTH, HEIGHT = 640, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 60, 16, 12, 40
_BAR, _GAP = 22, 8
_DASHES = 3
LIGHT = ("#3b6fd4", "#d9822b", "#2a9d6f", "#c2478f", "#7a5cc9", "#b8992a", "#3a9fb5", "#8a6d5a", "#5b6b2f", "#9c3d3d")
DARK = ("#7aa5f7", "#f0a65a", "#5fcf9f", "#ee85bf", "#ab92f2", "#e3c65a", "#6fcfe3", "#c7a890", "#b3c777", "#e08a8a")
_STYLE = """
:root{color-scheme:light dark;--page:#f6f7f9;--card:#fff;--text:#1c2430;--soft:#667085;--line:#e3e6eb;LIGHT}
@media(prefers-color-scheme:dark){:root{--page:#12161c;--card:#1b2129;--text:#e4e8ee;--soft:#94a0b2;--line:#2d3540;DARK}}
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--text)}
body{font:15px/1.45 system-ui,"Segoe UI",Roboto,"DejaVu Sans",sans-serif}
main{max-width:1320px;margin:0 auto;padding:28px 20px 48px}
h1{font-size:24px;margin:0}h2{font-size:17px;margin:26px 0 10px}.sub{color:var(--soft);margin:4px 0 20px}
.charts{display:grid;align-items:start;grid-template-columns:repeat(auto-fill,minmax(min(100%,480px),1fr));gap:14px}
@media(min-width:1014px){.charts>figure:last-child:nth-child(odd){grid-column:1/-1}}
.charts>figure:last-child:nth-child(odd) svg:not(.swatch){max-height:300px}
figure,.card{margin:0;background:var(--card);border:1px solid var(--line);border-radius:10px;padding:12px 14px 10px}
figcaption{font-weight:600}figcaption small{font-weight:400;color:var(--soft);margin-left:8px}
svg{display:block;width:100%;height:auto}.tick{font-size:12px;fill:var(--soft)}.name{font-size:13px;fill:var(--text)}
.grid{stroke:var(--line)}.curve{fill:none;stroke-width:2}.area{stroke:none;opacity:.85}
.d1{stroke-dasharray:5 4}.d2{stroke-dasharray:1.5 3.5}.d3{stroke-dasharray:9 3 2 3}.strong{stroke-width:4}
.cb{stroke:var(--soft)}.dot.cb{fill:var(--soft)}.swatch{display:inline-block;width:26px;height:10px;margin-right:6px}
.legend{display:flex;flex-wrap:wrap;gap:2px 16px;font-size:13px;color:var(--soft)}
.key{display:inline-block;width:12px;height:12px;border-radius:3px;margin-right:6px;vertical-align:-1px}
.card{margin-top:14px;overflow-x:auto}table{border-collapse:collapse;font-variant-numeric:tabular-nums}
th{font-weight:500;color:var(--soft);font-size:13px}
th,td{padding:6px 18px 6px 0;text-align:right;border-bottom:1px solid var(--line);white-space:nowrap}
th.w,td.w{text-align:left}
CURVES
"""
Show = Callable[[float], str]


@dataclass(frozen=True, slots=True)
class Line:
    """`has_dots`: each point can be pointed at; else it is one of many. `colour` and `dash` say what the line has in
    common with others; no colour is its place among them. A bound is grey; a strong line is the one to look for.
    """

    label: str
    points: list[tuple[float, float]]
    is_bound: bool = False
    has_dots: bool = True
    colour: int | None = None
    dash: int = 0
    is_strong: bool = False
    width: float = 0.0  # in pixels; 0 is the usual one


@dataclass(frozen=True, slots=True)
class Axis:
    """From `low` to `high`, which are shown as `show` has it."""

    low: float
    high: float
    label: str = ""
    is_log: bool = False
    show: Show = lambda value: f"{value:g}"

    def at(self, value: float) -> float:
        """Where on the axis, from 0 to 1."""
        low, high, value = (self._even(each) for each in (self.low, self.high, value))
        return (value - low) / ((high - low) or 1.0)

    def marks(self) -> list[float]:
        """Round values to label, some four to seven."""
        if self.is_log:
            decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            for steps in ((1, 2, 5), (1, 3), (1,)):
                found = [step * 10.0**decade for decade in decades for step in steps]
                found = [value for value in found if self.low <= value <= self.high]
                if len(found) <= 8:
                    break
            return found or [self.low]
        rough = (self.high - self.low) / 5 or 1.0
        scale = 10.0 ** math.floor(math.log10(rough))
        step = next(factor * scale for factor in (1, 2, 2.5, 5, 10) if factor * scale >= rough * 0.999)
        first = math.ceil(self.low / step - 1e-9)
        return [number * step for number in range(first, math.floor(self.high / step + 1e-9) + 1)]

    def _even(self, value: float) -> float:
        return math.log10(max(value, 1e-12)) if self.is_log else value


def line_chart(
    title: str, note: str, lines: Sequence[Line], x: Axis, y: Axis, point: Show = lambda v: f"{v:.4f}"
) -> str:
    """Curves in the order of their colours. `point` shows a value where one points at it."""
    drawn, labels = [], []
    places = {True: count(), False: count()}  # bounds have greys of their own
    for line in lines:
        place = next(places[line.is_bound])
        colour, mark = _look(line, place)
        labels.append(
            (
                line.label,
                f'<svg class="swatch"><line class="curve{mark} {colour}"{_width(line)} x2="26" y1="5" y2="5"/></svg>',
            )
        )
        drawn.append(
            f'<polyline class="curve{mark} {colour}"{_width(line)} points="{_path(x, y, line.points)}">'
            f"<title>{escape(line.label)}</title></polyline>"
        )
        for at, value in line.points if line.has_dots else ():
            told = escape(f"{line.label}: {point(value)} at {x.show(at)}")
            drawn.append(
                f'<circle class="{colour} dot" cx="{_across(x, at):.1f}" cy="{_down(y, value):.1f}" r="3">'
                f"<title>{told}</title></circle>"
            )
    return _framed(title, note, _axes(x, y) + "".join(drawn), HEIGHT, labels)


def area_chart(
    title: str, note: str, layers: Sequence[tuple[str, int, Sequence[float]]], xs: Sequence[float], x: Axis, y: Axis
) -> str:
    """Layers stacked from the bottom up: a name, the number of a colour, and a value for every one of `xs`."""
    below = [0.0] * len(xs)
    drawn = []
    for label, number, values in layers:
        above = [low + value for low, value in zip(below, values, strict=True)]
        edge = [*zip(xs, above, strict=True), *reversed(list(zip(xs, below, strict=True)))]
        drawn.append(
            f'<polygon class="area k{number % len(LIGHT)}" points="{_path(x, y, edge)}">'
            f"<title>{escape(label)}</title></polygon>"
        )
        below = above
    labels = [(label, _square(number)) for label, number, _ in layers]
    return _framed(title, note, "".join(drawn) + _axes(x, y), HEIGHT, labels)


def bar_chart(
    title: str, note: str, groups: Sequence[tuple[str, Sequence[float]]], series: Sequence[str], show: Show
) -> str:
    """One group of bars a name, one bar for each of `series`, longest at full width, all from zero."""
    most = max((value for _, values in groups for value in values), default=0.0) or 1.0
    drawn, down = [], 8.0
    for name, values in groups:
        drawn.append(f'<text class="name" x="0" y="{down + 13:.0f}">{escape(name)}</text>')
        down += 20
        for number, value in enumerate(values):
            width, told = max(1.0, value / most * (WIDTH - 110)), escape(show(value))
            drawn.append(
                f'<rect class="area k{number % len(LIGHT)}" x="0" y="{down:.0f}" width="{width:.1f}" '
                f'height="{_BAR - 6}" rx="3"><title>{escape(series[number])}: {told}</title></rect>'
                f'<text class="tick" x="{width + 6:.1f}" y="{down + 12:.0f}">{told}</text>'
            )
            down += _BAR
        down += _GAP
    return _framed(
        title,
        note,
        "".join(drawn),
        max(60, round(down)),
        [(name, _square(number)) for number, name in enumerate(series)],
    )


def page(title: str, subtitle: str, body: str) -> str:
    """The whole document."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<title>{escape(title)}</title><meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<style>{_style()}</style></head>\n<body><main><h1>{escape(title)}</h1>"
        f'<p class="sub">{escape(subtitle)}</p>{body}</main></body></html>\n'
    )


def table(headings: Sequence[str], rows: Sequence[Sequence[str]], words: int) -> str:
    """The first `words` columns are text, the others numbers."""

    def line(cells: Sequence[str], tag: str) -> str:
        marked = (f"<{tag}{' class=w' if at < words else ''}>{escape(cell)}</{tag}>" for at, cell in enumerate(cells))
        return f"<tr>{''.join(marked)}</tr>"

    head, body = line(headings, "th"), "".join(line(row, "td") for row in rows)
    return f'<div class="card"><table>{head}{body}</table></div>'


def _look(line: Line, place: int) -> tuple[str, str]:
    """Classes of colour and of dash and width. What has no colour of its own goes through them all, then dashed."""
    if line.is_bound:
        return "cb", f" d{1 + place % _DASHES}"
    rounds, number = divmod(place if line.colour is None else line.colour, len(LIGHT))
    dash = (rounds + line.dash) % (_DASHES + 1)
    return f"c{number}", (f" d{dash}" if dash else "") + (" strong" if line.is_strong else "")


def _width(line: Line) -> str:
    return f' style="stroke-width:{line.width:g}"' if line.width else ""


def _square(number: int) -> str:
    return f'<span class="key k{number % len(LIGHT)}"></span>'


def _framed(title: str, note: str, drawn: str, height: int, labels: Sequence[tuple[str, str]]) -> str:
    """`labels`: names, each with the mark that stands for it."""
    legend = "".join(f"<span>{mark}{escape(label)}</span>" for label, mark in labels)
    return (
        f"<figure><figcaption>{escape(title)}<small>{escape(note)}</small></figcaption>"
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(title)}">{drawn}</svg>'
        f'<div class="legend">{legend}</div></figure>'
    )


def _across(x: Axis, value: float) -> float:
    return _LEFT + x.at(value) * (WIDTH - _LEFT - _RIGHT)


def _down(y: Axis, value: float) -> float:
    return _TOP + (1 - y.at(value)) * (HEIGHT - _TOP - _BOTTOM)


def _path(x: Axis, y: Axis, points: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{_across(x, at):.1f},{_down(y, value):.1f}" for at, value in points)


def _axes(x: Axis, y: Axis) -> str:
    marks = []
    for value in y.marks():
        down, told = _down(y, value), escape(y.show(value))
        marks.append(f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{down:.1f}" y2="{down:.1f}"/>')
        marks.append(f'<text class="tick" x="{_LEFT - 6}" y="{down + 4:.1f}" text-anchor="end">{told}</text>')
    for value in x.marks():
        across, told = _across(x, value), escape(x.show(value))
        anchor = "start" if x.at(value) < 0.04 else "end" if x.at(value) > 0.96 else "middle"
        marks.append(f'<text class="tick" x="{across:.1f}" y="{HEIGHT - 20}" text-anchor="{anchor}">{told}</text>')
    middle = (_LEFT + WIDTH - _RIGHT) / 2
    marks.append(f'<text class="tick" x="{middle}" y="{HEIGHT - 4}" text-anchor="middle">{escape(x.label)}</text>')
    return "".join(marks)


def _style() -> str:
    def colours(palette: Sequence[str]) -> str:
        return "".join(f"--c{number}:{colour};" for number, colour in enumerate(palette))

    curves = "".join(
        f".c{number}{{stroke:var(--c{number})}}.dot.c{number},.k{number}{{fill:var(--c{number});"
        f"background:var(--c{number})}}"
        for number in range(len(LIGHT))
    )
    return _STYLE.replace("LIGHT", colours(LIGHT)).replace("DARK", colours(DARK)).replace("CURVES", curves)
