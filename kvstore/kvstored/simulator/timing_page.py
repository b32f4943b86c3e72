"""A timing study as one HTML page: time to first token, where the time goes, traffic, and residency over time."""

from __future__ import annotations

import math
from collections.abc import Sequence

from kvstored.config.sizes import show_size
from kvstored.simulator.charts import WIDTH, Axis, Line, area_chart, bar_chart, line_chart, page, table
from kvstored.simulator.timing import Timed
from kvstored.simulator.timing_text import keeper, notes, seconds

_HEADINGS = (
    "plan", "policy", "TTFT p50", "p90", "p99", "faster p50", "p99", "queue, mean", "exposed, mean", "hits",
    "recomputed",
)  # fmt: skip
_CLASSES = (("cold", 0), ("warm", 1), ("hot", 9))  # with their colours
_LEAST_S = 1e-4
_FIRST_SHARE = 0.02  # where the distribution begins: the few quickest requests would take half of a logarithmic axis
_THIN, _STEP, _STEPS = 2.0, 1.5, 3  # widths of lines: where some run together each is seen beside those upon it


def timing_page(title: str, subtitle: str, results: Sequence[Timed]) -> str:
    """The whole document."""
    charts = [_first_token(results), _parts(results), _hits(results), _traffic(results)]
    body = f'<div class="charts">{"".join(charts)}</div>\n{_table(results)}'
    body += "".join(f'<p class="sub">{note}</p>' for note in notes([result.row for result in results]))
    for result in results:
        drawn = [*_residency(result), *_flow(result)]
        body += f'<h2>{_name(result)}, over time</h2><div class="charts">{"".join(drawn)}</div>\n'
    return page(title, subtitle, body)


def _name(result: Timed) -> str:
    row = result.row
    return f"{row['plan']}, {keeper(row)}" if row["capacity_blocks"] else str(row["plan"])


def _first_token(results: Sequence[Timed]) -> str:
    low = max(_LEAST_S, min(_quantile(result, _FIRST_SHARE) for result in results))
    high = max(low * 1.01, *(result.ttft_s[-1] for result in results))
    groups: dict[tuple[int, ...], list[Timed]] = {}
    for result in results:  # what no eye could tell apart is one line with all names
        pixels = tuple(round(WIDTH * math.log(max(value, low) / low, high / low)) for value in result.ttft_s)
        groups.setdefault(pixels, []).append(result)
    lines = []
    for place, same in enumerate(groups.values()):
        last = len(same[0].ttft_s) - 1
        points = [(value, at / last) for at, value in enumerate(same[0].ttft_s) if value >= low]
        is_bound = all(result.row["plan"] == "engine-alone" for result in same)
        width = _THIN if is_bound else _THIN + _STEP * min(_STEPS, len(groups) - 1 - place)
        lines.append(Line(" = ".join(map(_name, same)), points, is_bound, has_dots=False, width=width))
    x = Axis(low, high, "time to first token", is_log=True, show=seconds)
    lines.sort(key=lambda line: line.is_bound)  # dashes upon the others
    note = f"share of requests that had it by then; without the quickest {_FIRST_SHARE:.0%}"
    return line_chart("Time to first token", note, lines, x, Axis(0, 1))


def _quantile(result: Timed, share: float) -> float:
    return result.ttft_s[round(share * (len(result.ttft_s) - 1))]


def _parts(results: Sequence[Timed]) -> str:
    series = ("queue", "exposed restoration", "computing")
    groups = []
    for result in results:
        row = result.row
        queue, exposed = row["queue_s"]["mean"], row["exposed_s"]["mean"]
        groups.append((_name(result), (queue, exposed, max(0.0, row["ttft_s"]["mean"] - queue - exposed))))
    return bar_chart("Where the time goes", "mean of all requests", groups, series, seconds)


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
    return bar_chart("Traffic by lane", "bytes, whole run", groups, lanes, lambda nbytes: show_size(int(nbytes)))


def _residency(result: Timed) -> list[str]:
    charts = []
    for tier in dict.fromkeys(sample.tier for sample in result.residency):
        samples = [sample for sample in result.residency if sample.tier == tier]
        times = [sample.at_s for sample in samples]
        layers = [(each, colour, [float(getattr(sample, each)) for sample in samples]) for each, colour in _CLASSES]
        most = max(sum(values[at] for *_, values in layers) for at in range(len(samples)))
        y = Axis(0, max(1.0, most), show=lambda value: f"{value:,.0f}")
        charts.append(area_chart(f"Blocks in {tier}", "by class", layers, times, _time_axis(times[-1]), y))
    return charts


def _flow(result: Timed) -> list[str]:
    if not result.traffic:
        return []
    lines = []
    for lane, counts in result.traffic.items():
        points = [(at * result.slice_s, nbytes / result.slice_s / 1e9) for at, nbytes in enumerate(counts)]
        lines.append(Line(lane, points, has_dots=False))
    most = max(value for line in lines for _, value in line.points)
    x = _time_axis(result.slice_s * max(len(line.points) for line in lines))
    return [line_chart("Traffic", "GB/s", lines, x, Axis(0, most or 1.0))]


def _time_axis(last_s: float) -> Axis:
    return Axis(0, max(last_s, 1e-3), "seconds", show=lambda value: f"{value:,.6g}")


def _table(results: Sequence[Timed]) -> str:
    cells = []
    for result in results:
        row = result.row
        faster = row.get("speedup")
        cells.append(
            (row["plan"], keeper(row),
             *(seconds(row["ttft_s"][share]) for share in ("p50", "p90", "p99")),
             *((f"{faster[share]:.2f}x" for share in ("p50", "p99")) if faster else ("-", "-")),
             seconds(row["queue_s"]["mean"]), seconds(row["exposed_s"]["mean"]), f"{row['hit_ratio']:.4f}",
             f"{row['recomputed_blocks']:,}")
        )  # fmt: skip
    return table(_HEADINGS, cells, words=2)
