"""Outcomes of a run's requests, and the run in figures: latencies, throughput, computed parts of prompts.

The module owns the definitions of the figures. All times are seconds since the run began; latencies count from when the
request was due. Percentiles come from the profiler's histograms, which have no upper bound.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise

from kvstore_engine.profiler.histogram import Histogram


@dataclass(slots=True)
class RequestOutcome:
    """The times and counts of one request of a benchmark, in seconds from its start. `due_s` is when it should be sent,
    `token_s` the time of each piece of the answer. `reused_tokens` are the prompt tokens that were not computed (None:
    unknown), `message` the reason of a failure.
    """

    id: str
    kind: str
    due_s: float
    prompt_tokens: int
    token_s: list[float] = field(default_factory=list)
    end_s: float = 0.0
    generated: int = 0
    queued_s: float | None = None
    reused_tokens: int | None = None
    message: str = ""

    @property
    def ok(self) -> bool:
        return not self.message and bool(self.token_s)

    @property
    def ttft_s(self) -> float:
        return self.token_s[0] - self.due_s

    @property
    def tpot_s(self) -> float | None:
        """The average seconds for each token after the first; None for an answer of one token."""
        if self.generated < 2 or len(self.token_s) < 2:
            return None
        return (self.token_s[-1] - self.token_s[0]) / (self.generated - 1)

    @property
    def total_s(self) -> float:
        return self.end_s - self.due_s


@dataclass(frozen=True, slots=True)
class BenchmarkRun:
    """The result of one run of a benchmark: the outcomes of all requests, its length in seconds, and the engine's
    figures `profile` (empty for a remote server).
    """

    outcomes: list[RequestOutcome]
    seconds: float
    profile: dict[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Summary:
    """The figures of a benchmark run: counts, rates a second, and latencies, each with count, mean, quantiles and
    extremes in seconds. `computed_tokens` is None if the server does not say how many prompt tokens it reused.
    """

    seconds: float
    requests: int
    failed: int
    generated_tokens: int
    prompt_tokens: int
    computed_tokens: int | None
    generated_per_s: float
    total_per_s: float
    requests_per_s: float
    ttft_s: dict[str, float]
    tpot_s: dict[str, float]
    inter_token_s: dict[str, float]
    total_s: dict[str, float]
    queued_s: dict[str, float]

    def as_json(self) -> dict[str, object]:
        return asdict(self)


def summarise(run: BenchmarkRun, kind: str | None = None) -> Summary:
    """Return the figures of all requests of `run`, or only of requests of the kind `kind`."""
    chosen = [outcome for outcome in run.outcomes if kind is None or outcome.kind == kind]
    done = [outcome for outcome in chosen if outcome.ok]
    generated = sum(outcome.generated for outcome in done)
    prompts = sum(outcome.prompt_tokens for outcome in done)
    known = bool(done) and all(outcome.reused_tokens is not None for outcome in done)
    seconds = run.seconds or 1e-9
    return Summary(
        seconds=run.seconds,
        requests=len(chosen),
        failed=len(chosen) - len(done),
        generated_tokens=generated,
        prompt_tokens=prompts,
        computed_tokens=prompts - sum(outcome.reused_tokens or 0 for outcome in done) if known else None,
        generated_per_s=generated / seconds,
        total_per_s=(generated + prompts) / seconds,
        requests_per_s=len(done) / seconds,
        ttft_s=durations(outcome.ttft_s for outcome in done).as_json(),
        tpot_s=durations(outcome.tpot_s for outcome in done if outcome.tpot_s is not None).as_json(),
        inter_token_s=inter_token(done).as_json(),
        total_s=durations(outcome.total_s for outcome in done).as_json(),
        queued_s=durations(outcome.queued_s for outcome in done if outcome.queued_s is not None).as_json(),
    )


def kinds(outcomes: Sequence[RequestOutcome]) -> list[str]:
    """Return the names of the kinds of requests that occur in `outcomes`; an empty list if all are of one kind."""
    found = sorted({outcome.kind for outcome in outcomes})
    return found if len(found) > 1 else []


def durations(values: Iterable[float]) -> Histogram:
    """Return the histogram of `values`, in seconds. A negative value, which an error of clocks makes, counts as 0."""
    return Histogram(max(0.0, value) for value in values)


def inter_token(done: Sequence[RequestOutcome]) -> Histogram:
    """Return the histogram of the seconds between two pieces of an answer, over all answers `done`."""
    return durations(later - earlier for outcome in done for earlier, later in pairwise(outcome.token_s))
