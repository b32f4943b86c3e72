"""Does restoring by computing and loading at once beat the better of the two alone, in the running engine?

SmolLM2-135M in this process, a real daemon, prompts of which all whole blocks but the last are on NVMe. Reads are made
slow: one at a time, each delayed (failpoint `nvme.read`), so that loading all takes 0.1 to 10 times as long as
computing all. For each ratio and context the three ways take turns: loading alone, computing alone, and as planned;
DRAM is dropped before each. The figure is the median time to first token, and the spread is (highest - lowest) /
median. `predicted` compares the plan's time with that from the plan until all was present; `computing_differs` is how
far computing alone is from the turn before, which no prediction can know. `busy` is the greater share of that time in
which the link or steps worked, for the plans that use both; at the optimum both are 1.

Last, four answers are decoded while other prompts are restored, computed, or absent, at a ratio of 1: the 99th
percentile of the time between two tokens.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import numpy as np
from support.daemon import BenchDaemon, slowed_daemon
from support.engine import THREADS, model_path
from support.report import AT_LEAST, Row, main, median, percentile, progress, within
from ttft_restore import prompt_text

from kvstore_client import Fingerprint, Session
from kvstore_engine.batching.engine import BatchEngine
from kvstore_engine.batching.events import Finished
from kvstore_engine.batching.observer import Observer
from kvstore_engine.batching.request import Request, RequestSettings
from kvstore_engine.batching.settings import EngineSettings, Restoring
from kvstore_engine.executor import Executor
from kvstore_engine.executors import StepSizes
from kvstore_engine.gguf import GGUFFile
from kvstore_engine.loaded_model import fingerprint_of
from kvstore_engine.model.weights import load_model
from kvstore_engine.pool import BlockPool
from kvstore_engine.restore.record import RestorationRecord
from kvstore_engine.tokenizer import Tokenizer
from kvstore_proto.v1 import admin_pb2
from kvstore_restore.learned import LearnedCosts

RATIOS = (0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 10.0)
WAYS: tuple[Restoring, ...] = ("load", "compute", "planned")
CONTEXTS, ROUNDS = (1024, 2048, 4096), 3
TAIL_TOKENS, POOL_TOKENS = 33, 16384
BLOCK_TOKENS = 64
BESIDE = "beside"  # the request of a prompt that is restored or computed while answers are decoded


@dataclass
class Cell:
    """One ratio and context: times to first token by way, and the records of the planned ones."""

    ratio: float
    context: int
    ttft_s: dict[str, list[float]] = field(default_factory=lambda: {way: [] for way in WAYS})
    records: list[RestorationRecord] = field(default_factory=list)

    @property
    def gain(self) -> float:
        """Return the gain of the planned way over the better single one."""
        return min(median(self.ttft_s["load"]), median(self.ttft_s["compute"])) / median(self.ttft_s["planned"])

    @property
    def possible(self) -> float:
        """The same, if both went on at full speed until they met."""
        load_s, compute_s = median(self.ttft_s["load"]), median(self.ttft_s["compute"])
        return min(load_s, compute_s) * (1 / load_s + 1 / compute_s)


@dataclass(frozen=True)
class Model:
    executor: Executor
    pool: BlockPool
    tokenizer: Tokenizer
    fingerprint: Fingerprint

    def engine(
        self, session: Session | None, costs: LearnedCosts, way: Restoring, observer: Observer | None = None
    ) -> BatchEngine:
        settings = EngineSettings(restoring=way, prefix_sharing=False, swap_bytes=0, compaction=False)
        return BatchEngine(
            self.executor,
            self.tokenizer,
            settings=settings,
            sessions=None if session is None else lambda tenant: session,
            costs=costs,
            observer=observer,
        )

    def prompt(self, seed: int, context: int) -> list[int]:
        tokens = self.tokenizer.encode(prompt_text(seed, words=context), add_special=True)
        return list(tokens[: context + TAIL_TOKENS])


def measure(quick: bool) -> list[Row]:
    contexts, rounds = (CONTEXTS[:1], 2) if quick else (CONTEXTS, ROUNDS)
    with tempfile.TemporaryDirectory(prefix="kvoverlap-") as name, opened_model() as model:
        state = Path(name)
        with slowed_daemon(state, 0.0) as daemon, daemon.connect(model.fingerprint) as session:
            for context in contexts:
                store(model, session, context)
            daemon.admin("Flush", admin_pb2.FlushRequest())
        cells = []
        for context in contexts:
            for ratio in RATIOS:
                with (
                    slowed_daemon(state, ratio * chunk_s(model, context)) as daemon,
                    daemon.connect(model.fingerprint) as session,
                ):
                    cells.append(run_cell(model, daemon, session, Cell(ratio, context), rounds))
        with slowed_daemon(state, chunk_s(model, contexts[0])) as daemon, daemon.connect(model.fingerprint) as session:
            latencies = decode_latencies(model, daemon, session, contexts[0])
    return [*rows_of(cells), *latency_rows(latencies)]


@contextmanager
def opened_model() -> Iterator[Model]:
    with ExitStack() as stack:
        file = stack.enter_context(GGUFFile.open(model_path("q8_0")))
        tokenizer = Tokenizer.from_metadata(file.metadata)
        model = stack.enter_context(load_model(file))
        pool = BlockPool(model.config, POOL_TOKENS // 16)
        executor = stack.enter_context(Executor(model, pool, StepSizes(threads=THREADS, max_tokens_per_step=528)))
        fingerprint = fingerprint_of(file, model.config, tokenizer, pool, file.weights_digest())
        yield Model(executor, pool, tokenizer, fingerprint)


def store(model: Model, session: Session, context: int) -> None:
    engine = model.engine(session, LearnedCosts(), "compute")
    answer(engine, model.prompt(context, context), stores=True)
    engine.drain()
    engine.close()


def chunk_s(model: Model, context: int) -> float:
    """Seconds of computing a block of a prompt, now: other work on the machine changes it."""
    engine = model.engine(None, LearnedCosts(), "compute")
    seconds = median([answer(engine, model.prompt(context, context)) for _ in range(2)])
    engine.close()
    return seconds / (context // BLOCK_TOKENS)


def answer(engine: BatchEngine, prompt: list[int], *, stores: bool = False) -> float:
    """Seconds to the first token."""
    settings = RequestSettings(max_tokens=1, ignore_end=True, store=stores)
    engine.add(Request("asks", np.array(prompt, np.int32), settings))
    while True:
        for event in engine.step():
            if isinstance(event, Finished):
                return event.usage.ttft_s


def run_cell(model: Model, daemon: BenchDaemon, session: Session, cell: Cell, rounds: int) -> Cell:
    costs, prompt = LearnedCosts(), model.prompt(cell.context, cell.context)
    engines = {way: model.engine(session, costs, way) for way in WAYS}
    for turn in range(rounds + 1):  # the first teaches the costs
        for way in WAYS:
            daemon.drop_host()
            ttft_s = answer(engines[way], prompt)
            if turn:
                cell.ttft_s[way].append(ttft_s)
                if way == "planned":
                    cell.records += engines[way].restorations.last(1)
    for engine in engines.values():
        engine.close()
    found = cell.records[-1]
    shown = " ".join(f"{way} {median(times) * 1e3:.0f} ms ±{spread(times):.0%}" for way, times in cell.ttft_s.items())
    progress(
        f"{cell.context} tokens, ratio {cell.ratio:g}: {shown}; gain {cell.gain:.2f}x of {cell.possible:.2f}x; "
        f"{found.plan}: {found.loaded} loaded, {found.computed} computed, {found.lost} lost, {found.wasted} wasted; "
        f"predicted {found.predicted_s:.2f} s, took {found.actual_s or 0:.2f} s"
    )
    return cell


def rows_of(cells: list[Cell]) -> list[Row]:
    middle = [cell for cell in cells if 0.5 <= cell.ratio <= 2]
    wide = [cell for cell in cells if 0.25 <= cell.ratio <= 4]
    records = [record for cell in cells for record in cell.records if record.actual_s]
    errors = [abs(record.predicted_s / (record.actual_s or 1) - 1) for record in records]
    busy = [
        max(record.load_busy_s, record.compute_busy_s) / (record.actual_s or 1)
        for cell in middle
        for record in cell.records
        if record.actual_s and record.plan == "tokens"
    ]
    rows = [
        Row(f"gain_{cell.context}_ratio_{cell.ratio:g}", cell.gain, "x", 1.0, "better single path",
            possible=cell.possible, possible_name="both at full speed")
        for cell in cells
    ]  # fmt: skip
    spreads = [spread(times) for cell in cells for times in cell.ttft_s.values()]
    turns = [abs(now / before - 1) for cell in cells for before, now in pairwise(cell.ttft_s["compute"])]
    return [
        *rows,
        Row("least_gain_0.5_to_2", min(cell.gain for cell in middle), "x", 1.0, "single", AT_LEAST, 1.5),
        Row("mean_gain_0.25_to_4", sum(cell.gain for cell in wide) / len(wide), "x", 1.0, "single", AT_LEAST, 1.3),
        Row("least_gain", min(cell.gain for cell in cells), "x", 1.0, "single", AT_LEAST, 0.97),
        within("prediction_error_p90", percentile(errors, 90) if errors else 1.0, "of the time", 0.1),
        within("computing_differs_p90", percentile(turns, 90), "from the turn before", 0.1),
        Row("busy_0.5_to_2", median(busy) if busy else 0.0, "", 1.0, "all of the time", AT_LEAST, 0.85),
        within("spread_median", median(spreads), "of the median", 1.0),
    ]


class _Gaps(Observer):
    """Seconds between two tokens of each answer; a prompt beside them has one token, and no gap."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._last: dict[str, float] = {}

    def token(self, request_id: str, index: int, t: float) -> None:
        if request_id == BESIDE:
            return
        if request_id in self._last:
            self.seconds.append(t - self._last[request_id])
        self._last[request_id] = t


def decode_latencies(model: Model, daemon: BenchDaemon, session: Session, context: int) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {"alone": [], "compute": [], "planned": []}
    costs = LearnedCosts()
    for _ in range(2):
        for what in found:
            daemon.drop_host()
            gaps = _Gaps()
            engine = model.engine(session, costs, "planned" if what == "planned" else "compute", gaps)
            decode_beside(engine, model, context, others=what != "alone")
            found[what] += gaps.seconds
            engine.close()
    return found


def decode_beside(engine: BatchEngine, model: Model, context: int, *, others: bool) -> None:
    """160 tokens of four answers; `others`: a prompt is restored again and again meanwhile."""
    settings = RequestSettings(max_tokens=160, ignore_end=True, store=False)
    for number in range(4):
        engine.add(Request(str(number), np.array(model.prompt(number, 64), np.int32), settings))
    prompt, once = np.array(model.prompt(context, context), np.int32), RequestSettings(max_tokens=1, store=False)
    left, is_under_way = 4, False
    while left:
        if others and not is_under_way:
            engine.add(Request(BESIDE, prompt, once))
            is_under_way = True
        for event in engine.step():
            if isinstance(event, Finished):
                is_other = event.request_id == BESIDE
                is_under_way, left = is_under_way and not is_other, left - (not is_other)
    engine.cancel(BESIDE)
    engine.drain()


def latency_rows(found: dict[str, list[float]]) -> list[Row]:
    p99 = {what: percentile(seconds, 99) * 1e3 for what, seconds in found.items()}
    return [
        Row("decode_p99_beside_restoring", p99["planned"], "ms", p99["compute"], "beside computing", target=1.2),
        Row("decode_p99_beside_restoring_alone", p99["planned"], "ms", p99["alone"], "without other prompts"),
    ]


def spread(values: list[float]) -> float:
    return (max(values) - min(values)) / median(values)


if __name__ == "__main__":
    sys.exit(main(measure, __doc__))
