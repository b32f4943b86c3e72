"""Inter-token latency over a long run of mixed lengths: our paged cache against a contiguous one in the same engine.

Sixteen clients send prompts of 16 to 1,024 tokens and read answers of 16 to 512, each drawn anew, so that the pool
fragments. The pool has room for twice what runs on average, on both sides. The contiguous side keeps the blocks of a
sequence in one piece (`support/contiguous.py`): it copies sequences that meet their neighbour, and all of them where no
hole is large enough. Both engines live through the whole run and take turns under the same requests. A latency is the
time between two tokens of an answer. Possible is what the contiguous side had if its copies took no time: what is left
comes of the load and of computing, which both sides share. `--quick` takes some three minutes, the full run an hour.

    python benchmarks/inter_token.py [--json] [--quick]
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable
from itertools import count, pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from support.contiguous import ContiguousSpace
from support.engine import THREADS, model_path
from support.report import AT_MOST, Row, main, progress

from kvstore_engine.batching.settings import EngineSettings
from kvstore_engine.bench.child import ServerChild, answer_questions
from kvstore_engine.bench.in_process import BenchEngine, opened, run_in_process
from kvstore_engine.bench.workload import BenchRequest, ClosedLoop, Workload

PAGED, CONTIGUOUS, UNMOVED = "paged", "contiguous", "unmoved"
CLIENTS = 16
CONTEXT, POOL_TOKENS = 1536, 8192
PROMPT, ANSWER = (16, 160, 1024), (16, 96, 512)  # least, median, most
SPREAD = 0.8  # of the logarithm
FULL_S, QUICK_S = 3600, 170
OF_CONTIGUOUS = 0.7


def measure(quick: bool) -> list[Row]:
    gaps: dict[str, list[float]] = {PAGED: [], CONTIGUOUS: [], UNMOVED: []}
    model, environment = model_path("q4_0"), {"PYTHONPATH": str(Path(__file__).parent)}
    with contextlib.ExitStack() as stack:
        sides = {
            name: stack.enter_context(
                contextlib.closing(ServerChild("inter_token", [name, str(model), str(THREADS)], environment))
            )
            for name in (PAGED, CONTIGUOUS)
        }
        moved, begin_s = {PAGED: 0, CONTIGUOUS: 0}, time.monotonic()
        for turn in count():
            for name in list(sides)[:: 1 if turn % 2 else -1]:
                answer = sides[name].ask({"seed": turn, "requests": CLIENTS if quick else 4 * CLIENTS})
                moved[name] = answer["moved"]
                if turn:  # the first warms up
                    gaps[name] += answer["gaps"]
                    gaps[UNMOVED] += answer["without_moves"]
            if turn and time.monotonic() - begin_s > (QUICK_S if quick else FULL_S):
                break
    progress(f"{len(gaps[PAGED])} tokens each; blocks moved: {moved}")
    return [
        _row("std", np.std, gaps, OF_CONTIGUOUS),
        _row("mean", np.mean, gaps),
        _row("p99", lambda seconds: np.percentile(seconds, 99), gaps),
    ]


def _row(
    what: str, figure: Callable[[list[float]], Any], gaps: dict[str, list[float]], target: float | None = None
) -> Row:
    paged, contiguous, unmoved = (float(figure(gaps[name])) * 1e3 for name in (PAGED, CONTIGUOUS, UNMOVED))
    name, other = f"inter_token_{what}", "ms, contiguous cache"
    return Row(name, paged, "ms", contiguous, other, AT_MOST, target, unmoved, "moving at no cost")


def requests(seed: int, number: int, vocabulary: int) -> Workload:
    """Return `number` requests of mixed lengths; equal seeds give equal ones."""
    random = np.random.Generator(np.random.PCG64(seed))

    def length(least: int, median: int, most: int) -> int:
        return int(np.clip(median * np.exp(SPREAD * random.standard_normal()), least, most))

    drawn = []
    for at in range(number):
        prompt = random.integers(300, vocabulary, length(*PROMPT)).astype(np.int32)
        drawn.append(BenchRequest(f"{seed}-{at}", prompt, length(*ANSWER)))
    return Workload("mixed lengths", "prompts and answers of very unequal lengths", tuple(drawn))


def _answer(side: str, model: Path, threads: int) -> None:
    """Answer questions with the latencies of a turn, as a child process."""
    settings = EngineSettings(max_running=CLIENTS, compaction=side == PAGED)
    wanted = BenchEngine(model, CONTEXT, CLIENTS, threads, pool_tokens=POOL_TOKENS, settings=settings)
    with contextlib.ExitStack() as stack:
        if side == CONTIGUOUS:
            stack.enter_context(patch("kvstore_engine.batching.engine.BlockSpace", ContiguousSpace))
        engine = stack.enter_context(opened(wanted))

        def respond(asked: dict[str, Any]) -> dict[str, object]:
            load = requests(asked["seed"], asked["requests"], engine.compute.limits.vocabulary)
            begin_s = time.perf_counter()
            outcomes = run_in_process(engine, load, ClosedLoop(CLIENTS)).outcomes
            if failed := [outcome.message for outcome in outcomes if not outcome.ok]:
                raise SystemExit(f"{len(failed)} requests failed: {failed[0]}")
            times = [[begin_s + at for at in outcome.token_s] for outcome in outcomes]
            gaps = [later - earlier for each in times for earlier, later in pairwise(each)]
            if not isinstance(engine.space, ContiguousSpace):
                return {"gaps": gaps, "moved": 0, "without_moves": []}
            without = [gap for each in times for gap in engine.space.gaps_without_moves(each)]
            return {"gaps": gaps, "moved": engine.space.moved, "without_moves": without}

        answer_questions(respond)


if __name__ == "__main__":
    if sys.argv[1:2] in ([PAGED], [CONTIGUOUS]):
        _answer(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
    else:
        sys.exit(main(measure, __doc__))
