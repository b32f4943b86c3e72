"""The batch engine over the twin model, with sessions in memory that hold what it stores."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

from kvstore_engine.batching.engine import BatchEngine
from kvstore_engine.batching.observer import Observer
from kvstore_engine.batching.settings import EngineSettings
from kvstore_engine.restore.record import RestoreReport
from kvstore_engine.restore.session import KvSession
from kvstore_restore.learned import LearnedCosts
from tests.reference.assumed_costs import assume
from tests.reference.batch_runs import Outcome, request, run
from tests.reference.block_invariants import check_blocks
from tests.reference.memory_session import MemorySession
from tests.reference.twin_compute import StepClock, TwinCompute, TwinTokenizer, answer_alone, twin_pool


def prompt_of(seed: int, count: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 64, count).tolist()


def new_session(**changes: Any) -> MemorySession:
    return MemorySession(twin_pool(4).payload_bytes(4), **changes)


def engine_with(
    *sessions: KvSession, blocks: int = 256, observer: Observer | None = None, **settings: Any
) -> BatchEngine:
    """An engine whose tenants "", "1"... have the given sessions, and for which computing looks slow."""
    clock = StepClock()
    compute = TwinCompute(twin_pool(blocks), on_step=clock.step)
    costs = LearnedCosts()
    assume(costs)
    names = {str(index) if index else "": session for index, session in enumerate(sessions)}
    return BatchEngine(
        compute,
        TwinTokenizer(),
        settings=EngineSettings(**settings),
        sessions=names.get,
        costs=costs,
        observer=observer,
        clock=clock,
    )


class Reports(Observer):
    """The reports of an engine about the store."""

    def __init__(self) -> None:
        self.restored_from: list[RestoreReport] = []
        self.not_stored: list[str] = []

    def store_answered(self, request_id: str, index: int, report: RestoreReport, t: float) -> None:
        self.restored_from.append(report)

    def stored(self, request_id: str, index: int, tokens: int, reason: str, begin_s: float, end_s: float) -> None:
        self.not_stored += [reason] if reason else []


def report_of(session: MemorySession, prompt: list[int]) -> RestoreReport:
    """Return the report of an engine that knows nothing of the prompt, but what the session has."""
    reports = Reports()
    engine = engine_with(session, observer=reports)
    engine.add(request("asks", prompt, 2, store=False))
    assert run(engine).tokens["asks", 0] == answer_alone(prompt, 2)
    close_stored(engine)
    assert all(lease.released for lease in session.leases)
    (report,) = reports.restored_from
    return report


def compute_and_store(session: MemorySession, prompt: list[int]) -> None:
    """Let an engine compute the prompt and store its blocks."""
    engine = engine_with(session)
    engine.add(request("stores", prompt, 2))
    run(engine)
    close_stored(engine)


def session_holding(prompt: list[int]) -> MemorySession:
    """A session that holds the prompt's blocks."""
    session = new_session()
    compute_and_store(session, prompt)
    session.leases.clear()
    return session


def close_stored(engine: BatchEngine) -> None:
    """Wait until all that was offered is stored."""
    engine.close()
    check_blocks(engine.space, [])


def usages_of(outcome: Outcome) -> list[Any]:
    return [finished.usage for finished in outcome.finished.values()]


class HeldSession:
    """A session whose answers wait for events: `answered` for lookups, `promoted` for streams, `stored` for puts."""

    block_tokens, state = 64, "connected"

    def __init__(self, inner: MemorySession) -> None:
        self.inner = inner
        self.answered, self.promoted, self.stored = threading.Event(), threading.Event(), threading.Event()
        self.is_promoting = False
        self.answered.set()
        self.stored.set()

    def get(self, tokens: Any, **options: Any) -> Any:
        assert self.answered.wait(60)
        return self.inner.get(tokens, **options)

    def lookup(self, tokens: Any, **options: Any) -> Any:
        return self.inner.lookup(tokens, **options)

    def get_stream(self, tokens: Any, **options: Any) -> Any:
        self.is_promoting = True
        assert self.promoted.wait(60)
        return self.inner.get_stream(tokens, **options)

    def put(self, tokens: Any, *, first_block: int, payloads: Any) -> Any:
        assert self.stored.wait(60)
        return self.inner.put(tokens, first_block=first_block, payloads=payloads)

    def hint(self, tokens: Any, **expected: Any) -> int:
        return self.inner.hint(tokens, **expected)

    def ping(self) -> float | None:
        return 0.0

    def wake(self) -> None:
        return None

    def close(self) -> None:
        return None
