"""How good predictors are: on traces, the first part of which they learn from, while the later part judges them.

    benchmarks/predictor_study.py mooncake:conversation.jsonl.gz claude-code:sessions.jsonl.gz [--learn 0.5]
    benchmarks/predictor_study.py --quick

At evenly spaced times of the later part each predictor is asked for its guesses. A guess came true if a request within
the horizon uses the block that the guess names, or the one before it, unless four or more different blocks follow that
one: a last block is often partial. For each horizon: how many guesses, how many came true, ECE (10 bins),
log loss against that of the mean, precision and recall (among the guesses) at a few thresholds. Then what an event
costs, and the memory for a million blocks, measured on a made-up workload. Answers are reported 20 ms a token later.
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

import numpy as np
import numpy.typing as npt

from kvstore_predictor.base import Predictor, Request
from kvstore_predictor.ensemble import Ensemble
from kvstore_predictor.markov import Markov
from kvstore_predictor.session_return import SessionReturn
from kvstored.simulator.readers import ReadOptions, read_trace
from kvstored.simulator.trace import Op, Trace, TraceBuilder

HORIZONS_S = (10.0, 60.0, 300.0)
THRESHOLDS = (0.1, 0.3, 0.5, 0.8)
BINS = 10
LEAST = 1e-6
TOKEN_S = 0.02
SHARED_FAN = 4
PREDICTORS: dict[str, Callable[[], Predictor]] = {
    SessionReturn.name: SessionReturn,
    Markov.name: Markov,
    Ensemble.name: Ensemble,
}
Floats = npt.NDArray[np.float64]


class Uses:
    """When each block of a trace is requested."""

    def __init__(self, trace: Trace) -> None:
        times_s = (trace.times_ns - trace.times_ns[0]) / 1e9
        blocks = trace.blocks.astype(np.int64)
        at_s = np.repeat(times_s, np.diff(trace.starts))
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


def ece(chances: Floats, came: Floats) -> float:
    """The mean distance of what was foretold from what came, by ten equal bins of probability."""
    bins = np.minimum((chances * BINS).astype(np.int64), BINS - 1)
    foretold, seen = (np.bincount(bins, weights=each, minlength=BINS) for each in (chances, came))
    return float(np.abs(foretold - seen).sum() / max(len(chances), 1))


def log_loss(chances: Floats, came: Floats) -> float:
    sure = np.clip(chances, LEAST, 1 - LEAST)
    return float(-np.mean(came * np.log(sure) + (1 - came) * np.log1p(-sure)))


def judged(trace: Trace, predictor: Predictor, learn: float, questions: int) -> dict[str, object]:
    """The predictor's figures on the requests of `trace` from share `learn` on."""
    uses, first_ns = Uses(trace), int(trace.times_ns[0])
    keys = [trace.key(block) for block in range(trace.distinct_blocks)]
    at_s = ((trace.times_ns - first_ns) / 1e9).tolist()
    ask_s = np.linspace(at_s[int(trace.requests * learn)], at_s[-1] - HORIZONS_S[0], questions).tolist()
    seen: dict[float, tuple[list[float], list[bool]]] = {horizon_s: ([], []) for horizon_s in HORIZONS_S}
    events_us: list[float] = []
    ends: list[tuple[float, int, int]] = []
    asked_us: list[float] = []
    for at, now_s in enumerate(at_s):
        while ask_s and ask_s[0] < now_s:
            then_s = ask_s.pop(0)
            for horizon_s, (chances, came) in seen.items():
                if then_s + horizon_s > at_s[-1]:
                    continue
                began = time.perf_counter()
                found = predictor.guesses(then_s, horizon_s, 1 << 20)
                asked_us.append((time.perf_counter() - began) * 1e6)
                chances += [guess.probability for guess in found]
                came += [uses.is_within(guess.key, then_s, horizon_s) for guess in found]
        ends.sort(reverse=True)
        while ends and ends[-1][0] <= now_s:
            end_s, number, tokens = ends.pop()
            predictor.answered(number, tokens, end_s)
        if trace.ops[at] == Op.PUT:
            continue
        asked = [keys[block] for block in trace.blocks[trace.starts[at] : trace.starts[at + 1]].tolist()]
        kind, tokens = trace.kind_names[trace.kinds[at]], int(trace.output_tokens[at])
        request = Request(int(trace.tenants[at]), asked, at, int(trace.input_tokens[at]), kind)
        began = time.perf_counter()
        predictor.requested(request, now_s)
        events_us.append((time.perf_counter() - began) * 1e6)
        if tokens:
            ends.append((now_s + tokens * TOKEN_S, at, tokens))
    figures: dict[str, object] = {f"{horizon_s:g} s": _figures(*each) for horizon_s, each in seen.items()}
    mean, (half, most) = float(np.mean(events_us)), np.percentile(events_us, (50, 99)).tolist()
    asking = float(np.median(asked_us)) if asked_us else 0.0
    figures["us"] = {"event mean": mean, "p50": half, "p99": most, "question": asking}
    return figures


def _figures(chances: list[float], came: list[bool]) -> dict[str, float]:
    foretold, true = np.array(chances), np.array(came, dtype=np.float64)
    if not len(true):
        return {"guesses": 0}
    base = float(true.mean())
    found = {
        "guesses": len(true), "came true": base, "ece": ece(foretold, true), "log loss": log_loss(foretold, true),
        "of the mean": log_loss(np.full(len(true), base), true),
    }  # fmt: skip
    for threshold in THRESHOLDS:
        named = foretold >= threshold
        found[f"precision {threshold}"] = float(true[named].mean()) if named.any() else float("nan")
        found[f"recall {threshold}"] = float(true[named].sum() / max(true.sum(), 1.0))
    return found


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
    """What a predictor takes after requests for so many blocks, 16 new ones each; the keys that it keeps, too."""
    chance, before = random.Random(1), _resident_bytes()
    predictor = PREDICTORS[name]()
    for at in range(blocks // 16):
        predictor.requested(Request(at % 4, [chance.randbytes(16) for _ in range(16)], at), at * 0.01)
    return (_resident_bytes() - before) / 1e6


def _read(name: str) -> Trace:
    format_name, _, path = name.partition(":")
    return read_trace(Path(path), format_name, ReadOptions(), lambda *_: None)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="*", metavar="FORMAT:FILE")
    parser.add_argument("--learn", type=float, default=0.5, help="share of the requests that are not judged")
    parser.add_argument("--questions", type=int, default=100)
    parser.add_argument("--quick", action="store_true", help="a made-up workload")
    parser.add_argument("--only", choices=sorted(PREDICTORS), action="append")
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
            for part, values in figures.items():
                print(f"  {part:>6}  {json.dumps(values, default=float)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
