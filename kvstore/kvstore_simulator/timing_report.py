"""A timing study as tables and as one HTML page: time to first token, parts of that time, traffic, residency over
time.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvstore_console import page as markup
from kvstore_console.axes import COUNT, PERCENT, Axis, Unit, linear_axis, log_axis
from kvstore_console.charts import Curve, area_chart, bar_chart, line_chart, merged
from kvstore_console.table import render_table
from kvstore_console.units import human_bytes, human_seconds
from kvstore_simulator.machine import ENGINE, GPU
from kvstore_simulator.report import policy_of
from kvstore_simulator.simulated_request import Sample
from kvstore_simulator.timing import Row, Timed

_SHOWN = ("hot", "warm", "cold")
_BUSY = 0.95  # from here on time to first token is mostly queueing


def row_policy(row: Row) -> str:
    """Return the policy and the admission of the store in `row`, as text that distinguishes the rows of one plan."""
    if not row["capacity_blocks"]:
        return "-"
    return policy_of(row) if row["admission"] == "always" else f"{policy_of(row)}, {row['admission']}"


def report(results: Sequence[Timed]) -> str:
    """Return the tables of a timing study: latency, traffic, and contents of the tiers, with a note if a figure could
    mislead.
    """
    rows = [result.row for result in results]
    parts = [latency_table(rows), prefetch_table(rows), traffic_table(rows), residency_table(results), *notes(rows)]
    return "\n\n".join(part for part in parts if part)


def times(row: Row) -> list[str]:
    """Return the cells about time in the line for `row`: the time to first token at three percentiles, and the speedup
    over the baseline at two.
    """
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
            row["plan"], row_policy(row), *times(row), human_seconds(row["queue_s"]["mean"]),
            human_seconds(row["exposed_s"]["mean"]), human_seconds(row["exposed_s"]["p99"]),
            *(f"{row['hits_by_tier'][tier] / row['block_accesses']:.4f}" for tier in tiers),
            f"{row['recomputed_blocks']:,}", f"{row['utilisation']['compute']:.0%}",
        ]
        for row in rows
    ]  # fmt: skip
    return render_table(headings, lines)


def prefetch_table(rows: Sequence[Row]) -> str:
    """Return the table about prefetch by predictors, or "" if no row has such prefetch. Its mean times are multiples of
    the times without prefetch.
    """
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
    """Return the table of bytes moved between tiers: a line for each lane (queue of transfers) of each plan that has a
    store.
    """
    lines = []
    for row in rows:
        for lane, nbytes in row["bytes_by_lane"].items():
            wait_s = row["wait_by_lane_s"].get(lane)
            busy = max((row["utilisation"].get(medium, 0.0) for medium in _media_of(lane)), default=0.0)
            shown = ["-", "-"] if wait_s is None else [human_seconds(wait_s), f"{busy:.0%}"]
            lines.append([row["plan"], row_policy(row), lane, human_bytes(nbytes), *shown])
    return render_table(("PLAN", "POLICY", "LANE", ">BYTES", ">MEAN WAIT", ">BUSIER END BUSY"), lines)


def _media_of(lane: str) -> set[str]:
    """Return the media that a lane passes."""
    ends = set(lane.split("→"))
    between = {"link"} if len(ends & {ENGINE, GPU}) == 1 else set()  # one end is in the device's memory
    return ends - {ENGINE} | between


def residency_table(results: Sequence[Timed]) -> str:
    """Return the table of the number of blocks in each tier, averaged over time, and their shares in the classes of the
    tier's policy.
    """
    lines = []
    for result in results:
        by_tier: dict[str, list[Sample]] = {}
        for sample in result.residency:
            by_tier.setdefault(sample.tier, []).append(sample)
        for tier, samples in by_tier.items():
            held = [sample.hot + sample.warm + sample.cold for sample in samples]
            total = sum(held) or 1
            lines.append([
                result.row["plan"], row_policy(result.row), tier, f"{sum(held) / len(held):,.0f}", f"{held[-1]:,}",
                *(f"{sum(getattr(sample, each) for sample in samples) / total:.0%}" for each in _SHOWN),
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


_HEADINGS = (
    "plan", "policy", ">TTFT p50", ">p90", ">p99", ">faster p50", ">p99", ">queue, mean", ">exposed, mean", ">hits",
    ">recomputed",
)  # fmt: skip
_CLASSES = (("cold", 0), ("warm", 1), ("hot", 9))  # with their colours
_LEAST_S = 1e-4
_FIRST_SHARE = 0.02  # where the distribution begins: the few quickest requests would take half of a logarithmic axis


def timing_page(title: str, subtitle: str, results: Sequence[Timed]) -> str:
    """Return the HTML page of a timing study."""
    figures = [_first_token(results), _parts(results), _hits(results), _traffic(results)]
    body = [markup.charts(figures), markup.html_table(_HEADINGS, [_row(result) for result in results])]
    body += [markup.paragraph(note) for note in notes([result.row for result in results])]
    for result in results:
        drawn = markup.charts([*_residency(result), *_flow(result)])
        body.append(markup.section(f"{_name(result)}, over time", drawn))
    return markup.page(title, subtitle, body)


def _name(result: Timed) -> str:
    row = result.row
    return f"{row['plan']}, {row_policy(row)}" if row["capacity_blocks"] else str(row["plan"])


def _first_token(results: Sequence[Timed]) -> str:
    low = max(_LEAST_S, min(_quantile(result, _FIRST_SHARE) for result in results))
    curves = []
    for result in results:
        last = len(result.ttft_s) - 1
        points = [(value, at / last) for at, value in enumerate(result.ttft_s) if at / last >= _FIRST_SHARE]
        curves.append(Curve(_name(result), points, mark="limit" * (result.row["plan"] == "engine-alone")))
    x = log_axis(low, max(result.ttft_s[-1] for result in results), human_seconds, "time to first token")
    note = f"share of requests that had it by then; without the quickest {_FIRST_SHARE:.0%}"
    y = PERCENT.axis([1.0])
    curves = sorted(merged(curves, x, y), key=lambda curve: bool(curve.mark))  # dashes upon the others
    return line_chart("Time to first token", note, curves, x, y)


def _quantile(result: Timed, share: float) -> float:
    return result.ttft_s[round(share * (len(result.ttft_s) - 1))]


def _parts(results: Sequence[Timed]) -> str:
    series = ("queue", "exposed restoration", "computing")
    groups = []
    for result in results:
        row = result.row
        queue, exposed = row["queue_s"]["mean"], row["exposed_s"]["mean"]
        groups.append((_name(result), (queue, exposed, max(0.0, row["ttft_s"]["mean"] - queue - exposed))))
    return bar_chart("Where the time goes", "mean of all requests", groups, series, human_seconds)


def _hits(results: Sequence[Timed]) -> str:
    tiers = list(results[-1].row["hits_by_tier"])
    groups = [
        (_name(result), [result.row["hits_by_tier"][tier] / result.row["block_accesses"] for tier in tiers])
        for result in results
    ]
    return bar_chart("Where blocks were", "share of blocks looked up", groups, tiers, lambda share: f"{share:.2%}")


def _traffic(results: Sequence[Timed]) -> str:
    lanes = list(dict.fromkeys(lane for result in results for lane in result.traffic))
    groups = [
        (_name(result), [float(result.row["bytes_by_lane"].get(lane, 0)) for lane in lanes])
        for result in results
        if result.traffic
    ]
    return bar_chart("Traffic by lane", "bytes, whole run", groups, lanes, human_bytes)


def _residency(result: Timed) -> list[str]:
    figures = []
    for tier in dict.fromkeys(sample.tier for sample in result.residency):
        samples = [sample for sample in result.residency if sample.tier == tier]
        curves = [
            Curve(each, [(sample.at_s, float(getattr(sample, each))) for sample in samples], colour=colour)
            for each, colour in _CLASSES
        ]
        y = COUNT.axis([sample.cold + sample.warm + sample.hot for sample in samples])
        figures.append(area_chart(f"Blocks in {tier}", "by class", curves, _time_axis(samples[-1].at_s), y))
    return figures


def _flow(result: Timed) -> list[str]:
    if not result.traffic:
        return []
    curves = [
        Curve(lane, [(at * result.slice_s, nbytes / result.slice_s / 1e9) for at, nbytes in enumerate(counts)])
        for lane, counts in result.traffic.items()
    ]
    x = _time_axis(result.slice_s * max(len(curve.points) for curve in curves))
    y = Unit(lambda gigabytes: f"{gigabytes:.3g}").axis([rate for curve in curves for _, rate in curve.points])
    return [line_chart("Traffic", "GB/s", curves, x, y)]


def _time_axis(last_s: float) -> Axis:
    return linear_axis(0, max(last_s, 1e-3), lambda seconds: f"{seconds:,.6g}", "seconds")


def _row(result: Timed) -> list[str]:
    row = result.row
    queue, exposed = (human_seconds(row[part]["mean"]) for part in ("queue_s", "exposed_s"))
    return [row["plan"], row_policy(row), *times(row), queue, exposed, f"{row['hit_ratio']:.4f}",
            f"{row['recomputed_blocks']:,}"]  # fmt: skip
