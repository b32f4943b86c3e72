"""A study as one HTML page: curves over the capacity, and the table."""

from __future__ import annotations

import math
from collections.abc import Sequence

from kvstore_console import page as markup
from kvstore_console.axes import Unit, log_axis
from kvstore_console.charts import Curve, line_chart
from kvstore_simulator import reuse
from kvstore_simulator.future import Clairvoyant
from kvstore_simulator.study import UNBOUNDED, Row
from kvstore_simulator.text import curve_name, replay_headings, replay_rows
from kvstored.store.policies import BEST, resolve

_BOUNDS = (UNBOUNDED, Clairvoyant.name)


def study_page(title: str, subtitle: str, rows: Sequence[Row], found: Sequence[reuse.Curve]) -> str:
    """The whole document."""
    figures = [
        _figure("Hit ratio", "share of looked-up blocks", _curves(rows, "hit_ratio")),
        _figure("Compute saved", "share of the prefill's operations", _curves(rows, "compute_saved_ratio")),
    ]
    if found:
        curves = [
            Curve(curve_name(each), list(zip(each.capacity_blocks, each.miss_ratio, strict=True)), has_dots=True)
            for each in found
        ]
        figures.append(_figure("Miss ratio of LRU", "from reuse distances", curves))
    headings = [heading.lower() for heading in replay_headings(rows)]
    return markup.page(title, subtitle, [markup.charts(figures), markup.html_table(headings, replay_rows(rows))])


def _curves(rows: Sequence[Row], what: str) -> list[Curve]:
    series: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for row in rows:
        series.setdefault((row["policy"], row["admission"]), []).append((float(row["capacity_blocks"]), row[what]))
    capacities = sorted({float(row["capacity_blocks"]) for row in rows if row["policy"] != UNBOUNDED})
    admissions = list(dict.fromkeys(admission for _, admission in series))
    policies = list(dict.fromkeys(resolve(policy) for policy, _ in series if policy not in _BOUNDS))
    curves = []
    for (policy, admission), points in series.items():
        if policy == UNBOUNDED:  # the same level at every capacity
            points = [(capacity, points[0][1]) for capacity in capacities]
        if policy in _BOUNDS:
            curves.append(Curve(policy, sorted(points), mark="limit", has_dots=True))
            continue
        dash = admissions.index(admission)
        name = resolve(policy)
        label = policy if policy == name else f"{policy} ({name})"
        label = f"{label}, {admission}" if dash else label
        is_ours = name == resolve(BEST) and not dash
        curves.append(
            Curve(label, sorted(points), has_dots=True, colour=policies.index(name), dash=dash, is_strong=is_ours)
        )
    return curves


def _figure(title: str, note: str, curves: Sequence[Curve]) -> str:
    xs = [x for curve in curves for x, _ in curve.points]
    top = min(1.0, math.ceil(max(y for curve in curves for _, y in curve.points) * 10 + 1e-9) / 10) or 1.0
    x = log_axis(min(xs), max(xs), lambda blocks: f"{blocks:,.0f}", "capacity in blocks")
    y = Unit(lambda share: f"{share:.3g}").axis([top])
    return line_chart(title, note, curves, x, y, point=lambda share: f"{share:.4f}")
