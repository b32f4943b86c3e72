"""A study as files: JSON with everything, CSV with one line a case, and one HTML page to look at.

The module owns their names, columns and layout. The page loads nothing from outside. It measures nothing.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from kvstore_console import page as markup
from kvstore_console.axes import PERCENT, SECONDS, Unit, linear_axis, log_axis
from kvstore_console.charts import Curve, Points, bar_chart, line_chart
from kvstore_console.units import human_seconds
from kvstore_engine.bench.study import Case
from kvstore_engine.errors import OperationError

_CSV_LATENCIES = ("ttft_s", "tpot_s", "inter_token_s", "total_s", "queued_s")
_CSV_PARTS = ("mean", "p50", "p90", "p99", "max")
COLUMNS = (
    "load", "concurrency", "rate", "block_tokens", "seconds", "requests", "failed", "generated_tokens",
    "prompt_tokens", "computed_tokens", "ideal_prompt_tokens", "evaluated_ratio", "generated_per_s", "total_per_s",
    "requests_per_s", *(f"{name}_{part}" for name in _CSV_LATENCIES for part in _CSV_PARTS), "kv_mean_used",
    "kv_peak_used", "local_tokens", "daemon_tokens",
)  # fmt: skip
_HEADINGS = (
    "load", "arrivals", ">blocks", ">tokens/s", ">TTFT p50", ">p99", ">TPOT p50", ">p99", ">between tokens p99",
    ">queue p50", ">total p50", ">computed of ideal", ">K/V used", ">failed",
)  # fmt: skip
_SOURCES = (("computed", "computed"), ("local", "this engine's blocks"), ("daemon", "the daemon"))
_COUNT = Unit(lambda value: f"{value:,.4g}" if value < 1000 else f"{value:,.0f}")
Get = Callable[[Case], float]


def as_json(about: Mapping[str, object], cases: Sequence[Case]) -> dict[str, object]:
    """Return a benchmark as one dictionary: the facts `about` it, and all its `cases` (measurements)."""
    return {**about, "cases": [case.as_json() for case in cases]}


def as_csv(cases: Sequence[Case]) -> str:
    """Return the `cases` (measurements) of a benchmark as CSV text: a heading with the names in `COLUMNS`, then a line
    for each case.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for case in cases:
        fields = _flat(case)
        writer.writerow(["" if fields.get(name) is None else fields[name] for name in COLUMNS])
    return text.getvalue()


def write_files(folder: Path, about: Mapping[str, object], cases: Sequence[Case]) -> list[Path]:
    """Write the facts `about` a benchmark and its `cases` (measurements) as bench.json, bench.csv and bench.html into
    `folder`, and return their paths. Raises OperationError if that fails.
    """
    texts = {
        "bench.json": json.dumps(as_json(about, cases), indent=1) + "\n",
        "bench.csv": as_csv(cases),
        "bench.html": report_page(about, cases),
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            (folder / name).write_text(text)
    except OSError as error:
        raise OperationError(f"cannot write to {folder}: {error.strerror}") from None
    return [folder / name for name in texts]


def _flat(case: Case) -> dict[str, object]:
    fields = case.as_json()
    for name in _CSV_LATENCIES:
        latency = fields[name]
        assert isinstance(latency, dict)
        fields |= {f"{name}_{part}": latency[part] for part in _CSV_PARTS}
    kv, sources = case.profile.get("kv"), case.profile.get("prompt_tokens_by_source")
    if isinstance(kv, dict) and isinstance(sources, dict):
        fields |= {"kv_mean_used": kv["mean_used"], "kv_peak_used": kv["peak_used"]}
        fields |= {"local_tokens": sources["local"], "daemon_tokens": sources["daemon"]}
    return fields


def report_page(about: Mapping[str, object], cases: Sequence[Case]) -> str:
    """Return the HTML report of a benchmark: the facts `about` the run, charts of `cases`, and all figures."""
    body = [markup.tiles(_best(cases))]
    for load in dict.fromkeys(case.load for case in cases):
        chosen = [case for case in cases if case.load == load]
        body.append(markup.section(load, markup.charts(_charts(chosen)), chosen[0].about))
    body.append(markup.section("All figures", markup.html_table(_HEADINGS, [_row(case) for case in cases])))
    facts = " · ".join(f"{name.replace('_', ' ')} {value}" for name, value in about.items() if value not in (None, ""))
    return markup.page("kvengine bench", facts, body)


def _best(cases: Sequence[Case]) -> list[tuple[str, str]]:
    fastest = max(cases, key=lambda case: case.summary.generated_per_s)
    quickest = min(cases, key=lambda case: case.summary.ttft_s["p50"])
    failed = sum(case.summary.failed for case in cases)
    figures = [
        (f"{fastest.summary.generated_per_s:,.0f} tokens/s", f"most generated: {fastest.load}, {fastest.arrivals}"),
        (human_seconds(quickest.summary.ttft_s["p50"]), f"least TTFT p50: {quickest.load}, {quickest.arrivals}"),
        (f"{sum(case.summary.requests for case in cases):,}", "requests measured"),
    ]
    return figures + ([(f"{failed:,}", "requests failed")] if failed else [])


def _charts(cases: Sequence[Case]) -> list[str]:
    charts = []
    if len({_at(case) for case in cases}) > 1:
        charts += [
            _over(
                cases, "Throughput", "generated tokens per second", lambda case: case.summary.generated_per_s, _COUNT
            ),
            _over(cases, "Time to first token", "p50", lambda case: case.summary.ttft_s["p50"], SECONDS),
            _over(cases, "Time per further token", "p50", lambda case: case.summary.tpot_s["p50"], SECONDS),
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


def _over(cases: Sequence[Case], title: str, note: str, get: Get, unit: Unit) -> str:
    """Return a chart with one curve for each block size, over the number of clients or the rate."""
    curves = []
    for block_tokens in dict.fromkeys(case.block_tokens for case in cases):
        points = sorted((_at(case), get(case)) for case in cases if case.block_tokens == block_tokens)
        curves.append(Curve(f"blocks of {block_tokens}" if block_tokens else "server", points, has_dots=True))
    xs = [at for curve in curves for at, _ in curve.points]
    if cases[0].concurrency is not None:
        x = log_axis(min(xs), max(xs), lambda at: f"{at:g}", "clients", marks=xs)
    else:
        x = linear_axis(min(xs), max(xs), lambda at: f"{at:g}", "requests/s")
    return line_chart(title, note, curves, x, unit.axis([value for curve in curves for _, value in curve.points]))


def _distribution(title: str, named: Sequence[tuple[str, Points]]) -> str:
    found = [(name, [(max(at, 1e-6), share) for at, share in points]) for name, points in named if points]
    curves = [Curve(name, [(points[0][0], 0.0), *points]) for name, points in found]
    ends = [at for curve in curves for at, _ in (curve.points[0], curve.points[-1])] or [1e-3, 1.0]
    x = log_axis(min(ends) * 0.95, max(ends) * 1.05, human_seconds)
    return line_chart(title, "share that took no longer", curves, x, PERCENT.axis([1.0]))


def _latencies(cases: Sequence[Case]) -> str:
    groups = [
        (_name(case), [case.summary.ttft_s["p50"], case.summary.ttft_s["p99"], case.summary.tpot_s["p50"]])
        for case in cases
    ]
    return bar_chart("Latency", "", groups, ["TTFT p50", "TTFT p99", "TPOT p50"], human_seconds)


def _sources(cases: Sequence[Case]) -> str | None:
    """Return a chart of the sources of prompts; None if nothing was reused anywhere."""
    found = []
    for case in cases:
        sources = case.profile.get("prompt_tokens_by_source")
        if not isinstance(sources, dict):
            return None
        found.append((_name(case), sources))
    used = [(key, name) for key, name in _SOURCES if any(sources[key] for _, sources in found)]
    if len(used) < 2:
        return None
    groups = [(name, [sources[key] / (sum(sources.values()) or 1) for key, _ in used]) for name, sources in found]
    names = [name for _, name in used]
    return bar_chart("Where prompt tokens came from", "share", groups, names, lambda share: f"{share:.1%}")


def _kinds(cases: Sequence[Case]) -> str | None:
    names = list(dict.fromkeys(kind for case in cases for kind in case.by_kind))
    groups = [
        (_name(case), [case.by_kind[kind].ttft_s["p50"] for kind in names])
        for case in cases
        if len(case.by_kind) == len(names)
    ]
    return bar_chart("Time to first token by kind", "p50", groups, names, human_seconds) if names and groups else None


def _at(case: Case) -> float:
    return float(case.concurrency if case.concurrency is not None else case.rate or 0.0)


def _name(case: Case) -> str:
    return case.arrivals + (f", blocks of {case.block_tokens}" if case.block_tokens not in (None, 16) else "")


def _row(case: Case) -> tuple[str, ...]:
    summary, kv = case.summary, case.profile.get("kv")
    used = f"{kv['mean_used']:.0%}" if isinstance(kv, dict) else ""
    ratio = f"{case.evaluated_ratio:.3f}" if case.evaluated_ratio is not None else ""
    seconds = (
        summary.ttft_s["p50"], summary.ttft_s["p99"], summary.tpot_s["p50"], summary.tpot_s["p99"],
        summary.inter_token_s["p99"], summary.queued_s["p50"], summary.total_s["p50"],
    )  # fmt: skip
    generated = f"{summary.generated_per_s:,.0f}"
    return (
        case.load, case.arrivals, str(case.block_tokens or ""), generated, *map(human_seconds, seconds), ratio, used,
        str(summary.failed),
    )  # fmt: skip
