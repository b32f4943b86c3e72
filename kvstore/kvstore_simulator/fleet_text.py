"""A fleet study as a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvstore_console.table import render_table
from kvstore_console.units import human_seconds


def fleet_table(rows: Sequence[dict[str, Any]]) -> str:
    """A line a row; shares are of all blocks that were asked for."""
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
