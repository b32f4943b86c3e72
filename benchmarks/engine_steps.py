"""How even are the steps of a full batch? P99 over P50 of the step latency with 16 sequences running.

An engine in this process, 16 clients that each wait for their answer: first prompts of 16 tokens (decoding alone), then
of about 256, so that most steps compute one request's prompt beside the decodes of the others. Steps count while 16
sequences run and one of them at least waits for its next token: in the first load all sequences end at once, and the
step that computes the next 16 prompts delays none of them (its length is reported). The first 20 are left out: graphs
are built and memory is touched then.

Expected: decode steps differ by their contexts only. Beside a prompt a step may take 1.8 times as long by the budget,
so 2.0 leaves a tenth for the budget's error and for the machine.

    python benchmarks/engine_steps.py [--json] [--quick]
"""

from __future__ import annotations

import sys

from support.engine import THREADS, model_path
from support.report import Row, main, progress
from support.timing import median, percentile

from kvstore_engine.batching import Observer, StepRecord
from kvstore_engine.bench.arrivals import ClosedLoop
from kvstore_engine.bench.in_process import run_in_process
from kvstore_engine.bench.loads import LoadSettings, make_load
from kvstore_engine.bench.opened_engine import BenchEngine, opened

CLIENTS, WARM_STEPS, TARGET = 16, 20, 2.0


class FullSteps(Observer):
    """The seconds of steps in which all clients' sequences took part; apart, of those that only began answers."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.beginning: list[float] = []

    def step(self, record: StepRecord) -> None:
        if record.running == CLIENTS:
            found = self.seconds if record.decode_tokens else self.beginning
            found.append(record.end_s - record.begin_s)


def measure(quick: bool) -> list[Row]:
    return [_row(load, quick) for load in ("decode", "chat")]


def _row(load: str, quick: bool) -> Row:
    steps = FullSteps()
    workload = make_load(load, LoadSettings(requests=CLIENTS * (2 if quick else 8), generate_tokens=64))
    context = -(-workload.longest_tokens // 256) * 256
    with opened(BenchEngine(model_path("q4_0"), context, CLIENTS, THREADS), steps) as engine:
        run_in_process(engine, workload, ClosedLoop(CLIENTS))
    seconds = steps.seconds[WARM_STEPS:]
    if steps.beginning:
        longest_ms = max(steps.beginning) * 1e3
        progress(f"{load}: {len(steps.beginning)} steps of prompts alone, up to {longest_ms:.0f} ms, are left out")
    p99, p50 = percentile(seconds, 99), median(seconds)
    return Row(f"step_p99_{load}", p99 * 1e3, "ms", p50 * 1e3, f"ms, p50 of {len(seconds)} steps", target=TARGET)


if __name__ == "__main__":
    sys.exit(main(measure, __doc__))
