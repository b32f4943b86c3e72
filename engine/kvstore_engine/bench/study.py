"""Measures for `kvengine bench`: one case for each load, block size and number of clients, or rate.

The module owns the order of the cases and the record of each. An engine in this process is opened once for each load
and block size; before its cases it answers a few unmeasured requests, since first uses of memory and graphs are slow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from kvstore_console.units import human_seconds
from kvstore_engine.batching.observer import Observer
from kvstore_engine.bench.in_process import BenchEngine, opened, run_in_process
from kvstore_engine.bench.over_http import MeasuredServer, run_over_http
from kvstore_engine.bench.summary import BenchmarkRun, RequestOutcome, Summary, durations, inter_token, kinds, summarise
from kvstore_engine.bench.workload import (
    Arrivals,
    ClosedLoop,
    LoadSettings,
    OpenLoop,
    Workload,
    ideal_tokens,
    make_load,
)
from kvstore_engine.profiler import FanOut, Histogram, Profiler

_WARM_UP = LoadSettings(requests=2, prompt_tokens=32, generate_tokens=4, seed=99)
_LEAST_CONTEXT = 512


@dataclass(frozen=True, slots=True)
class Case:
    """One measurement of a benchmark: its load (the requests), the way they arrive, and the figures. `ideal_tokens` is
    the number of prompt tokens that must be computed if each distinct block is computed once.
    """

    load: str
    about: str
    arrivals: str
    concurrency: int | None
    rate: float | None
    block_tokens: int | None
    ideal_tokens: int
    summary: Summary
    by_kind: dict[str, Summary]
    profile: dict[str, object]
    ttft: Histogram
    inter_token: Histogram

    @property
    def evaluated_ratio(self) -> float | None:
        """The number of prompt tokens that were computed, divided by `ideal_tokens`; None if the server does not report
        it.
        """
        computed = self.summary.computed_tokens
        return None if computed is None or not self.ideal_tokens else computed / self.ideal_tokens

    def as_json(self) -> dict[str, object]:
        return {
            "load": self.load, "about": self.about, "arrivals": self.arrivals, "concurrency": self.concurrency,
            "rate": self.rate, "block_tokens": self.block_tokens, "ideal_prompt_tokens": self.ideal_tokens,
            "evaluated_ratio": self.evaluated_ratio, **self.summary.as_json(),
            "by_kind": {kind: summary.as_json() for kind, summary in self.by_kind.items()}, "profile": self.profile,
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class StudySettings:
    loads: Sequence[str]
    arrivals: Sequence[Arrivals]
    load: LoadSettings
    block_sizes: Sequence[int] = (16,)


Progress = Callable[[str], None]


def study_engine(
    base: BenchEngine, wanted: StudySettings, progress: Progress, observer: Observer | None = None
) -> Iterator[Case]:
    """Measure an engine in this process with each load, block size and way of arrival in `wanted`, and yield each
    measurement. `base` has the engine's other settings. `progress` gets lines of text, `observer` the engine's events.
    """
    for name in wanted.loads:
        workload = make_load(name, wanted.load)
        context = max(_LEAST_CONTEXT, -(-workload.longest_tokens // 256) * 256)
        for block_tokens in wanted.block_sizes:
            for arrivals in wanted.arrivals:
                # An engine of its own: prefixes left behind by another case would be hits that this one did not earn.
                warming, measured = Profiler(), Profiler()
                observers = FanOut(warming, *([observer] if observer else []))
                config = replace(base, context=context, block_tokens=block_tokens)
                with opened(config, observers) as engine:
                    run_in_process(engine, _warm_up(wanted), ClosedLoop(1))
                    observers.replace(warming, measured)
                    run = run_in_process(engine, workload, arrivals)
                profile = {**measured.as_json(), "pool_blocks": engine.pool.blocks}
                yield case_of(
                    workload, arrivals, BenchmarkRun(run.outcomes, run.seconds, profile), block_tokens, progress
                )


def study_server(endpoint: MeasuredServer, wanted: StudySettings, progress: Progress) -> Iterator[Case]:
    """Measure the server `endpoint` with each load and way of arrival in `wanted`, and yield each measurement. Every
    measurement has new prompts. `progress` gets lines of text.
    """
    run_over_http(endpoint, _warm_up(wanted), ClosedLoop(1))
    # A seed for each load, too: of one seed, the shared prefixes of two loads begin alike.
    for number, (arrivals, name) in enumerate(product(wanted.arrivals, wanted.loads)):
        workload = make_load(name, replace(wanted.load, seed=wanted.load.seed + 1000 * number))
        yield case_of(workload, arrivals, run_over_http(endpoint, workload, arrivals), None, progress)


def _warm_up(wanted: StudySettings) -> Workload:
    """Return a load of tokens that the model has: a refused request warms nothing."""
    return make_load("decode", replace(_WARM_UP, vocabulary=wanted.load.vocabulary))


def case_of(
    workload: Workload, arrivals: Arrivals, run: BenchmarkRun, block_tokens: int | None, progress: Progress
) -> Case:
    """Return the measurement of `workload` with the figures of its outcomes `run`. `block_tokens` is the block size of
    the engine, None if it is unknown. `progress` gets one line about it.
    """
    done = [outcome for outcome in run.outcomes if outcome.ok]
    answered = {outcome.id for outcome in done}  # what failed was not computed either
    prompts = (request.tokens for request in workload.requests if request.id in answered)
    case = Case(
        load=workload.name,
        about=workload.about,
        arrivals=str(arrivals),
        concurrency=arrivals.concurrency if isinstance(arrivals, ClosedLoop) else None,
        rate=arrivals.rate if isinstance(arrivals, OpenLoop) else None,
        block_tokens=block_tokens,
        ideal_tokens=ideal_tokens(prompts, block_tokens or 16),
        summary=summarise(run),
        by_kind={kind: summarise(run, kind) for kind in kinds(run.outcomes)},
        profile=run.profile,
        ttft=durations(outcome.ttft_s for outcome in done),
        inter_token=inter_token(done),
    )
    progress(_line(case, run.outcomes))
    return case


def _line(case: Case, outcomes: Sequence[RequestOutcome]) -> str:
    summary = case.summary
    blocks = f", blocks of {case.block_tokens}" if case.block_tokens else ""
    text = (
        f"{case.load}, {case.arrivals}{blocks}: {summary.generated_per_s:.0f} tokens/s, "
        f"TTFT p50 {human_seconds(summary.ttft_s['p50'])}, TPOT p50 {human_seconds(summary.tpot_s['p50'])}"
    )
    if summary.failed:
        first = next(outcome.message for outcome in outcomes if not outcome.ok)
        text += f"; {summary.failed} of {summary.requests} failed: {first}"
    return text
