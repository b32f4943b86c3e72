"""Measures how good predictors are on traces: they learn from the first part, and the later part judges them.

    benchmarks/predictor_study.py mooncake:conversation.jsonl.gz claude-code:sessions.jsonl.gz [--learn 0.5]
    benchmarks/predictor_study.py --quick

How guesses are judged: `kvstore_simulator.judging`. For each horizon: how many guesses, how many came true, ECE (10
bins), log loss against the mean's, Brier score, precision and recall (among the guesses) at a few thresholds.
Then the processor time of an event, and of finding and keeping the request's session alone (`possible`); what a
request waits for the event (the predictor learns from it afterwards); and the memory for a million blocks, measured on
a made-up workload. With --model also `learned`, with that model; it must have been trained with nothing of what is
judged.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvstore_predictor.base import Predictor, PredictorRequest
from kvstore_predictor.ensemble import Ensemble
from kvstore_predictor.learned import LearnedPredictor
from kvstore_predictor.markov import Markov
from kvstore_predictor.session_return import SessionReturn
from kvstore_predictor.sessions import AwaitedReturns
from kvstore_simulator.judging import judge
from kvstore_simulator.readers import ReadOptions, read_trace
from kvstore_simulator.trace import Op, Trace, TraceBuilder
from kvstored.store.prefetch.guarded_predictor import GuardedPredictor
from kvstored.store.prefetch.model_file import read_model

WAITING = 1000  # requests
PREDICTORS: dict[str, Callable[[], Predictor]] = {
    SessionReturn.name: SessionReturn,
    Markov.name: Markov,
    Ensemble.name: Ensemble,
}


def timed(call: Callable[..., Any], took_us: list[float]) -> Callable[..., Any]:
    """Return `call`, whose microseconds of processor time are noted in `took_us` each time."""

    def run(*arguments: Any) -> Any:
        began = time.thread_time()
        answer = call(*arguments)
        took_us.append((time.thread_time() - began) * 1e6)
        return answer

    return run


def judged(trace: Trace, predictor: Predictor, learn: float, questions: int) -> dict[str, object]:
    """The predictor's figures on the requests of `trace` from share `learn` on."""
    events_us: list[float] = []
    asked_us: list[float] = []
    for name, took_us in (("requested", events_us), ("guesses", asked_us)):
        setattr(predictor, name, timed(getattr(predictor, name), took_us))
    seen = judge(trace, predictor, learn, questions)
    figures: dict[str, object] = {f"{horizon_s:g} s": each.figures() for horizon_s, each in seen.items()}
    mean, (half, most) = float(np.mean(events_us)), np.percentile(events_us, (50, 99)).tolist()
    asking = float(np.median(asked_us)) if asked_us else 0.0
    waits = float(np.percentile(waits_us(trace, predictor), 99))
    figures["us"] = {
        "event mean": mean, "possible": float(np.mean(possible_us(trace))), "p50": half, "p99": most,
        "a request waits p99": waits, "question": asking,
    }  # fmt: skip
    return figures


def possible_us(trace: Trace) -> list[float]:
    """Return how many microseconds it takes to find the session of each request of `trace`, and to keep it."""
    sessions, took_us = AwaitedReturns(1 << 16), list[float]()

    def keep(tenant: int, keys: list[bytes]) -> None:
        slot, known = sessions.find(tenant, keys)
        if slot >= 0:
            sessions.drop(slot)
        sessions.length[sessions.take(tenant, keys, 0, known)] = len(keys)

    kept, keys = timed(keep, took_us), [trace.key(block) for block in range(trace.distinct_blocks)]
    for at in range(trace.requests):
        blocks = trace.blocks[trace.starts[at] : trace.starts[at + 1]].tolist()
        if blocks and trace.ops[at] != Op.PUT:
            kept(int(trace.tenants[at]), [keys[block] for block in blocks])
    return took_us


def waits_us(trace: Trace, predictor: Predictor) -> list[float]:
    """Return how many microseconds each of the last requests of `trace` waits until the predictor knows of it."""
    owed: list[Callable[[], None]] = []
    took_us: list[float] = []
    requested = timed(GuardedPredictor(predictor, owed.append).requested, took_us)
    for at in range(max(0, trace.requests - WAITING), trace.requests):
        blocks = trace.blocks[trace.starts[at] : trace.starts[at + 1]].tolist()
        requested(PredictorRequest(0, [trace.key(block) for block in blocks]), trace.times_ns[-1] * 1e-9)
        while owed:
            owed.pop()()
    return took_us


def made_up(requests: int, seed: int) -> Trace:
    """Chat sessions that end after some turns, agents with short pauses, and documents asked for once."""
    chance, builder, ids = random.Random(seed), TraceBuilder("made-up", "made-up", 512), iter(range(1 << 40))
    sessions: list[tuple[float, list[int], float]] = []
    now_s = 0.0
    while len(builder) < requests:
        now_s += chance.expovariate(2.0)
        due = [each for each in sessions if each[0] <= now_s]
        sessions = [each for each in sessions if each[0] > now_s]
        due.append((now_s, [], chance.choice((3.0, 30.0))))
        for at_s, chain, pause_s in sorted(due, key=lambda each: each[0]):
            chain = chain + [next(ids) for _ in range(chance.randint(1, 6))]
            builder.add(round(at_s * 1e9), chain, input_tokens=512 * len(chain), output_tokens=chance.randint(20, 400))
            if chance.random() < 0.7:
                sessions.append((at_s + 0.5 + chance.expovariate(1 / pause_s), chain, pause_s))
    return builder.build()


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def memory_mb(name: str, blocks: int) -> float:
    """Return the memory of a predictor after requests for a number of blocks, 16 new ones each; the keys that it keeps,
    too.
    """
    chance, before = random.Random(1), _resident_bytes()
    predictor = PREDICTORS[name]()
    for at in range(blocks // 16):
        predictor.requested(PredictorRequest(at % 4, [chance.randbytes(16) for _ in range(16)], at), at * 0.01)
    return (_resident_bytes() - before) / 1e6


def _read(name: str) -> Trace:
    format_name, _, path = name.partition(":")
    return read_trace(Path(path), format_name, ReadOptions(), lambda *_: None)


def _print(figures: dict[str, object]) -> None:
    for part, values in figures.items():
        print(f"  {part:>6}  {json.dumps(values, default=float)}")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="*", metavar="FORMAT:FILE")
    parser.add_argument("--learn", type=float, default=0.5, help="share of the requests that are not judged")
    parser.add_argument("--questions", type=int, default=100)
    parser.add_argument("--quick", action="store_true", help="a made-up workload")
    parser.add_argument("--only", choices=sorted(PREDICTORS), action="append")
    parser.add_argument("--model", type=Path, metavar="FILE", help="of kvstored predictor train: judges learned, too")
    given = parser.parse_args(arguments)
    if given.quick == bool(given.traces):
        parser.error("traces or --quick, one of them")
    names = given.only or list(PREDICTORS)
    blocks = 100_000 if given.quick else 1_000_000
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as fresh:
        taken_mb = fresh.starmap(memory_mb, [(name, blocks) for name in names], chunksize=1)
    traces = [made_up(3000, 1)] if given.quick else [_read(name) for name in given.traces]
    for trace in traces:
        for name, memory in zip(names, taken_mb, strict=True):
            figures = judged(trace, PREDICTORS[name](), given.learn, given.questions)
            print(f"{trace.name}: {name}, {memory:.1f} MB")
            _print(figures)
        if given.model is not None:
            print(f"{trace.name}: {LearnedPredictor.name}, {given.model.name}")
            _print(judged(trace, LearnedPredictor(read_model(given.model)), given.learn, given.questions))
    return 0


if __name__ == "__main__":
    sys.exit(main())
