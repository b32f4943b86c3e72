"""A timing study as one HTML page: time to first token, where the time goes, traffic, and residency over time."""

from __future__ import annotations

from collections.abc import Sequence

from kvstore_console import page as markup
from kvstore_console.axes import COUNT, PERCENT, Axis, Unit, linear_axis, log_axis
from kvstore_console.charts import Curve, area_chart, bar_chart, line_chart, merged
from kvstore_console.units import human_bytes, human_seconds
from kvstore_simulator.timing import Timed
from kvstore_simulator.timing_text import keeper, notes, times

_HEADINGS = (
    "plan", "policy", ">TTFT p50", ">p90", ">p99", ">faster p50", ">p99", ">queue, mean", ">exposed, mean", ">hits",
    ">recomputed",
)  # fmt: skip
_CLASSES = (("cold", 0), ("warm", 1), ("hot", 9))  # with their colours
_LEAST_S = 1e-4
_FIRST_SHARE = 0.02  # where the distribution begins: the few quickest requests would take half of a logarithmic axis


def timing_page(title: str, subtitle: str, results: Sequence[Timed]) -> str:
    """The whole document."""
    figures = [_first_token(results), _parts(results), _hits(results), _traffic(results)]
    body = [markup.charts(figures), markup.html_table(_HEADINGS, [_row(result) for result in results])]
    body += [markup.paragraph(note) for note in notes([result.row for result in results])]
    for result in results:
        drawn = markup.charts([*_residency(result), *_flow(result)])
        body.append(markup.section(f"{_name(result)}, over time", drawn))
    return markup.page(title, subtitle, body)


def _name(result: Timed) -> str:
    row = result.row
    return f"{row['plan']}, {keeper(row)}" if row["capacity_blocks"] else str(row["plan"])


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
    return [row["plan"], keeper(row), *times(row), queue, exposed, f"{row['hit_ratio']:.4f}",
            f"{row['recomputed_blocks']:,}"]  # fmt: skip
