"""A study as one HTML page: curves over the capacity, and the table. Loads nothing, from nowhere, and runs no script.

Pure text out of numbers; every text that comes from outside is escaped.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from kvstored.config.sizes import show_size
from kvstored.simulator.reuse import Curve
from kvstored.simulator.study import UNBOUNDED, Row
from kvstored.simulator.text import name_of

_WIDTH, _HEIGHT = 640, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 16, 12, 40
_LIGHT = ("#3b6fd4", "#d9822b", "#2a9d6f", "#c2478f", "#7a5cc9", "#b8992a", "#3a9fb5", "#8a6d5a", "#5b6b2f", "#9c3d3d")
_DARK = ("#7aa5f7", "#f0a65a", "#5fcf9f", "#ee85bf", "#ab92f2", "#e3c65a", "#6fcfe3", "#c7a890", "#b3c777", "#e08a8a")
_STYLE = """
:root{color-scheme:light dark;--page:#f6f7f9;--card:#fff;--text:#1c2430;--soft:#667085;--line:#e3e6eb;LIGHT}
@media(prefers-color-scheme:dark){:root{--page:#12161c;--card:#1b2129;--text:#e4e8ee;--soft:#94a0b2;--line:#2d3540;DARK}}
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--text)}
body{font:15px/1.45 system-ui,"Segoe UI",Roboto,"DejaVu Sans",sans-serif}
main{max-width:1320px;margin:0 auto;padding:28px 20px 48px}
h1{font-size:24px;margin:0}.sub{color:var(--soft);margin:4px 0 20px}
.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,480px),1fr));gap:14px}
figure,.card{margin:0;background:var(--card);border:1px solid var(--line);border-radius:10px;padding:12px 14px 10px}
figcaption{font-weight:600}figcaption small{font-weight:400;color:var(--soft);margin-left:8px}
svg{display:block;width:100%;height:auto}.tick{font-size:12px;fill:var(--soft)}
.grid{stroke:var(--line)}.curve{fill:none;stroke-width:2}.bound{stroke-dasharray:5 4}
.legend{display:flex;flex-wrap:wrap;gap:2px 16px;font-size:13px;color:var(--soft)}
.key{display:inline-block;width:12px;height:12px;border-radius:3px;margin-right:6px;vertical-align:-1px}
.card{margin-top:14px;overflow-x:auto}table{border-collapse:collapse;font-variant-numeric:tabular-nums}
th{font-weight:500;color:var(--soft);font-size:13px}
th,td{padding:6px 18px 6px 0;text-align:right;border-bottom:1px solid var(--line);white-space:nowrap}
th.w,td.w{text-align:left}
CURVES
"""


@dataclass(frozen=True, slots=True)
class _Line:
    label: str
    points: list[tuple[float, float]]
    is_bound: bool = False


def study_page(title: str, subtitle: str, rows: Sequence[Row], curves: Sequence[Curve]) -> str:
    """The whole document."""
    figures = [
        _figure("Hit ratio", "share of looked-up blocks", _lines(rows, "hit_ratio")),
        _figure("Compute saved", "share of the prefill's operations", _lines(rows, "compute_saved_ratio")),
    ]
    if curves:
        lines = [
            _Line(name_of(curve), list(zip(map(float, curve.capacity_blocks), curve.miss_ratio, strict=True)))
            for curve in curves
        ]
        figures.append(_figure("Miss ratio of LRU", "from reuse distances", lines))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<title>{escape(title)}</title><meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<style>{_style()}</style></head>\n<body><main><h1>{escape(title)}</h1>"
        f'<p class="sub">{escape(subtitle)}</p><div class="charts">{"".join(figures)}</div>\n'
        f"{_table(rows)}</main></body></html>\n"
    )


def _lines(rows: Sequence[Row], what: str) -> list[_Line]:
    series: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for row in rows:
        series.setdefault((row["policy"], row["admission"]), []).append((float(row["capacity_blocks"]), row[what]))
    several = len({admission for _, admission in series}) > 1
    capacities = sorted({float(row["capacity_blocks"]) for row in rows if row["policy"] != UNBOUNDED})
    lines = []
    for (policy, admission), points in series.items():
        if policy == UNBOUNDED:  # a level, whatever the capacity
            points = [(capacity, points[0][1]) for capacity in capacities]
        label = f"{policy}, {admission}" if several and admission != "always" else policy
        lines.append(_Line(label, sorted(points), policy in (UNBOUNDED, "clairvoyant")))
    return lines


def _figure(title: str, note: str, lines: Sequence[_Line]) -> str:
    xs = [x for line in lines for x, _ in line.points]
    ys = [y for line in lines for _, y in line.points]
    low, high = math.log10(min(xs)), math.log10(max(xs))
    span = high - low or 1.0
    top = min(1.0, math.ceil(max(ys) * 10 + 1e-9) / 10) or 1.0

    def at(x: float, y: float) -> str:
        across = _LEFT + (math.log10(x) - low) / span * (_WIDTH - _LEFT - _RIGHT)
        return f"{across:.1f},{_TOP + (1 - y / top) * (_HEIGHT - _TOP - _BOTTOM):.1f}"

    drawn = []
    for number, line in enumerate(lines):
        colour, mark = f"c{number % len(_LIGHT)}", " bound" if line.is_bound else ""
        path = " ".join(at(x, y) for x, y in line.points)
        drawn.append(f'<polyline class="curve{mark} {colour}" points="{path}"/>')
        for x, y in line.points:
            across, down = at(x, y).split(",")
            told = escape(f"{line.label}: {y:.4f} at {x:,.0f} blocks")
            drawn.append(f'<circle class="{colour} dot" cx="{across}" cy="{down}" r="3"><title>{told}</title></circle>')
    legend = "".join(
        f'<span><span class="key k{number % len(_LIGHT)}"></span>{escape(line.label)}</span>'
        for number, line in enumerate(lines)
    )
    return (
        f"<figure><figcaption>{escape(title)}<small>{escape(note)}</small></figcaption>"
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(title)}">{_axes(low, span, top)}'
        f'{"".join(drawn)}</svg><div class="legend">{legend}</div></figure>'
    )


def _axes(low: float, span: float, top: float) -> str:
    marks = []
    for step in range(5):
        y = _TOP + (1 - step / 4) * (_HEIGHT - _TOP - _BOTTOM)
        marks.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        value = f"{step / 4 * top:.3g}"
        marks.append(f'<text class="tick" x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{value}</text>')
    for step in range(5):
        x = _LEFT + step / 4 * (_WIDTH - _LEFT - _RIGHT)
        blocks = 10 ** (low + step / 4 * span)
        anchor = ("start", "middle", "middle", "middle", "end")[step]
        marks.append(f'<text class="tick" x="{x:.1f}" y="{_HEIGHT - 20}" text-anchor="{anchor}">{blocks:,.0f}</text>')
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    marks.append(f'<text class="tick" x="{middle}" y="{_HEIGHT - 4}" text-anchor="middle">capacity in blocks</text>')
    return "".join(marks)


def _table(rows: Sequence[Row]) -> str:
    head = "".join(
        f"<th{' class=w' if column < 2 else ''}>{name}</th>"
        for column, name in enumerate(("policy", "admission", "capacity", "blocks", "hits", "compute saved", "stored"))
    )
    body = "".join(
        f"<tr><td class=w>{escape(row['policy'])}</td><td class=w>{escape(row['admission'])}</td>"
        f"<td>{row['capacity_fraction']:.2%}</td><td>{row['capacity_blocks']:,}</td><td>{row['hit_ratio']:.4f}</td>"
        f"<td>{row['compute_saved_ratio']:.4f}</td><td>{show_size(row['bytes_by_lane']['engine→host'])}</td></tr>"
        for row in rows
    )
    return f'<div class="card"><table><tr>{head}</tr>{body}</table></div>'


def _style() -> str:
    def colours(palette: Sequence[str]) -> str:
        return "".join(f"--c{number}:{colour};" for number, colour in enumerate(palette))

    curves = "".join(
        f".c{number}{{stroke:var(--c{number})}}.dot.c{number},.k{number}{{fill:var(--c{number});"
        f"background:var(--c{number})}}"
        for number in range(len(_LIGHT))
    )
    return _STYLE.replace("LIGHT", colours(_LIGHT)).replace("DARK", colours(_DARK)).replace("CURVES", curves)
