"""What a study of prefetch found, over all seeds of a trace and load: shares of the oracle's gain, waste, the worst."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from kvstore_console.table import render_table

NONE, ORACLE, PERFECT = "none", "oracle", "+pause"
DRAWS = 2000
LEAST_GAIN = 0.005  # of mean TTFT: what the oracle gains must be more for a share of it to mean something
HARM = ("ttft_mean_s", "ttft_p99_s", "demand_p99_s")
Row = dict[str, Any]
Gain = tuple[float, float, float]


def gains(rows: Iterable[Row]) -> list[Row]:
    """One for each trace, load and predictor that has `none` and the oracle beside it."""
    groups: dict[tuple[str, float], dict[str, dict[int, Row]]] = {}
    for row in rows:
        by_name = groups.setdefault((row["trace"], row["load"]), {})
        by_name.setdefault(row["predictor"], {})[row["seed"]] = row
    return [
        {"trace": trace, "load": load, "predictor": name} | _judged(name, by_name)
        for (trace, load), by_name in groups.items()
        for name in by_name
    ]


def _judged(name: str, by_name: dict[str, dict[int, Row]]) -> Row:
    own, (_, plus, pause) = by_name[name], name.partition("+")
    hearing = by_name.get(NONE + plus + pause, {})
    perfect = by_name.get(ORACLE + PERFECT if plus else ORACLE, {})
    wasted, judged = _sum(own, "wasted_bytes"), _sum(own, "wasted_bytes") + _sum(own, "used_bytes")
    return {
        "seeds": len(own), "engine": _mean(own, "engine"), "nvme": _mean(own, "nvme"),
        "ttft_mean_s": _mean(own, "ttft_mean_s"), "exposed_mean_s": _mean(own, "exposed_mean_s"),
        "exposed_gain": _gain(by_name.get(NONE, {}), own, perfect, "exposed_mean_s"),
        "ttft_gain": _gain(by_name.get(NONE, {}), own, perfect, "ttft_mean_s", LEAST_GAIN),
        "prefetch_gain": _gain(hearing, own, perfect, "exposed_mean_s"),
        "prefetched_bytes": _sum(own, "prefetched_bytes"), "wasted_share": wasted / max(1, judged),
        "worst_wasted_share": max(
            row["wasted_bytes"] / max(1, row["wasted_bytes"] + row["used_bytes"]) for row in own.values()
        ),
        "worst": {
            what: max((row[what] / hearing[seed][what] for seed, row in own.items() if seed in hearing), default=None)
            for what in HARM
        },
    }  # fmt: skip


def _gain(
    base: dict[int, Row], own: dict[int, Row], best: dict[int, Row], what: str, least: float = 0.0
) -> Gain | None:
    """The share, and 95 % of what draws of the seeds give; None where there is nothing to gain."""
    seeds = sorted(base.keys() & own.keys() & best.keys())
    if not seeds:
        return None
    without, having, with_best = (np.array([rows[seed][what] for seed in seeds]) for rows in (base, own, best))
    if (without - with_best).sum() <= max(0.0, least * without.sum()):
        return None
    drawn = np.random.default_rng(0).integers(0, len(seeds), (DRAWS, len(seeds)))
    could = (without - with_best)[drawn].sum(axis=1)
    shares = (without - having)[drawn].sum(axis=1)[could > 0] / could[could > 0]
    low, high = np.percentile(shares, (2.5, 97.5))
    return float((without - having).sum() / (without - with_best).sum()), float(low), float(high)


def table(rows: Sequence[Row]) -> str:
    headings = ("TRACE", ">LOAD", "PREDICTOR", ">ENGINE", ">TTFT S", ">EXPOSED", ">GAIN", ">TTFT", ">PREFETCH",
                ">GB", ">WASTED", ">WORST MEAN", ">P99", ">SERVED P99")  # fmt: skip
    return render_table(headings, [_line(found) for found in gains(rows)])


def _line(found: Row) -> list[str]:
    return [
        found["trace"].split(".")[0][:12], f"{found['load']:g}", found["predictor"], f"{found['engine']:.0%}",
        f"{found['ttft_mean_s']:.3f}", f"{found['exposed_mean_s']:.4f}", _share(found["exposed_gain"]),
        _share(found["ttft_gain"]), _share(found["prefetch_gain"]), f"{found['prefetched_bytes'] / 1e9:.0f}",
        f"{found['wasted_share']:.0%} ({found['worst_wasted_share']:.0%})",
        *("-" if found["worst"][what] is None else f"{found['worst'][what]:.3f}" for what in HARM),
    ]  # fmt: skip


def _share(gain: Gain | None) -> str:
    return "-" if gain is None else f"{gain[0]:.0%} ({gain[1]:.0%} to {gain[2]:.0%})"


def _mean(rows: dict[int, Row], what: str) -> float:
    return float(np.mean([row[what] for row in rows.values()]))


def _sum(rows: dict[int, Row], what: str) -> float:
    return float(sum(row[what] for row in rows.values()))
