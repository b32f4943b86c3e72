"""What a timing study found, as tables for people."""

from __future__ import annotations

from collections.abc import Sequence

from kvstore_console.table import render_table
from kvstore_console.units import human_bytes, human_seconds
from kvstore_simulator.machine import ENGINE, GPU
from kvstore_simulator.served import Sample
from kvstore_simulator.text import policy_of
from kvstore_simulator.timing import Row, Timed

_CLASSES = ("hot", "warm", "cold")
_BUSY = 0.95  # from here on time to first token is mostly queueing


def keeper(row: Row) -> str:
    """What decides in the store, which distinguishes rows of one plan."""
    if not row["capacity_blocks"]:
        return "-"
    return policy_of(row) if row["admission"] == "always" else f"{policy_of(row)}, {row['admission']}"


def report(results: Sequence[Timed]) -> str:
    """Latency, then traffic, then what the tiers held; a note where a figure does not mean what it seems to."""
    rows = [result.row for result in results]
    parts = [latency_table(rows), prefetch_table(rows), traffic_table(rows), residency_table(results), *notes(rows)]
    return "\n\n".join(part for part in parts if part)


def times(row: Row) -> list[str]:
    """Time to first token at three percentiles, and how much faster two of them are than the baseline's."""
    faster = row.get("speedup")
    return [
        *(human_seconds(row["ttft_s"][share]) for share in ("p50", "p90", "p99")),
        *((f"{faster[share]:.2f}x" for share in ("p50", "p99")) if faster else ("-", "-")),
    ]


def latency_table(rows: Sequence[Row]) -> str:
    tiers = list(rows[-1]["hits_by_tier"])
    headings = [
        "PLAN", "POLICY", ">TTFT P50", ">P90", ">P99", ">FASTER P50", ">P99", ">QUEUE", ">EXPOSED", ">EXPOSED P99",
        *(f">{tier.upper()} HITS" for tier in tiers), ">RECOMPUTED", ">COMPUTE BUSY",
    ]  # fmt: skip
    lines = [
        [
            row["plan"], keeper(row), *times(row), human_seconds(row["queue_s"]["mean"]),
            human_seconds(row["exposed_s"]["mean"]), human_seconds(row["exposed_s"]["p99"]),
            *(f"{row['hits_by_tier'][tier] / row['block_accesses']:.4f}" for tier in tiers),
            f"{row['recomputed_blocks']:,}", f"{row['utilisation']['compute']:.0%}",
        ]
        for row in rows
    ]  # fmt: skip
    return render_table(headings, lines)


def prefetch_table(rows: Sequence[Row]) -> str:
    """What prefetch by prediction did; nothing where no row has it. Mean times are multiples of those without it."""
    lines = []
    for row in rows:
        if found := row.get("prefetch"):
            judged = found["used_bytes"] + found["wasted_bytes"]
            lines.append([
                found["predictor"], *(human_bytes(found[f"{what}_bytes"]) for what in ("prefetched", "used", "wasted")),
                f"{found['wasted_bytes'] / judged:.0%}" if judged else "-", f"{found['late_blocks']:,}",
                human_seconds(found["spared_s"]), f"{found['ttft_against_without']:.3f}x",
                f"{found['exposed_against_without']:.3f}x",
            ])  # fmt: skip
    headings = (
        "PREDICTOR", ">PREFETCHED", ">USED", ">WASTED", ">WASTED SHARE", ">LATE BLOCKS", ">LOADING SPARED",
        ">TTFT, OF WITHOUT", ">EXPOSED, OF WITHOUT",
    )  # fmt: skip
    return render_table(headings, lines) if lines else ""


def traffic_table(rows: Sequence[Row]) -> str:
    """A line for each lane of each plan that has a store."""
    lines = []
    for row in rows:
        for lane, nbytes in row["bytes_by_lane"].items():
            wait_s = row["wait_by_lane_s"].get(lane)
            busy = max((row["utilisation"].get(medium, 0.0) for medium in _media_of(lane)), default=0.0)
            shown = ["-", "-"] if wait_s is None else [human_seconds(wait_s), f"{busy:.0%}"]
            lines.append([row["plan"], keeper(row), lane, human_bytes(nbytes), *shown])
    return render_table(("PLAN", "POLICY", "LANE", ">BYTES", ">MEAN WAIT", ">BUSIER END BUSY"), lines)


def _media_of(lane: str) -> set[str]:
    """What a lane passes."""
    ends = set(lane.split("→"))
    between = {"link"} if len(ends & {ENGINE, GPU}) == 1 else set()  # one end is in the device's memory
    return ends - {ENGINE} | between


def residency_table(results: Sequence[Timed]) -> str:
    """What each tier held, averaged over time, and the shares of its classes."""
    lines = []
    for result in results:
        by_tier: dict[str, list[Sample]] = {}
        for sample in result.residency:
            by_tier.setdefault(sample.tier, []).append(sample)
        for tier, samples in by_tier.items():
            held = [sample.hot + sample.warm + sample.cold for sample in samples]
            total = sum(held) or 1
            lines.append([
                result.row["plan"], keeper(result.row), tier, f"{sum(held) / len(held):,.0f}", f"{held[-1]:,}",
                *(f"{sum(getattr(sample, each) for sample in samples) / total:.0%}" for each in _CLASSES),
            ])  # fmt: skip
    return render_table(("PLAN", "POLICY", "TIER", ">BLOCKS, MEAN", ">AT THE END", ">HOT", ">WARM", ">COLD"), lines)


def notes(rows: Sequence[Row]) -> list[str]:
    found = []
    busy = dict.fromkeys(row["plan"] for row in rows if row["utilisation"]["compute"] > _BUSY)
    if busy:
        found.append(
            f"note: the engine computes nearly all of the time ({', '.join(busy)}): time to first token is mostly the "
            "queue. --speed below 1 or more --devices give a load that it can serve."
        )
    refused = max(row["refused"] for row in rows)
    if refused:
        found.append(
            f"note: {refused:,} requests are longer than the engine's memory holds and are not in the figures."
        )
    found += [
        f"note: predictor {row['prefetch']['predictor']} failed: {row['prefetch']['failure']}"
        for row in rows
        if row.get("prefetch", {}).get("failure")
    ]
    no_room = dict.fromkeys(row["plan"] for row in rows if row["no_room_blocks"])
    if no_room:
        found.append(
            f"note: no room could be made for some blocks in time, they were not stored ({', '.join(no_room)})."
        )
    return found
