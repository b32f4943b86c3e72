"""A study as one HTML page: what it comes to, curves over the number of clients, distributions, and the table.

Owns the layout. Nothing outside the page is loaded by it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from kvstore_engine.bench.charts import Curve, Points, Scale, bar_chart, curve_chart, page, table, tiles
from kvstore_engine.bench.study import Case

_HEADINGS = (
    "load", "arrivals", "blocks", "tokens/s", "TTFT p50", "p99", "TPOT p50", "p99", "between tokens p99", "queue p50",
    "total p50", "computed of ideal", "K/V used", "failed",
)  # fmt: skip
_SOURCES = (("computed", "computed"), ("local", "this engine's blocks"), ("daemon", "the daemon"))
Get = Callable[[Case], float]


def report_page(about: Mapping[str, object], cases: Sequence[Case]) -> str:
    """The whole document."""
    body = tiles(_best(cases))
    for load in dict.fromkeys(case.load for case in cases):
        chosen = [case for case in cases if case.load == load]
        drawn = "".join(_charts(chosen))
        body += f'<h2>{load}</h2><p class="sub">{chosen[0].about}</p><div class="charts">{drawn}</div>\n'
    body += "<h2>All figures</h2>" + table(_HEADINGS, [_row(case) for case in cases], words=2)
    told = " · ".join(f"{name.replace('_', ' ')} {value}" for name, value in about.items() if value not in (None, ""))
    return page("kvengine bench", told, body)


def seconds(value: float) -> str:
    """A duration, in the unit that reads best."""
    if value >= 1:
        return f"{value:.3g} s"
    return f"{value * 1e3:.3g} ms" if value >= 1e-3 else f"{value * 1e6:.3g} µs" if value else "0"


def _best(cases: Sequence[Case]) -> list[tuple[str, str]]:
    fastest = max(cases, key=lambda case: case.summary.generated_per_s)
    quickest = min(cases, key=lambda case: case.summary.ttft_s["p50"])
    failed = sum(case.summary.failed for case in cases)
    figures = [
        (f"most generated: {fastest.load}, {fastest.arrivals}", f"{fastest.summary.generated_per_s:,.0f} tokens/s"),
        (f"least TTFT p50: {quickest.load}, {quickest.arrivals}", seconds(quickest.summary.ttft_s["p50"])),
        ("requests measured", f"{sum(case.summary.requests for case in cases):,}"),
    ]
    return figures + ([("requests failed", f"{failed:,}")] if failed else [])


def _charts(cases: Sequence[Case]) -> list[str]:
    charts = []
    if len({_at(case) for case in cases}) > 1:
        charts += [
            _over(cases, "Throughput", "generated tokens per second", lambda case: case.summary.generated_per_s, None),
            _over(cases, "Time to first token", "p50", lambda case: case.summary.ttft_s["p50"], seconds),
            _over(cases, "Time per further token", "p50", lambda case: case.summary.tpot_s["p50"], seconds),
        ]
    else:
        throughput = [(_name(case), [case.summary.generated_per_s]) for case in cases]
        charts.append(bar_chart("Throughput", "generated", throughput, ["tokens/s"], lambda value: f"{value:,.0f}"))
        charts.append(_latencies(cases))
    one_size = [case for case in cases if case.block_tokens == cases[0].block_tokens]
    first_tokens = [(_name(case), case.ttft.cumulative()) for case in one_size]
    charts.append(_distribution("Time to first token", first_tokens))
    gaps = [(_name(case), case.inter_token.cumulative()) for case in one_size]
    charts.append(_distribution("Between one token and the next", gaps))
    # Of each further block size the case with the most clients: what can be reused depends on it little else.
    others = {case.block_tokens: case for case in cases if case not in one_size}
    if (sources := _sources([*one_size, *others.values()])) is not None:
        charts.append(sources)
    if (by_kind := _kinds(one_size)) is not None:
        charts.append(by_kind)
    return charts


def _over(cases: Sequence[Case], title: str, note: str, get: Get, show: Callable[[float], str] | None) -> str:
    """One curve for each block size over the number of clients, or the rate."""
    curves = []
    for block_tokens in dict.fromkeys(case.block_tokens for case in cases):
        points = sorted((_at(case), get(case)) for case in cases if case.block_tokens == block_tokens)
        curves.append(Curve(f"blocks of {block_tokens}" if block_tokens else "server", points))
    xs = [at for curve in curves for at, _ in curve.points]
    most = max(value for curve in curves for _, value in curve.points) or 1.0
    is_closed = cases[0].concurrency is not None
    label = "clients" if is_closed else "requests/s"
    x = Scale(min(xs), max(xs), label, log=is_closed, show=lambda at: f"{at:g}", labelled=xs)
    return curve_chart(title, note, curves, x, Scale(0, most * 1.08, show=show or (lambda value: f"{value:,.0f}")))


def _distribution(title: str, named: Sequence[tuple[str, Points]]) -> str:
    curves = [
        Curve(name, [(points[0][0], 0.0), *points], dots=False)
        for name, points in ((name, [(max(at, 1e-6), share) for at, share in points]) for name, points in named)
        if points
    ]
    ends = [at for curve in curves for at, _ in (curve.points[0], curve.points[-1])] or [1e-3, 1.0]
    x = Scale(min(ends) * 0.95, max(ends) * 1.05, "", log=True, show=seconds)
    return curve_chart(title, "share that took no longer", curves, x, Scale(0, 1, show=lambda share: f"{share:.0%}"))


def _latencies(cases: Sequence[Case]) -> str:
    groups = [
        (_name(case), [case.summary.ttft_s["p50"], case.summary.ttft_s["p99"], case.summary.tpot_s["p50"]])
        for case in cases
    ]
    return bar_chart("Latency", "", groups, ["TTFT p50", "TTFT p99", "TPOT p50"], seconds)


def _sources(cases: Sequence[Case]) -> str | None:
    """Where prompts came from; None if nothing was reused anywhere."""
    found = []
    for case in cases:
        sources = case.profile.get("prompt_tokens_by_source")
        if not isinstance(sources, dict):
            return None
        found.append((_name(case), sources))
    told = [(key, name) for key, name in _SOURCES if any(sources[key] for _, sources in found)]
    if len(told) < 2:
        return None
    groups = [(name, [sources[key] / (sum(sources.values()) or 1) for key, _ in told]) for name, sources in found]
    names = [name for _, name in told]
    return bar_chart("Where prompt tokens came from", "share", groups, names, lambda share: f"{share:.1%}")


def _kinds(cases: Sequence[Case]) -> str | None:
    names = list(dict.fromkeys(kind for case in cases for kind in case.by_kind))
    groups = [
        (_name(case), [case.by_kind[kind].ttft_s["p50"] for kind in names])
        for case in cases
        if len(case.by_kind) == len(names)
    ]
    return bar_chart("Time to first token by kind", "p50", groups, names, seconds) if names and groups else None


def _at(case: Case) -> float:
    return float(case.concurrency if case.concurrency is not None else case.rate or 0.0)


def _name(case: Case) -> str:
    return case.arrivals + (f", blocks of {case.block_tokens}" if case.block_tokens not in (None, 16) else "")


def _row(case: Case) -> tuple[str, ...]:
    summary, kv = case.summary, case.profile.get("kv")
    used = f"{kv['mean_used']:.0%}" if isinstance(kv, dict) else ""
    ratio = f"{case.evaluated_ratio:.3f}" if case.evaluated_ratio is not None else ""
    return (
        case.load, case.arrivals, str(case.block_tokens or ""), f"{summary.generated_per_s:,.0f}",
        seconds(summary.ttft_s["p50"]), seconds(summary.ttft_s["p99"]), seconds(summary.tpot_s["p50"]),
        seconds(summary.tpot_s["p99"]), seconds(summary.inter_token_s["p99"]), seconds(summary.queued_s["p50"]),
        seconds(summary.total_s["p50"]), ratio, used, str(summary.failed),
    )  # fmt: skip
