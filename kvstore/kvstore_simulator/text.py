"""What a study found, as text: a table for people, CSV for other programs."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence

from kvstore_console.table import render_table
from kvstore_console.units import human_bytes
from kvstore_simulator.reuse import Curve
from kvstore_simulator.study import Row

_HEADINGS = (
    "POLICY", "ADMISSION", ">CAPACITY", ">BLOCKS", ">HITS", ">COMPUTE SAVED", ">STORED", ">READ", ">EVICTED",
    ">KEPT OUT", ">BLOCKS/S",
)  # fmt: skip


def replay_table(rows: Sequence[Row]) -> str:
    """A line a row."""
    return render_table(replay_headings(rows), replay_rows(rows))


def replay_headings(rows: Sequence[Row]) -> list[str]:
    """Kept out: refused by the admission, or bypassed by the policy."""
    has_cost, has_held = _has(rows)
    more = [*((">EXPIRED", ">HELD") if has_held else ()), *((">NET",) if has_cost else ())]
    return [*_HEADINGS, *more, *((">NET OF HELD",) if has_held and has_cost else ())]


def replay_rows(rows: Sequence[Row]) -> list[list[str]]:
    """The cells below `replay_headings`."""
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
    """Whether there are costs, and blocks that expired."""
    return any("cost" in row for row in rows), any(row["evictions"].get("expired") for row in rows)


def reuse_table(curves: Sequence[Curve]) -> str:
    """Each group's LRU miss ratio at every other point of its curve."""
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
    """One line a row, nested facts as columns of their own; empty where a row has no such fact."""
    flat = [_flat(row) for row in rows]
    out = io.StringIO()
    names = list(dict.fromkeys(name for row in flat for name in row))
    writer = csv.DictWriter(out, fieldnames=names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)
    return out.getvalue()


def curve_name(curve: Curve) -> str:
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
