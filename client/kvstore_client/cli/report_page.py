"""The frame of the report: one HTML document with its style inside. Knows markup, not what is reported.

Everything that is text is escaped here. Invariant: the page loads nothing, from nowhere, and runs no script.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

_LIGHT = ("#3b6fd4", "#d9822b", "#2a9d6f", "#c2478f", "#7a5cc9", "#b8992a", "#3a9fb5", "#8a6d5a")
_DARK = ("#7aa5f7", "#f0a65a", "#5fcf9f", "#ee85bf", "#ab92f2", "#e3c65a", "#6fcfe3", "#c7a890")

_STYLE = """
:root{color-scheme:light dark;--page:#f6f7f9;--card:#fff;--text:#1c2430;--soft:#667085;--line:#e3e6eb;LIGHT}
@media(prefers-color-scheme:dark){:root{--page:#12161c;--card:#1b2129;--text:#e4e8ee;--soft:#94a0b2;--line:#2d3540;DARK}}
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--text)}
body{font:15px/1.45 system-ui,"Segoe UI",Roboto,"DejaVu Sans",sans-serif}
main{max-width:1320px;margin:0 auto;padding:28px 20px 48px}
h1{font-size:24px;margin:0}h2{font-size:18px;margin:36px 0 12px}
.sub{color:var(--soft);margin:4px 0 20px}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(145px,1fr));gap:12px}
.tile,figure,.card{background:var(--card);border:1px solid var(--line);border-radius:10px}
.tile{padding:12px 16px}.tile b{display:block;font-size:22px;font-weight:600;font-variant-numeric:tabular-nums}
.tile span{color:var(--soft);font-size:13px}
.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,420px),1fr));gap:14px}
figure{margin:0;padding:12px 14px 10px}
figcaption{font-weight:600;margin-bottom:4px}figcaption small{font-weight:400;color:var(--soft);margin-left:8px}
svg{display:block;width:100%;height:auto}
.nothing{color:var(--soft);text-align:center;padding:64px 0;margin:0}
.tick{font-size:12px;fill:var(--soft);font-variant-numeric:tabular-nums}
.grid{stroke:var(--line)}.axis,.tickmark{stroke:var(--soft)}
.under{fill:transparent}.under:hover{fill:var(--soft);fill-opacity:.16}
.limit,.outline{fill:none;stroke:var(--soft);stroke-width:1.5}.limit{stroke-dasharray:5 4}
.legend{display:flex;flex-wrap:wrap;gap:2px 16px;font-size:13px;color:var(--soft);padding:4px 0 0 4px}
.key{display:inline-block;width:12px;height:12px;border-radius:3px;margin-right:6px;vertical-align:-1px}
.key.limit,.key.outline{height:0;border-radius:0;border-top:2px dashed var(--soft);vertical-align:4px;width:16px}
.key.outline{border-top-style:solid}
.card{padding:6px 14px;overflow-x:auto}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}
th{font-weight:500;color:var(--soft);font-size:13px}
th,td{padding:7px 12px 7px 0;text-align:left;border-bottom:1px solid var(--line);white-space:nowrap}
tr:last-child td{border-bottom:0}th.n,td.n{text-align:right}td.w{white-space:normal;overflow-wrap:anywhere}
td.t{white-space:pre-line;overflow-wrap:anywhere;min-width:7em;max-width:22em}td{vertical-align:top}
.pairs{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,380px),1fr));gap:14px}
.pairs h3{font-size:14px;margin:8px 0 2px}.pairs table{font-size:13.5px}.pairs td{padding:3px 12px 3px 0}
.warn{border-left:4px solid var(--c1);padding:8px 14px;margin:14px 0 0;background:var(--card)}
footer{color:var(--soft);font-size:13px;margin-top:32px}
CURVES
.wide{stroke-width:6;stroke-opacity:.4}
@media print{body{background:#fff}figure,.card,.tile{break-inside:avoid}}
"""


def page(title: str, subtitle: str, body: Sequence[str], footer: str) -> str:
    """The whole document."""
    return (
        "<!doctype html>\n"
        f'<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<style>{_style()}</style></head>\n<body><main><h1>{escape(title)}</h1>"
        f'<p class="sub">{escape(subtitle)}</p>\n' + "\n".join(body) + f"\n<footer>{escape(footer)}</footer>"
        "</main></body></html>\n"
    )


def tiles(facts: Sequence[tuple[str, str]]) -> str:
    """Large numbers in a row: (value, what it is)."""
    inside = "".join(
        f'<div class="tile"><b>{escape(value)}</b><span>{escape(what)}</span></div>' for value, what in facts
    )
    return f'<div class="tiles">{inside}</div>'


def charts(title: str, figures: Sequence[str]) -> str:
    return f'<h2>{escape(title)}</h2><div class="charts">{"".join(figures)}</div>'


def table(title: str, headings: Sequence[str], rows: Sequence[Sequence[str]], *, words: int = 1) -> str:
    """The first `words` columns are text, which may have several lines and wraps; the others are numbers."""
    head = "".join(f"<th{_number(place, words)}>{escape(text)}</th>" for place, text in enumerate(headings))
    lines = "".join(
        "<tr>" + "".join(f"<td{_cell(place, words)}>{escape(cell)}</td>" for place, cell in enumerate(row)) + "</tr>"
        for row in rows
    )
    body = f"<table><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table>" if rows else "<p>none</p>"
    return f'<h2>{escape(title)}</h2><div class="card">{body}</div>'


def pairs(title: str, groups: Sequence[tuple[str, Sequence[tuple[str, str]]]]) -> str:
    """Names and values, a card a group."""
    cards = []
    for name, facts in groups:
        heading = f"<h3>{escape(name)}</h3>" if name else ""
        lines = "".join(f'<tr><td>{escape(key)}</td><td class="w">{escape(value)}</td></tr>' for key, value in facts)
        cards.append(f'<div class="card">{heading}<table><tbody>{lines}</tbody></table></div>')
    return f'<h2>{escape(title)}</h2><div class="pairs">{"".join(cards)}</div>'


def warning(text: str) -> str:
    return f'<div class="warn">{escape(text)}</div>'


def _number(place: int, words: int) -> str:
    return "" if place < words else ' class="n"'


def _cell(place: int, words: int) -> str:
    return ' class="t"' if place < words else ' class="n"'


def _style() -> str:
    curves = "".join(
        f".s{number}{{fill:none;stroke:var(--c{number});stroke-width:1.8;stroke-linejoin:round;stroke-linecap:round}}"
        f".a{number}{{fill:var(--c{number});fill-opacity:.75}}.key.s{number},.key.a{number}{{background:var(--c{number})}}"
        for number in range(len(_LIGHT))
    )
    light = ";".join(f"--c{number}:{colour}" for number, colour in enumerate(_LIGHT))
    dark = ";".join(f"--c{number}:{colour}" for number, colour in enumerate(_DARK))
    return _STYLE.replace("LIGHT", light).replace("DARK", dark).replace("CURVES", curves)
