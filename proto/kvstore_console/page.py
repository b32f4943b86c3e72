"""A report as one HTML document with its style inside: headings, figures, tables, lists of facts.

The module owns the look, light and dark, and escapes every text. Invariant: the page loads nothing, and runs no script
but the one that its maker gives.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from html import escape

_LIGHT = ("#3b6fd4", "#d9822b", "#2a9d6f", "#c2478f", "#7a5cc9", "#b8992a", "#3a9fb5", "#8a6d5a", "#5b6b2f", "#9c3d3d")
_DARK = ("#7aa5f7", "#f0a65a", "#5fcf9f", "#ee85bf", "#ab92f2", "#e3c65a", "#6fcfe3", "#c7a890", "#b3c777", "#e08a8a")
COLOURS = len(_LIGHT)
_STYLE = """
:root{color-scheme:light dark;--page:#f6f7f9;--card:#fff;--text:#1c2430;--soft:#667085;--line:#e3e6eb;LIGHT}
@media(prefers-color-scheme:dark){:root{--page:#12161c;--card:#1b2129;--text:#e4e8ee;--soft:#94a0b2;--line:#2d3540;DARK}}
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--text)}
body{font:15px/1.45 system-ui,"Segoe UI",Roboto,"DejaVu Sans",sans-serif}
main{max-width:1320px;margin:0 auto;padding:28px 20px 48px}
h1{font-size:24px;margin:0}h2{font-size:18px;margin:32px 0 10px}.sub{color:var(--soft);margin:4px 0 18px}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(145px,1fr));gap:12px;margin-bottom:14px}
.tile,figure,.card{background:var(--card);border:1px solid var(--line);border-radius:10px}
.tile{padding:12px 16px}.tile b{display:block;font-size:22px;font-weight:600;font-variant-numeric:tabular-nums}
.tile span{color:var(--soft);font-size:13px}
.charts{display:grid;align-items:start;grid-template-columns:repeat(auto-fill,minmax(min(100%,480px),1fr));gap:14px}
@media(min-width:1014px){.charts>figure:last-child:nth-child(odd){grid-column:1/-1}}
.charts>figure:last-child:nth-child(odd) svg:not(.swatch){max-height:300px}
figure{margin:0;padding:12px 14px 10px}
figcaption{font-weight:600;margin-bottom:4px}figcaption small{font-weight:400;color:var(--soft);margin-left:8px}
svg{display:block;width:100%;height:auto}.name{font-size:13px;fill:var(--text)}
.nothing{color:var(--soft);text-align:center;padding:64px 0;margin:0}
.tick{font-size:12px;fill:var(--soft);font-variant-numeric:tabular-nums}
.grid{stroke:var(--line)}.axis{stroke:var(--soft)}
.curve{fill:none;stroke-width:2;stroke-linejoin:round;stroke-linecap:round}.area{stroke:none;opacity:.8}
.under{fill:transparent}.under:hover{fill:var(--soft);fill-opacity:.16}
.limit,.outline{stroke:var(--soft);stroke-width:1.5}.limit{stroke-dasharray:5 4}
.d1{stroke-dasharray:5 4}.d2{stroke-dasharray:1.5 3.5}.d3{stroke-dasharray:9 3 2 3}
.strong{stroke-width:4}.wide{stroke-width:6;stroke-opacity:.4}.dot.limit{fill:var(--soft);stroke:none}
.swatch{display:inline-block;width:26px;height:10px;margin-right:6px}
.legend{display:flex;flex-wrap:wrap;gap:2px 16px;font-size:13px;color:var(--soft);padding:4px 0 0 4px}
.key{display:inline-block;width:12px;height:12px;border-radius:3px;margin-right:6px;vertical-align:-1px}
.card{margin-top:14px;padding:6px 14px;overflow-x:auto}
table{border-collapse:collapse;font-variant-numeric:tabular-nums}
th{font-weight:500;color:var(--soft);font-size:13px}
th,td{padding:6px 16px 6px 0;text-align:left;border-bottom:1px solid var(--line);white-space:nowrap;vertical-align:top}
tr:last-child td{border-bottom:0}th.n,td.n{text-align:right}td.w{white-space:normal;overflow-wrap:anywhere}
td.t{white-space:pre-line;overflow-wrap:anywhere;min-width:7em;max-width:22em}
.pairs{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,380px),1fr));gap:14px}
.pairs .card{margin:0}.pairs h3{font-size:14px;margin:8px 0 2px}.pairs table{width:100%;font-size:13.5px}
.pairs td{padding:3px 12px 3px 0}
.warn{border-left:4px solid var(--c1);padding:8px 14px;margin:14px 0 0;background:var(--card)}
.tree{padding:8px 14px}.tree details,.tree .leaf{margin:3px 0 3px 18px}.tree>details,.tree>.leaf{margin-left:0}
.tree small{color:var(--soft)}.tree b{font-size:12px;padding:1px 7px;border-radius:8px;border:1px solid currentcolor}
.hot{color:var(--c9)}.warm{color:var(--c1)}.cold{color:var(--c0)}
.lost main{opacity:.45}
footer{color:var(--soft);font-size:13px;margin-top:32px}
CURVES
@media print{body{background:#fff}figure,.card,.tile{break-inside:avoid}}
"""


def page(title: str, subtitle: str, body: Sequence[str], footer: str = "", script: str = "") -> str:
    """Return a whole HTML document, with its style inside. `body` has the markup of its sections; `title`, `subtitle`
    and `footer` are plain text, `script` is JavaScript.
    """
    run = f"\n<script>{script}</script>" if script else ""
    foot = f"\n<footer>{escape(footer)}</footer>" if footer else ""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<title>{escape(title)}</title><meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<style>{_style()}</style></head>\n<body><main><h1>{escape(title)}</h1>"
        f'<p class="sub">{escape(subtitle)}</p>\n' + "\n".join(body) + f"{foot}</main>{run}</body></html>\n"
    )


def content_policy(script: str) -> str:
    """Return the Content-Security-Policy for a page with the JavaScript `script`: nothing else runs, nothing is loaded,
    and only the page's own address can be asked again."""
    allowed = " ".join(
        f"{kind}-src 'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}';"
        for kind, text in (("script", script), ("style", _style()))
    )
    others = "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    return f"default-src 'none'; {allowed} {others}"


def section(title: str, body: str, note: str = "") -> str:
    """Return HTML for a section: the heading `title`, the text `note`, and the markup `body`. Without a title or note
    they are left out.
    """
    head = f"<h2>{escape(title)}</h2>" if title else ""
    return head + (paragraph(note) if note else "") + body


def charts(figures: Sequence[str]) -> str:
    """Return HTML that shows `figures`, the markup of charts, side by side."""
    return f'<div class="charts">{"".join(figures)}</div>'


def paragraph(text: str) -> str:
    return f'<p class="sub">{escape(text)}</p>'


def warning(text: str) -> str:
    return f'<div class="warn">{escape(text)}</div>'


def tiles(figures: Sequence[tuple[str, str]]) -> str:
    """Return HTML that shows key figures in large type. Each of `figures` is a value and its name, both as text."""
    each = (f'<div class="tile"><b>{escape(value)}</b><span>{escape(what)}</span></div>' for value, what in figures)
    return f'<div class="tiles">{"".join(each)}</div>'


def html_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return an HTML table of `rows` below `headings`. A heading that begins with ">" makes its column right-aligned,
    for numbers. Text in cells may have several lines.
    """
    is_number = [heading.startswith(">") for heading in headings]

    def line(cells: Sequence[str], tag: str, text: str) -> str:
        classes = (' class="n"' if number else text for number in is_number)
        return "".join(f"<{tag}{kind}>{escape(cell)}</{tag}>" for kind, cell in zip(classes, cells, strict=True))

    head = line([heading.removeprefix(">") for heading in headings], "th", "")
    body = "".join("<tr>" + line(row, "td", ' class="t"') + "</tr>" for row in rows)
    return f'<div class="card"><table><tr>{head}</tr>{body}</table></div>' if rows else "<p>none</p>"


def pairs(groups: Sequence[tuple[str, Sequence[tuple[str, str]]]]) -> str:
    """Return HTML for names and values. Each of `groups` is a heading and its pairs of a name and a value, shown on one
    card.
    """
    cards = []
    for name, facts in groups:
        heading = f"<h3>{escape(name)}</h3>" if name else ""
        lines = "".join(f'<tr><td>{escape(key)}</td><td class="w">{escape(value)}</td></tr>' for key, value in facts)
        cards.append(f'<div class="card">{heading}<table>{lines}</table></div>')
    return f'<div class="pairs">{"".join(cards)}</div>'


def _style() -> str:
    def colours(palette: Sequence[str]) -> str:
        return ";".join(f"--c{number}:{colour}" for number, colour in enumerate(palette))

    curves = "".join(
        f".c{number}{{stroke:var(--c{number})}}"
        f".dot.c{number},.k{number}{{fill:var(--c{number});background:var(--c{number})}}"
        for number in range(COLOURS)
    )
    return _STYLE.replace("LIGHT", colours(_LIGHT)).replace("DARK", colours(_DARK)).replace("CURVES", curves)
