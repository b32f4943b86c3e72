"""The study as one HTML page: a chart for each trace and part, the tables below. Loads nothing and runs no script."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from kvstore_console import page as markup
from kvstore_console.axes import Unit, log_axis
from kvstore_console.charts import Curve, line_chart, merged
from study.tables import CLAIRVOYANT, UNBOUNDED, Line
from study.words import headings_of, rows_of

_RATIO = Unit(lambda ratio: f"{ratio:.2f}")


def study_page(found: dict[str, list[Line]], titles: dict[str, str], hits: str) -> str:
    """`hits` names the section that is drawn."""
    figures = [
        _figure(f"{trace}, {part}", list(group))
        for (trace, part), group in groupby(found.get(hits, []), key=lambda line: (line["trace"], line["part"]))
    ]
    tables = [
        markup.section(titles[section], markup.html_table(headings_of(lines), rows_of(lines)))
        for section, lines in found.items()
        if lines
    ]
    about = "hit ratios are prefix-closed; every part starts with an empty tier"
    return markup.page("Policy study", about, [markup.charts(figures), *tables])


def _figure(title: str, lines: Sequence[Line]) -> str:
    curves = []
    for policy in dict.fromkeys(line["policy"] for line in lines):
        points = [(line["capacity"], line["mean"]) for line in lines if line["policy"] == policy]
        curves.append(Curve(policy, points, mark="limit" * (policy in (UNBOUNDED, CLAIRVOYANT)), has_dots=True))
    capacities = [line["capacity"] for line in lines]
    x = log_axis(min(capacities), max(capacities), lambda share: f"{share:.1%}", "share of the distinct blocks")
    y = _RATIO.axis([line["mean"] for line in lines])
    return line_chart(title, "hit ratio", merged(curves, x, y), x, y)
