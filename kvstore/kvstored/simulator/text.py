"""What a study found, as text: a table for people, CSV for other programs."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence

from kvstored.config.sizes import show_size
from kvstored.simulator.reuse import Curve
from kvstored.simulator.study import Row

_HEADINGS = (
    "POLICY", "ADMISSION", "CAPACITY", "BLOCKS", "HITS", "COMPUTE SAVED", "STORED", "READ", "EVICTED", "KEPT OUT",
    "BLOCKS/S",
)  # fmt: skip


def table(rows: Sequence[Row]) -> str:
    """Aligned columns; text left, numbers right."""
    return aligned(table_lines(rows), words=2)


def table_lines(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """The headings, then a line a row. Kept out: refused by the admission, or bypassed by the policy."""
    has_cost = any("cost" in row for row in rows)
    has_held = any(row["evictions"].get("expired") for row in rows)
    more = (*(("EXPIRED", "HELD") if has_held else ()), *(("NET",) if has_cost else ()))
    if has_held and has_cost:
        more += ("NET OF HELD",)
    lines: list[tuple[str, ...]] = [(*_HEADINGS, *more)]
    for row in rows:
        lanes, evicted = row["bytes_by_lane"], row["evictions"]
        line: tuple[str, ...] = (
            policy_of(row), row["admission"], f"{row['capacity_fraction']:.2%}", f"{row['capacity_blocks']:,}",
            f"{row['hit_ratio']:.4f}", f"{row['compute_saved_ratio']:.4f}", show_size(lanes["engine→host"]),
            show_size(lanes["host→engine"]), f"{evicted['evicted']:,}", f"{evicted['refused'] + evicted['bypassed']:,}",
            f"{row['accesses_per_second']:,}",
        )  # fmt: skip
        if has_held:
            line += (f"{evicted['expired']:,}", f"{row['held_blocks_mean']:,.0f}")
        if has_cost:
            line += (f"{row['cost']['net_usd']:.2f} $",)
        if has_held and has_cost:
            line += (f"{row['cost']['net_of_held_usd']:.2f} $",)
        lines.append(line)
    return lines


def reuse_table(curves: Sequence[Curve]) -> str:
    """Each group's LRU miss ratio at every other point of its curve."""
    if not curves:
        return ""
    shown = range(0, len(curves[0].capacity_blocks), 4)
    lines: list[tuple[str, ...]] = [
        ("MISS RATIO OF LRU", "ACCESSES", "FIRST USES", "MEDIAN DISTANCE",
         *(f"{curves[0].capacity_blocks[at]:,}" for at in shown)),
    ]  # fmt: skip
    for curve in curves:
        median = "-" if curve.median_distance is None else f"{curve.median_distance:,}"
        lines.append(
            (name_of(curve), f"{curve.accesses:,}", f"{curve.first_uses:,}", median,
             *(f"{curve.miss_ratio[at]:.4f}" for at in shown))
        )  # fmt: skip
    return aligned(lines, words=1)


def as_csv(rows: Sequence[Row]) -> str:
    """One line a row, nested facts as columns of their own; empty where a row has no such fact."""
    flat = [_flat(row) for row in rows]
    out = io.StringIO()
    names = list(dict.fromkeys(name for row in flat for name in row))
    writer = csv.DictWriter(out, fieldnames=names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)
    return out.getvalue()


def name_of(curve: Curve) -> str:
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


def aligned(lines: Sequence[Sequence[str]], words: int) -> str:
    """Text left in the first columns, numbers right."""
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column < words else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )
