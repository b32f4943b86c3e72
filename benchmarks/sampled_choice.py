"""What does it cost to draw a token from a row of logits?

Rows of SmolLM2-135M after each of 256 tokens, and rows of noise, which are flatter than any model's. Baseline of a
draw: the same by sorting the whole row, as samplers are mostly written (and as ours was).
Processor time of this process, medians over the rows, the sides in turns.

Expected: exp and sums of 49,152 float64 take 0.1 to 0.2 ms, sorting them 4 to 6. So a draw from all should take a
twentieth of the sort, and one with top-p, which weighs the row in bins and sorts one of them, hardly more. Seen: the
former does; bins take as long again as all the rest.

    python benchmarks/sampled_choice.py [--json] [--quick]
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import numpy.typing as npt
from support.engine import THREADS, model_path
from support.report import AT_MOST, Row, main
from support.timing import median

from kvstore_engine.executor import Executor
from kvstore_engine.gguf import GGUFFile
from kvstore_engine.graph import SequenceSlice
from kvstore_engine.model import load_model
from kvstore_engine.pool import BlockPool
from kvstore_engine.sampler import Sampler, SamplingSettings

Floats = npt.NDArray[np.float32]
TOKENS = 256
SETTINGS = {"all": SamplingSettings(1.0, seed=1), "top_p_90": SamplingSettings(1.0, top_p=0.9, seed=1)}
MOST = {"all": 0.1, "top_p_90": 0.2}


def measure(quick: bool) -> list[Row]:
    rows = []
    of_model = _rows_of_a_model(64 if quick else TOKENS)
    noise = (np.random.default_rng(0).standard_normal(of_model.shape) * 3).astype(np.float32)
    for kind, logits in (("model", of_model), ("noise", noise)):
        for name, settings in SETTINGS.items():
            ours_ms, sorting_ms = _in_turns(logits, settings)
            rows.append(Row(f"draw_{kind}_{name}", ours_ms, "ms", sorting_ms, "ms, sorting all", AT_MOST, MOST[name]))
    return rows


def _in_turns(logits: Floats, settings: SamplingSettings) -> tuple[float, float]:
    """Medians over the rows: of a draw, and of one by sorting."""
    sampler, draws = Sampler(settings), np.random.Generator(np.random.PCG64(1))
    taken, sorting = [], []
    for row in logits:
        taken.append(_cpu_s(partial(sampler.choose, row)))
        sorting.append(_cpu_s(partial(_by_sorting, row, settings, draws.random())))
    return median(taken) * 1e3, median(sorting) * 1e3


def _rows_of_a_model(count: int) -> Floats:
    tokens = np.random.default_rng(2).integers(1000, 40_000, count).astype(np.int32)
    with load_model(GGUFFile.open(model_path("q8_0"))) as model:
        pool = BlockPool(model.config, -(-count // 16))
        with Executor(model, pool, threads=THREADS) as executor:
            table = np.arange(pool.blocks, dtype=np.int32)
            return executor.forward([SequenceSlice(tokens, 0, table, "all")])


def _cpu_s(action: Callable[[], object]) -> float:
    began_s = time.thread_time()
    action()
    return time.thread_time() - began_s


def _by_sorting(logits: Floats, settings: SamplingSettings, draw: float) -> int:
    order = np.argsort(-logits, kind="stable")
    weights = np.exp((logits[order].astype(np.float64) - float(logits[order[0]])) / settings.temperature)
    cumulated = np.cumsum(weights / weights.sum())
    if settings.top_p < 1:
        cumulated = cumulated[: int(np.searchsorted(cumulated, settings.top_p)) + 1]
    at = int(np.searchsorted(cumulated, draw * cumulated[-1], side="right"))
    return int(order[min(at, len(cumulated) - 1)])


if __name__ == "__main__":
    sys.exit(main(measure, __doc__))
