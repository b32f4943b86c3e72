"""A study as one HTML page: curves over the capacity, and the table."""

from __future__ import annotations

import math
from collections.abc import Sequence

from kvstored.simulator.charts import Axis, Line, line_chart, page, table
from kvstored.simulator.future import Clairvoyant
from kvstored.simulator.reuse import Curve
from kvstored.simulator.study import UNBOUNDED, Row
from kvstored.simulator.text import name_of, table_lines
from kvstored.store.policies import BEST, resolve

_BOUNDS = (UNBOUNDED, Clairvoyant.name)


def study_page(title: str, subtitle: str, rows: Sequence[Row], curves: Sequence[Curve]) -> str:
    """The whole document."""
    figures = [
        _figure("Hit ratio", "share of looked-up blocks", _lines(rows, "hit_ratio")),
        _figure("Compute saved", "share of the prefill's operations", _lines(rows, "compute_saved_ratio")),
    ]
    if curves:
        lines = [
            Line(name_of(curve), list(zip(map(float, curve.capacity_blocks), curve.miss_ratio, strict=True)))
            for curve in curves
        ]
        figures.append(_figure("Miss ratio of LRU", "from reuse distances", lines))
    return page(title, subtitle, f'<div class="charts">{"".join(figures)}</div>\n{_table(rows)}')


def _lines(rows: Sequence[Row], what: str) -> list[Line]:
    series: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for row in rows:
        series.setdefault((row["policy"], row["admission"]), []).append((float(row["capacity_blocks"]), row[what]))
    capacities = sorted({float(row["capacity_blocks"]) for row in rows if row["policy"] != UNBOUNDED})
    admissions = list(dict.fromkeys(admission for _, admission in series))
    policies = list(dict.fromkeys(resolve(policy) for policy, _ in series if policy not in _BOUNDS))
    lines = []
    for (policy, admission), points in series.items():
        if policy == UNBOUNDED:  # a level, whatever the capacity
            points = [(capacity, points[0][1]) for capacity in capacities]
        if policy in _BOUNDS:
            lines.append(Line(policy, sorted(points), is_bound=True))
            continue
        dash = admissions.index(admission)
        name = resolve(policy)
        label = policy if policy == name else f"{policy} ({name})"
        label = f"{label}, {admission}" if dash else label
        is_ours = name == resolve(BEST) and not dash
        lines.append(Line(label, sorted(points), colour=policies.index(name), dash=dash, is_strong=is_ours))
    return lines


def _figure(title: str, note: str, lines: Sequence[Line]) -> str:
    xs = [x for line in lines for x, _ in line.points]
    top = min(1.0, math.ceil(max(y for line in lines for _, y in line.points) * 10 + 1e-9) / 10) or 1.0
    x = Axis(min(xs), max(xs), "capacity in blocks", is_log=True, show=lambda value: f"{value:,.0f}")
    return line_chart(title, note, lines, x, Axis(0.0, top, show=lambda value: f"{value:.3g}"))


def _table(rows: Sequence[Row]) -> str:
    headings, *lines = table_lines(rows)
    return table(tuple(heading.lower() for heading in headings), lines, words=2)
