"""The study as one HTML page: a chart for each trace and part, the tables below. Loads nothing and runs no script."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from kvstored.simulator import charts
from study.tables import CLAIRVOYANT, UNBOUNDED, Line
from study.words import rows_of


def study_page(found: dict[str, list[Line]], titles: dict[str, str], hits: str) -> str:
    """`hits` names the section that is drawn."""
    figures = [
        _figure(f"{trace}, {part}", list(group))
        for (trace, part), group in groupby(found.get(hits, []), key=lambda line: (line["trace"], line["part"]))
    ]
    tables = [
        f"<h2>{titles[section]}</h2>{charts.table(rows[0], rows[1:], words=2)}"
        for section, lines in found.items()
        if (rows := rows_of(lines))
    ]
    body = f'<div class="charts">{"".join(figures)}</div>\n{"".join(tables)}'
    return charts.page("Policy study", "hit ratios are prefix-closed; every part starts with an empty tier", body)


def _figure(title: str, lines: Sequence[Line]) -> str:
    """Policies that coincide everywhere share a line."""
    by_points: dict[tuple[tuple[float, float], ...], list[str]] = {}
    for policy in dict.fromkeys(line["policy"] for line in lines):
        points = tuple((line["capacity"], line["mean"]) for line in lines if line["policy"] == policy)
        by_points.setdefault(points, []).append(policy)
    drawn = [
        charts.Line(" = ".join(names), list(points), bool({UNBOUNDED, CLAIRVOYANT} & set(names)))
        for points, names in by_points.items()
    ]
    capacities = [line["capacity"] for line in lines]
    top = max(line["mean"] for line in lines)
    across = charts.Axis(
        min(capacities), max(capacities), "share of the distinct blocks", is_log=True, show=lambda share: f"{share:.1%}"
    )
    return charts.line_chart(
        title, "hit ratio", drawn, across, charts.Axis(0.0, top, show=lambda ratio: f"{ratio:.2f}")
    )
