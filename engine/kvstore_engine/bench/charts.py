"""Charts as SVG inside HTML: curves and bars. Pure text out of numbers; runs no script, loads nothing.

Owns the look (colours for light and dark, axes, legends). Knows nothing of what it draws; every text that comes from
outside is escaped. Colour follows the thing, in a fixed order, and a legend names it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 640, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 18, 14, 42
_BAR, _NAME_WIDTH, _TOLD_WIDTH = 20, 180, 70
_LIGHT = ("#3b6fd4", "#d9822b", "#2a9d6f", "#c2478f", "#7a5cc9", "#b8992a", "#3a9fb5", "#8a6d5a")
_DARK = ("#7aa5f7", "#f0a65a", "#5fcf9f", "#ee85bf", "#ab92f2", "#e3c65a", "#6fcfe3", "#c7a890")
_STYLE = """
:root{color-scheme:light dark;--page:#f6f7f9;--card:#fff;--text:#1c2430;--soft:#667085;--line:#e3e6eb;LIGHT}
@media(prefers-color-scheme:dark){:root{--page:#12161c;--card:#1b2129;--text:#e4e8ee;--soft:#94a0b2;--line:#2d3540;DARK}}
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--text)}
body{font:15px/1.45 system-ui,"Segoe UI",Roboto,"DejaVu Sans",sans-serif}
main{max-width:1320px;margin:0 auto;padding:28px 20px 48px}
h1{font-size:24px;margin:0}h2{font-size:18px;margin:30px 0 2px}.sub{color:var(--soft);margin:4px 0 16px}
.charts{display:grid;align-items:start;grid-template-columns:repeat(auto-fill,minmax(min(100%,480px),1fr));gap:14px}
@media(min-width:1014px){.charts>figure:last-child:nth-child(odd){grid-column:1/-1}}
.charts>figure:last-child:nth-child(odd) svg{max-height:300px}
.tiles{display:flex;flex-wrap:wrap;gap:12px;margin:0 0 14px}
.tile{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:10px 16px;min-width:150px}
.tile b{display:block;font-size:22px;font-weight:600;font-variant-numeric:tabular-nums}
.tile span{color:var(--soft);font-size:13px}
figure,.card{margin:0;background:var(--card);border:1px solid var(--line);border-radius:10px;padding:12px 14px 10px}
figcaption{font-weight:600}figcaption small{font-weight:400;color:var(--soft);margin-left:8px}
svg{display:block;width:100%;height:auto}.tick{font-size:12px;fill:var(--soft)}.name{font-size:13px;fill:var(--text)}
.grid{stroke:var(--line)}.curve{fill:none;stroke-width:2}.level{stroke:var(--soft);stroke-dasharray:5 4}
.legend{display:flex;flex-wrap:wrap;gap:2px 16px;font-size:13px;color:var(--soft);margin-top:4px}
.key{display:inline-block;width:12px;height:12px;border-radius:3px;margin-right:6px;vertical-align:-1px}
.card{margin-top:14px;overflow-x:auto}table{border-collapse:collapse;font-variant-numeric:tabular-nums}
th{font-weight:500;color:var(--soft);font-size:13px}
th,td{padding:6px 18px 6px 0;text-align:right;border-bottom:1px solid var(--line);white-space:nowrap}
th.w,td.w{text-align:left}
CURVES
"""
Show = Callable[[float], str]
Points = Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Curve:
    """`dots`: each point was measured and can be pointed at."""

    label: str
    points: Points
    dots: bool = True


@dataclass(frozen=True, slots=True)
class Scale:
    """From `low` to `high`, shown by `show`. On a logarithmic one `low` is over 0. `labelled`: these values and no
    others are marked.
    """

    low: float
    high: float
    label: str = ""
    log: bool = False
    show: Show = lambda value: f"{value:,.4g}"
    labelled: Sequence[float] = ()

    def place(self, value: float) -> float:
        """Where on the axis, from 0 to 1; what lies outside stays at the edge."""
        low, high, value = (math.log10(max(each, 1e-12)) if self.log else each for each in (self.low, self.high, value))
        return min(1.0, max(0.0, (value - low) / ((high - low) or 1.0)))

    def marks(self) -> list[float]:
        """Round values to label, or those asked for."""
        if self.labelled:
            return sorted(set(self.labelled))
        if not self.log:
            rough = (self.high - self.low) / 5 or 1.0
            power = 10.0 ** math.floor(math.log10(rough))
            step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * 0.999)
            first = math.ceil(self.low / step - 1e-9)
            return [number * step for number in range(first, math.floor(self.high / step + 1e-9) + 1)]
        decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        for steps in ((1, 2, 5), (1, 3), (1,)):
            found = [step * 10.0**decade for decade in decades for step in steps]
            found = [value for value in found if self.low * 0.999 <= value <= self.high * 1.001]
            if len(found) <= 8:
                break
        return found or [self.low]


def curve_chart(title: str, note: str, curves: Sequence[Curve], x: Scale, y: Scale, level: float | None = None) -> str:
    """Curves in the order of their colours; `level` is a line to compare them with."""
    drawn = [_axes(x, y)]
    if level is not None:
        down = _down(y, level)
        drawn.append(f'<line class="level" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{down:.1f}" y2="{down:.1f}"/>')
    for number, curve in enumerate(curves):
        colour = f"c{number % len(_LIGHT)}"
        path = " ".join(f"{_across(x, at):.1f},{_down(y, value):.1f}" for at, value in curve.points)
        drawn.append(
            f'<polyline class="curve {colour}" points="{path}"><title>{escape(curve.label)}</title></polyline>'
        )
        for at, value in curve.points if curve.dots else ():
            told = escape(f"{curve.label}: {y.show(value)} at {x.show(at)}")
            place = f'cx="{_across(x, at):.1f}" cy="{_down(y, value):.1f}"'
            drawn.append(f'<circle class="dot {colour}" {place} r="3.5"><title>{told}</title></circle>')
    return _framed(title, note, "".join(drawn), HEIGHT, [curve.label for curve in curves])


def bar_chart(
    title: str, note: str, groups: Sequence[tuple[str, Sequence[float]]], series: Sequence[str], show: Show
) -> str:
    """One group of bars a name, one bar for each of `series`, all from zero to the longest."""
    most = max((value for _, values in groups for value in values), default=0.0) or 1.0
    room = WIDTH - _NAME_WIDTH - _TOLD_WIDTH
    drawn, down = [], 6.0
    for name, values in groups:
        middle = down + _BAR * len(values) / 2 + 4
        drawn.append(
            f'<text class="name" x="{_NAME_WIDTH - 10}" y="{middle:.0f}" text-anchor="end">{escape(name)}</text>'
        )
        for number, value in enumerate(values):
            width, told = max(1.0, value / most * room), escape(show(value))
            drawn.append(
                f'<rect class="k{number % len(_LIGHT)}" x="{_NAME_WIDTH}" y="{down:.0f}" width="{width:.1f}" '
                f'height="{_BAR - 5}" rx="3"><title>{escape(series[number])}: {told}</title></rect>'
                f'<text class="tick" x="{_NAME_WIDTH + width + 6:.1f}" y="{down + 12:.0f}">{told}</text>'
            )
            down += _BAR
        down += 10
    return _framed(title, note, "".join(drawn), max(60, round(down)), series)


def tiles(figures: Sequence[tuple[str, str]]) -> str:
    """Figures to see at once, each with what it is."""
    each = (f'<div class="tile"><b>{escape(value)}</b><span>{escape(name)}</span></div>' for name, value in figures)
    return f'<div class="tiles">{"".join(each)}</div>'


def table(headings: Sequence[str], rows: Sequence[Sequence[str]], words: int) -> str:
    """The first `words` columns are text, the others numbers."""

    def line(cells: Sequence[str], tag: str) -> str:
        marked = (f"<{tag}{' class=w' if at < words else ''}>{escape(cell)}</{tag}>" for at, cell in enumerate(cells))
        return f"<tr>{''.join(marked)}</tr>"

    head, body = line(headings, "th"), "".join(line(row, "td") for row in rows)
    return f'<div class="card"><table>{head}{body}</table></div>'


def page(title: str, subtitle: str, body: str) -> str:
    """The whole document."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<title>{escape(title)}</title><meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<style>{_style()}</style></head>\n<body><main><h1>{escape(title)}</h1>"
        f'<p class="sub">{escape(subtitle)}</p>{body}</main></body></html>\n'
    )


def _framed(title: str, note: str, drawn: str, height: int, labels: Sequence[str]) -> str:
    keys = (
        f'<span><span class="key k{number % len(_LIGHT)}"></span>{escape(label)}</span>'
        for number, label in enumerate(labels)
    )
    return (
        f"<figure><figcaption>{escape(title)}<small>{escape(note)}</small></figcaption>"
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(title)}">{drawn}</svg>'
        f'<div class="legend">{"".join(keys)}</div></figure>'
    )


def _across(x: Scale, value: float) -> float:
    return _LEFT + x.place(value) * (WIDTH - _LEFT - _RIGHT)


def _down(y: Scale, value: float) -> float:
    return _TOP + (1 - y.place(value)) * (HEIGHT - _TOP - _BOTTOM)


def _axes(x: Scale, y: Scale) -> str:
    marks = []
    for value in y.marks():
        down, told = _down(y, value), escape(y.show(value))
        marks.append(f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{down:.1f}" y2="{down:.1f}"/>')
        marks.append(f'<text class="tick" x="{_LEFT - 6}" y="{down + 4:.1f}" text-anchor="end">{told}</text>')
    for value in x.marks():
        across, told = _across(x, value), escape(x.show(value))
        anchor = "start" if x.place(value) < 0.04 else "end" if x.place(value) > 0.96 else "middle"
        marks.append(f'<text class="tick" x="{across:.1f}" y="{HEIGHT - 22}" text-anchor="{anchor}">{told}</text>')
    middle = (_LEFT + WIDTH - _RIGHT) / 2
    marks.append(f'<text class="tick" x="{middle}" y="{HEIGHT - 4}" text-anchor="middle">{escape(x.label)}</text>')
    return "".join(marks)


def _style() -> str:
    def colours(palette: Sequence[str]) -> str:
        return "".join(f"--c{number}:{colour};" for number, colour in enumerate(palette))

    curves = "".join(
        f".c{number}{{stroke:var(--c{number})}}.dot.c{number},.k{number}{{fill:var(--c{number});"
        f"background:var(--c{number})}}"
        for number in range(len(_LIGHT))
    )
    return _STYLE.replace("LIGHT", colours(_LIGHT)).replace("DARK", colours(_DARK)).replace("CURVES", curves)
