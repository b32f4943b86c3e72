"""The results of a study: a table and a page for people, CSV for other programs."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from typing import Any

from kvstore_console import page as markup
from kvstore_console.axes import Unit, log_axis
from kvstore_console.charts import Curve, line_chart
from kvstore_console.table import render_table
from kvstore_console.units import human_bytes, human_seconds
from kvstore_simulator import reuse
from kvstore_simulator.policies.clairvoyant import Clairvoyant
from kvstore_simulator.study import UNBOUNDED, Row
from kvstored.store.policies import BEST, resolve

_HEADINGS = (
    "POLICY", "ADMISSION", ">CAPACITY", ">BLOCKS", ">HITS", ">COMPUTE SAVED", ">STORED", ">READ", ">EVICTED",
    ">KEPT OUT", ">BLOCKS/S",
)  # fmt: skip


def replay_table(rows: Sequence[Row]) -> str:
    """Return the table of a replay study, with a line for each row."""
    return render_table(replay_headings(rows), replay_rows(rows))


def replay_headings(rows: Sequence[Row]) -> list[str]:
    """Return the headings of a replay study's table. The column "Kept out" counts the blocks that the admission refused
    or the policy bypassed.
    """
    has_cost, has_held = _has(rows)
    more = [*((">EXPIRED", ">HELD") if has_held else ()), *((">NET",) if has_cost else ())]
    return [*_HEADINGS, *more, *((">NET OF HELD",) if has_held and has_cost else ())]


def replay_rows(rows: Sequence[Row]) -> list[list[str]]:
    """Return the cells of a replay study's table, in the order of `replay_headings`."""
    has_cost, has_held = _has(rows)
    lines = []
    for row in rows:
        lanes, evicted = row["bytes_by_lane"], row["evictions"]
        line = [
            policy_of(row), row["admission"], f"{row['capacity_fraction']:.2%}", f"{row['capacity_blocks']:,}",
            f"{row['hit_ratio']:.4f}", f"{row['compute_saved_ratio']:.4f}", human_bytes(lanes["engine→host"]),
            human_bytes(lanes["host→engine"]), f"{evicted['evicted']:,}",
            f"{evicted['refused'] + evicted['bypassed']:,}", f"{row['accesses_per_second']:,}",
        ]  # fmt: skip
        if has_held:
            line += (f"{evicted['expired']:,}", f"{row['held_blocks_mean']:,.0f}")
        if has_cost:
            line.append(f"{row['cost']['net_usd']:.2f} $")
        if has_held and has_cost:
            line.append(f"{row['cost']['net_of_held_usd']:.2f} $")
        lines.append(line)
    return lines


def _has(rows: Sequence[Row]) -> tuple[bool, bool]:
    """Return whether the rows have costs, and whether they have blocks that expired."""
    return any("cost" in row for row in rows), any(row["evictions"].get("expired") for row in rows)


def reuse_table(curves: Sequence[reuse.MissRatioCurve]) -> str:
    """Return the table of LRU miss ratios: a row for each curve, with every fourth point of the curve."""
    if not curves:
        return ""
    shown = range(0, len(curves[0].capacity_blocks), 4)
    headings = ["MISS RATIO OF LRU", ">ACCESSES", ">FIRST USES", ">MEDIAN DISTANCE"]
    headings += [f">{curves[0].capacity_blocks[at]:,}" for at in shown]
    rows = []
    for curve in curves:
        median = "-" if curve.median_distance is None else f"{curve.median_distance:,}"
        ratios = (f"{curve.miss_ratio[at]:.4f}" for at in shown)
        rows.append([curve_name(curve), f"{curve.accesses:,}", f"{curve.first_uses:,}", median, *ratios])
    return render_table(headings, rows)


def as_csv(rows: Sequence[Row]) -> str:
    """Return the rows as CSV, one line each. Nested facts get columns of their own; a cell is empty if the row lacks
    that fact.
    """
    flat = [_flat(row) for row in rows]
    out = io.StringIO()
    names = list(dict.fromkeys(name for row in flat for name in row))
    writer = csv.DictWriter(out, fieldnames=names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)
    return out.getvalue()


def curve_name(curve: reuse.MissRatioCurve) -> str:
    if curve.tenant is not None:
        return f"tenant {curve.tenant}"
    return "all" if curve.kind is None else f"type {curve.kind}"


def policy_of(row: Row) -> str:
    policy, resolved = row["policy"], row["resolved_policy"]
    return str(policy) if policy == resolved else f"{policy} ({resolved})"


def _flat(row: Row, prefix: str = "") -> dict[str, object]:
    flat: dict[str, object] = {}
    for name, value in row.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value
    return flat


def fleet_table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the table of a study of several nodes, with a line for each row. Shares are of all blocks that were looked
    up.
    """
    tiers = list(dict.fromkeys(tier for row in rows for tier in row["hits_by_tier"]))
    headings = ["ROUTING", ">NODES", ">HITS", *(f">{tier.upper()}" for tier in tiers), ">RECOMPUTED"]
    headings += [">TTFT p50", ">p90", ">p99", ">BUSIEST"]
    return render_table(headings, [_cells(row, tiers) for row in rows])


def _cells(row: dict[str, Any], tiers: Sequence[str]) -> list[str]:
    wanted, hits, ttft = row["block_accesses"], row["hits_by_tier"], row["ttft_s"]
    shares = [f"{hits[tier] / wanted:.2%}" if tier in hits else "" for tier in tiers]
    return [
        row["routing"], str(row["nodes"]), f"{row['hit_ratio']:.2%}", *shares,
        f"{row['recomputed_blocks'] / wanted:.2%}", *(human_seconds(ttft[each]) for each in ("p50", "p90", "p99")),
        f"{row['busiest_share']:.0%}",
    ]  # fmt: skip


_BOUNDS = (UNBOUNDED, Clairvoyant.name)


def study_page(title: str, subtitle: str, rows: Sequence[Row], found: Sequence[reuse.MissRatioCurve]) -> str:
    """Return the HTML page of a replay study."""
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
