"""The quality of a predictor's guesses on a trace: it learns from the first part and is judged on the later part.

At evenly spaced times of the later part the predictor is asked for its guesses. A guess came true if a request within
the horizon uses the block that the guess names, or the block before it, unless four or more different blocks follow
that one: a last block is often partial. Answers are reported 20 ms a token later, recorded hints at their recorded
times.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvstore_predictor.base import Hint, NextStep, Predictor, PredictorRequest
from kvstore_simulator.engine_reports import ANSWER_TOKEN_NS
from kvstore_simulator.trace import Op, Trace
from kvstored.clock import NS_PER_MS, NS_PER_S

HORIZONS_S = (10.0, 60.0, 300.0)
THRESHOLDS = (0.1, 0.3, 0.5, 0.8)
BINS = 10
LEAST = 1e-6
SHARED_FAN = 4
ALL = 1 << 20
Floats = npt.NDArray[np.float64]
Progress = Callable[[int, int], None]


class RequestTimes:
    """An index of a trace that says at which times each block is requested."""

    def __init__(self, trace: Trace) -> None:
        times_s = (trace.times_ns - trace.times_ns[0]) / NS_PER_S
        blocks = trace.blocks.astype(np.int64)
        at_s = np.repeat(times_s, np.diff(trace.starts))
        is_read = np.repeat(trace.ops != Op.PUT, np.diff(trace.starts))
        blocks, at_s = blocks[is_read], at_s[is_read]
        order = np.lexsort((at_s, blocks))
        self._firsts = np.searchsorted(blocks[order], np.arange(trace.distinct_blocks + 1))
        self._at_s = at_s[order]
        above = trace.parents
        fan = np.bincount(above[above >= 0], minlength=len(above))
        self._above = np.where((above >= 0) & (fan[above] < SHARED_FAN), above, -1)

    def is_within(self, key: bytes, now_s: float, horizon_s: float) -> bool:
        block = int.from_bytes(key, "big") - 1
        above = int(self._above[block])
        return self._is_used(block, now_s, horizon_s) or (above >= 0 and self._is_used(above, now_s, horizon_s))

    def _is_used(self, block: int, now_s: float, horizon_s: float) -> bool:
        times = self._at_s[self._firsts[block] : self._firsts[block + 1]]
        at = int(np.searchsorted(times, now_s, side="right"))
        return at < len(times) and float(times[at]) <= now_s + horizon_s


class PredictorEvent(NamedTuple):
    """An event of a replayed trace for a predictor, `now_s` seconds after the first request. `said(predictor)` delivers
    it. If `said` is None, the predictor is asked for guesses at that time.
    """

    now_s: float
    said: Callable[[Predictor], None] | None


def events(trace: Trace, ask_s: list[float]) -> Iterator[PredictorEvent]:
    """Yield the requests, answers and hints of `trace`, and the times `ask_s` (in seconds) at which to ask for guesses,
    in the order of time. A time to ask comes before the events at the same time.
    """
    keys = [trace.key(block) for block in range(trace.distinct_blocks)]
    first_ns = int(trace.times_ns[0])
    found = [(now_s, 0, PredictorEvent(now_s, None)) for now_s in ask_s]
    for at in range(trace.requests):
        if trace.ops[at] == Op.PUT:
            continue
        tokens, now_s = int(trace.output_tokens[at]), (int(trace.times_ns[at]) - first_ns) / NS_PER_S
        found.append((now_s, 2, PredictorEvent(now_s, _requested(trace, keys, at, now_s))))
        if tokens:
            end_s = now_s + tokens * ANSWER_TOKEN_NS / NS_PER_S
            found.append((end_s, 1, PredictorEvent(end_s, _answered(at, tokens, end_s))))
    for hint in trace.hints:
        if hint.block >= 0:
            now_s = max(0.0, (hint.time_ns - first_ns) / NS_PER_S)
            due_s = None if hint.due_in_ns is None else now_s + hint.due_in_ns / NS_PER_S
            step = NextStep(hint.next_step) if hint.next_step in set(NextStep) else NextStep.UNSPECIFIED
            said = Hint(hint.will_continue, due_s, step, hint.answer_tokens)
            found.append((now_s, 3, PredictorEvent(now_s, _hinted(hint.tenant, keys[hint.block], said, now_s))))
    found.sort(key=lambda each: each[:2])
    return (event for _, _, event in found)


def _requested(trace: Trace, keys: list[bytes], at: int, now_s: float) -> Callable[[Predictor], None]:
    def say(predictor: Predictor) -> None:
        asked = [keys[block] for block in trace.blocks[trace.starts[at] : trace.starts[at + 1]].tolist()]
        kind = trace.kind_names[trace.kinds[at]]
        predictor.requested(
            PredictorRequest(int(trace.tenants[at]), asked, at, int(trace.input_tokens[at]), kind), now_s
        )

    return say


def _answered(number: int, tokens: int, end_s: float) -> Callable[[Predictor], None]:
    return lambda it: it.answered(number, tokens, end_s)


def _hinted(tenant: int, key: bytes, said: Hint, now_s: float) -> Callable[[Predictor], None]:
    return lambda it: it.hinted(tenant, key, said, now_s)


@dataclass
class Judged:
    """The guesses of a predictor about which chains are requested within one horizon (a number of seconds): the
    predicted chance of each guess, and whether it came true.
    """

    foretold: list[float] = field(default_factory=list)
    came: list[bool] = field(default_factory=list)

    def figures(self) -> dict[str, float]:
        """Return figures of the quality of the guesses by name, or only their number if there are none. The figure `of
        the mean` is the log loss that a predictor would have which always says the share of guesses that came true.
        """
        foretold, true = np.array(self.foretold), np.array(self.came, dtype=np.float64)
        if not len(true):
            return {"guesses": 0}
        base = float(true.mean())
        found = {
            "guesses": len(true), "came true": base, "ece": ece(foretold, true), "log loss": log_loss(foretold, true),
            "of the mean": log_loss(np.full(len(true), base), true), "brier": float(np.mean((foretold - true) ** 2)),
        }  # fmt: skip
        for threshold in THRESHOLDS:
            named = foretold >= threshold
            found[f"precision {threshold}"] = float(true[named].mean()) if named.any() else float("nan")
            found[f"recall {threshold}"] = float(true[named].sum() / max(true.sum(), 1.0))
        return found


def judge(
    trace: Trace, predictor: Predictor, learn: float, questions: int, progress: Progress = lambda done, total: None
) -> dict[float, Judged]:
    """Let `predictor` learn from the first part of `trace`, the share `learn` of its requests, and ask it for guesses
    `questions` times in the later part. Return the judged guesses by horizon in seconds. A horizon that ends after the
    trace is not judged.
    """
    uses = RequestTimes(trace)
    seen = {horizon_s: Judged() for horizon_s in HORIZONS_S}
    ask_s = question_times(trace, learn, 1.0, questions)
    last_s = (int(trace.times_ns[-1]) - int(trace.times_ns[0])) / NS_PER_S
    for now_s, said in events(trace, ask_s):
        if said is not None:
            said(predictor)
            continue
        progress(round(now_s * NS_PER_MS), round(last_s * NS_PER_MS))
        for horizon_s, judged in seen.items():
            if now_s + horizon_s <= last_s:
                found = predictor.guesses(now_s, horizon_s, ALL)
                judged.foretold += [guess.probability for guess in found]
                judged.came += [uses.is_within(guess.key, now_s, horizon_s) for guess in found]
    return seen


def judge_all(
    traces: Sequence[Trace],
    make: Callable[[], Predictor],
    learn: float,
    questions: int,
    progress: Callable[[str, int, int], None],
) -> dict[float, Judged]:
    """Judge a new predictor on each of `traces`, as `judge` does, and return the guesses of all traces together by
    horizon in seconds. `make` returns a new predictor.
    """
    seen = {horizon_s: Judged() for horizon_s in HORIZONS_S}
    for trace in traces:
        predictor = make()
        found = judge(trace, predictor, learn, questions, partial(progress, f"judging {predictor.name}"))
        for horizon_s, judged in found.items():
            seen[horizon_s].foretold += judged.foretold
            seen[horizon_s].came += judged.came
    return seen


def question_times(trace: Trace, first: float, last: float, questions: int) -> list[float]:
    """Return `questions` times, in seconds after the first request of `trace`, at which to ask for guesses. They are
    spaced evenly between the shares `first` and `last` of its requests. The last time is ten seconds before the end, if
    that fits.
    """
    times = (trace.times_ns - trace.times_ns[0]) / NS_PER_S
    begin, end = (float(times[min(int(trace.requests * share), trace.requests - 1)]) for share in (first, last))
    found: list[float] = np.linspace(begin, max(begin, end - HORIZONS_S[0]), questions).tolist()
    return [each for each, later in pairwise([*found, float("inf")]) if each < later]


def ece(chances: Floats, came: Floats) -> float:
    """Return the expected calibration error of the predicted `chances`: the mean distance between chance and outcome
    `came` (1 for a guess that came true), over ten equal bins of chance.
    """
    bins = np.minimum((chances * BINS).astype(np.int64), BINS - 1)
    foretold, seen = (np.bincount(bins, weights=each, minlength=BINS) for each in (chances, came))
    return float(np.abs(foretold - seen).sum() / max(len(chances), 1))


def log_loss(chances: Floats, came: Floats) -> float:
    sure = np.clip(chances, LEAST, 1 - LEAST)
    return float(-np.mean(came * np.log(sure) + (1 - came) * np.log1p(-sure)))
