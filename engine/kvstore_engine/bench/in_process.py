"""An engine in this process, built for a measurement and driven with a load, without HTTP or another process.

The module owns the lifetime of the model, the pool, the executor and the engine; it feeds requests and notes times. The
pool has the requested size, not the largest that the machine allows: its size is part of the measurement. One thread:
requests are added between steps, as in the engine's own server.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from kvstore_engine.batching.engine import BatchEngine
from kvstore_engine.batching.events import Finished, Token
from kvstore_engine.batching.intake import Overloaded
from kvstore_engine.batching.observer import Observer
from kvstore_engine.batching.request import Request, RequestSettings
from kvstore_engine.batching.settings import EngineSettings
from kvstore_engine.bench.summary import BenchmarkRun, RequestOutcome
from kvstore_engine.bench.workload import Arrivals, BenchRequest, ClosedLoop, Workload
from kvstore_engine.devices import CPU
from kvstore_engine.errors import UsageError
from kvstore_engine.executors import DeviceName, PoolSetup, StepSizes
from kvstore_engine.gguf import GGUFFile
from kvstore_engine.opening import open_executor
from kvstore_engine.restore.fingerprint import STORAGE_BLOCK_TOKENS
from kvstore_engine.threads import default_threads
from kvstore_engine.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class BenchEngine:
    """The settings of an engine that is to be measured. `pool_tokens` is the size of the K/V pool in tokens; None has
    room for `sequences` sequences of `context` tokens.
    """

    model: Path
    context: int
    sequences: int = 16
    threads: int | None = None
    block_tokens: int = 16
    kv_dtype: str = "f16"
    pool_tokens: int | None = None
    settings: EngineSettings = field(default_factory=EngineSettings)
    device: str = CPU


@contextlib.contextmanager
def opened(wanted: BenchEngine, observer: Observer | None = None) -> Iterator[BatchEngine]:
    """Open an engine with the settings `wanted` for the time of a `with` block. Raises UsageError or OperationError if
    the model cannot be loaded.
    """
    from kvstore_engine.model.config import ModelConfig

    with contextlib.ExitStack() as stack:
        file = stack.enter_context(GGUFFile.open(wanted.model))
        tokenizer = Tokenizer.from_metadata(file.metadata)
        most = ModelConfig.from_gguf(file).context_length
        if wanted.context > most:
            raise UsageError(
                f"this load needs a context of {wanted.context} tokens, the model was trained for "
                f"{most}: ask for shorter prompts or answers"
            )
        pool = PoolSetup(_blocks(wanted), wanted.block_tokens, wanted.kv_dtype)
        threads = wanted.threads or default_threads()
        sizes = StepSizes(threads, 512 + wanted.sequences, wanted.sequences, wanted.context)
        executor = stack.enter_context(open_executor(file, DeviceName.parse(wanted.device), pool, sizes))
        engine = BatchEngine(executor, tokenizer, settings=wanted.settings, observer=observer)
        stack.callback(engine.close)
        yield engine


def _blocks(wanted: BenchEngine) -> int:
    tokens = wanted.pool_tokens or wanted.sequences * wanted.context
    step = max(STORAGE_BLOCK_TOKENS, wanted.block_tokens)
    whole = -(-max(tokens, wanted.context) // step) * step
    return whole // wanted.block_tokens


@dataclass(slots=True)
class _Feeding:
    """The requests still to send, each with the time when it is due (None: as soon as a client is free)."""

    left: deque[tuple[float | None, BenchRequest]]
    clients: int | None
    running: dict[str, RequestOutcome] = field(default_factory=dict)

    def due(self, now_s: float) -> bool:
        if not self.left or (self.clients is not None and len(self.running) >= self.clients):
            return False
        at = self.left[0][0]
        return at is None or at <= now_s


class EndsAfter:
    """A constraint for measurements that allows every token and ends the answer after `tokens` tokens. The scheduler
    cannot know that length beforehand.
    """

    def __init__(self, tokens: int) -> None:
        self._left = tokens

    @property
    def finished(self) -> bool:
        return self._left <= 0

    def mask(self) -> None:
        return None

    def accept(self, token: int) -> None:
        self._left -= 1


def run_in_process(
    engine: BatchEngine,
    workload: Workload,
    arrivals: Arrivals,
    *,
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
) -> BenchmarkRun:
    """Send the requests of `workload` to `engine` at the times that `arrivals` gives, wait for all answers, and return
    the outcome of each request with its times.
    """
    if isinstance(arrivals, ClosedLoop):
        feeding = _Feeding(deque((None, request) for request in workload.requests), arrivals.concurrency)
    else:
        due = arrivals.due_s(len(workload.requests))
        feeding = _Feeding(deque(zip(due, workload.requests, strict=True)), None)
    outcomes: list[RequestOutcome] = []
    begin = clock()
    while feeding.left or feeding.running:
        while feeding.due(now := clock() - begin):
            if not _send(engine, feeding, outcomes, now):
                break
        if not engine.has_work:
            if feeding.left and (at := feeding.left[0][0]) is not None:
                sleep(max(0.0, at - (clock() - begin)))
            continue
        events = engine.step()
        now = clock() - begin
        for event in events:
            outcome = feeding.running.get(event.request_id)
            if outcome is None:
                continue
            if isinstance(event, Token):
                outcome.token_s.append(now)
            elif isinstance(event, Finished):
                _finish(outcome, event, now)
                del feeding.running[event.request_id]
    return BenchmarkRun(outcomes, clock() - begin)


def _send(engine: BatchEngine, feeding: _Feeding, outcomes: list[RequestOutcome], now_s: float) -> bool:
    """Send requests that are due; return False if the engine wants no more for now: the request stays in place, and its
    wait counts.
    """
    at, request = feeding.left[0]
    outcome = RequestOutcome(request.id, request.kind, now_s if at is None else at, len(request.tokens))
    settings = RequestSettings(
        max_tokens=request.limit or request.max_tokens,
        ignore_end=True,
        constraint=(lambda: EndsAfter(request.max_tokens)) if request.limit else None,
    )
    try:
        engine.add(Request(request.id, request.tokens, settings))
    except Overloaded as error:
        if engine.has_work:
            return False
        outcome.message = str(error)
    except UsageError as error:
        outcome.message = str(error)
    feeding.left.popleft()
    outcomes.append(outcome)
    if not outcome.message:
        feeding.running[request.id] = outcome
    return True


def _finish(outcome: RequestOutcome, event: Finished, now_s: float) -> None:
    usage = event.usage
    outcome.end_s, outcome.generated = now_s, usage.generated_tokens
    outcome.queued_s = usage.queued_s
    outcome.reused_tokens = usage.local_tokens + usage.daemon_tokens
    if event.reason in ("failed", "cancelled"):
        outcome.message = event.message or event.reason
