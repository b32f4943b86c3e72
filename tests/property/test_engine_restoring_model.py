"""Restoring by computing and loading at once: right whatever becomes of the loads, and never slower than it must be.

Time is the twin's: steps and arrivals move it, nothing else does.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore_engine.batching.engine import BatchEngine
from kvstore_engine.batching.settings import EngineSettings, Restoring
from kvstore_restore.learned import LearnedCosts
from tests.reference.assumed_costs import assume
from tests.reference.batch_runs import Outcome, check, request, run
from tests.reference.block_invariants import check_blocks
from tests.reference.clocked_fetcher import ClockedFetcher, Fault
from tests.reference.examples import examples
from tests.reference.late_copies import LateCopies
from tests.reference.memory_session import MemorySession
from tests.reference.twin_compute import StepClock, TwinCompute, TwinTokenizer, answer_alone, twin_pool

_FIXED_S, _ROW_S = 0.004, 0.001  # a step of the twin
_CHUNK_S = 64 * _ROW_S + _FIXED_S


def _prompt(seed: int, count: int) -> list[int]:
    tokens: list[int] = np.random.default_rng(seed).integers(0, 64, count).tolist()
    return tokens


def _engine(
    session: MemorySession,
    fetcher: ClockedFetcher | None,
    clock: StepClock,
    restoring: Restoring = "planned",
    blocks: int = 400,
    lost: Collection[int] | None = None,
) -> BatchEngine:
    """`lost`: steps compute behind blocks that are coming (`LateCopies`), and these loads are lost."""
    compute = TwinCompute(twin_pool(blocks), on_step=clock.step)
    copies = None if lost is None else LateCopies(compute.pool, lost)
    if copies is not None:
        compute.on_step = lambda slices: (copies.arrive(), clock.step(slices))[1]
    costs = LearnedCosts()
    assume(costs, [_FIXED_S, 512 * _ROW_S, 512 * 1024 * 1e-7], learns=True)
    engine = BatchEngine(
        compute,
        TwinTokenizer(),
        settings=EngineSettings(restoring=restoring, max_queue_s=1e9),
        sessions=lambda tenant: session,
        copies=copies,
        costs=costs,
        clock=clock,
    )
    if fetcher is not None:
        engine.restorer.fetcher = fetcher  # type: ignore[assignment]
    return engine


def _holding(*prompts: list[int]) -> MemorySession:
    session = MemorySession(twin_pool(4).payload_bytes(4))
    engine = _engine(session, None, StepClock())
    for number, prompt in enumerate(prompts):
        engine.add(request(str(number), prompt, 2))
    run(engine)
    engine.close()
    return session


@settings(max_examples=examples(60))
@given(
    lengths=st.lists(st.integers(65, 1100), min_size=1, max_size=3),
    mapped=st.integers(0, 6) | st.just(17),
    slower=st.sampled_from([0.01, 0.1, 0.5, 1.0, 2.0, 10.0, 100.0]),
    faults=st.dictionaries(st.integers(0, 17), st.sampled_from(["vanish", "stall", "lease ends"]), max_size=4),
    dies_s=st.sampled_from([float("inf"), float("inf"), 0.0, 0.1, 0.5]),
    events=st.dictionaries(st.integers(1, 30), st.sampled_from(["cancel", "preempt"]), max_size=3),
    restoring=st.sampled_from(["planned", "planned", "load"]),
    lost=st.none() | st.sets(st.integers(0, 4), max_size=2),
)
def test_every_answer_is_right_whatever_becomes_of_the_loads(
    lengths: list[int],
    mapped: int,
    slower: float,
    faults: dict[int, Fault],
    dies_s: float,
    events: dict[int, str],
    restoring: Restoring,
    lost: set[int] | None,
) -> None:
    prompts = [_prompt(seed, length) for seed, length in enumerate(lengths)]
    session, clock = _holding(*prompts), StepClock(_FIXED_S, _ROW_S)
    session.leases.clear()
    session.mapped_blocks = mapped
    fetcher = ClockedFetcher(clock, slower * _CHUNK_S, faults, dies_s)
    engine = _engine(session, fetcher, clock, restoring, blocks=260, lost=lost)
    outcome = Outcome()
    engine.add(request("beside", _prompt(99, 30), 60, store=False))
    for number, prompt in enumerate(prompts):
        engine.add(request(str(number), prompt, 4, store=False))
    for step in range(31):
        outcome.take(engine.step())
        match events.get(step):
            case "cancel":
                engine.cancel("0")
            case "preempt":
                if engine.running:
                    engine.scheduler.run_queue.make_room(engine.scheduler.run_queue.running[-1])
        check(engine)
    run(engine, outcome)
    for number, prompt in enumerate(prompts):
        finished = outcome.finished[str(number), 0]
        expected = answer_alone(prompt, 4)
        if finished.reason == "cancelled":
            assert outcome.tokens[str(number), 0] == expected[: len(outcome.tokens[str(number), 0])]
            continue
        assert outcome.tokens[str(number), 0] == expected
        usage = finished.usage
        assert usage.local_tokens + usage.daemon_tokens + usage.computed_tokens == len(prompt)
    assert outcome.tokens["beside", 0] == answer_alone(_prompt(99, 30), 60)
    assert not engine.restorer.is_busy and not engine.restorer.is_loading
    engine.close()
    check_blocks(engine.space, [])
    assert not fetcher.open and all(lease.released for lease in session.leases)


def test_a_tail_that_was_loaded_counts_though_a_step_ends_the_restoration() -> None:
    """Blocks 11 to 4 come, then nothing does: steps compute the first four, and no more than those."""
    prompt = _prompt(1, 64 * 12 + 20)
    session, clock = _holding(prompt), StepClock(_FIXED_S, _ROW_S)
    session.mapped_blocks = 0
    fetcher = ClockedFetcher(clock, 0.01 * _CHUNK_S, {3: "stall"})
    engine = _engine(session, fetcher, clock, "load")
    engine.add(request("asks", prompt, 1, store=False))
    usage = run(engine).finished["asks", 0].usage
    engine.close()
    assert (usage.daemon_tokens, usage.computed_tokens) == (8 * 64, 4 * 64 + 20)


def _ttft_s(prompt: list[int], slower: float, restoring: Restoring) -> tuple[float, BatchEngine]:
    session, clock = _holding(prompt), StepClock(_FIXED_S, _ROW_S)
    session.mapped_blocks = 0
    engine = _engine(session, ClockedFetcher(clock, slower * _CHUNK_S), clock, restoring)
    engine.add(request("asks", prompt, 1, store=False))
    outcome = run(engine)
    engine.close()
    assert outcome.tokens["asks", 0] == answer_alone(prompt, 1)
    return outcome.finished["asks", 0].usage.ttft_s, engine


@pytest.mark.slow
@pytest.mark.parametrize(
    ("slower", "least"), [(0.1, 1.0), (0.25, 1.1), (0.5, 1.3), (1.0, 1.7), (2.0, 1.3), (4.0, 1.1), (10.0, 0.97)]
)
def test_both_at_once_are_faster_than_the_better_one(slower: float, least: float) -> None:
    prompt = _prompt(1, 64 * 24 + 30)
    single_s = min(_ttft_s(prompt, slower, way)[0] for way in ("load", "compute"))
    both_s, engine = _ttft_s(prompt, slower, "planned")
    assert single_s / both_s >= least
    (record,) = engine.restorations.last(9)
    if record.actual_s is not None:
        assert record.actual_s == pytest.approx(record.predicted_s, rel=0.1)
        assert record.loaded + record.computed == record.chunks == 24 and not record.lost
        assert max(record.load_busy_s, record.compute_busy_s) > 0.85 * record.actual_s


def test_a_record_says_who_did_what_and_when() -> None:
    _, engine = _ttft_s(_prompt(1, 64 * 12 + 30), 1.0, "planned")
    (record,) = engine.restorations.last(1)
    computed = [work for work in record.work if work.kind == "compute"]
    loaded = [work for work in record.work if work.kind == "load"]
    assert [work.first for work in computed] == sorted(work.first for work in computed)
    assert [work.first for work in loaded] == sorted((work.first for work in loaded), reverse=True)
    assert sum(work.tokens for work in loaded) >= 64 * record.loaded
    shown = record.as_json()
    assert shown["plan"] == "tokens" and shown["tiers"] == {"nvme": 12}
    assert shown["load_idle_s"] == pytest.approx((record.actual_s or 0) - record.load_busy_s)
    totals = engine.restorations.totals
    assert totals.by_plan["tokens"] == 1 and totals.chunks["loaded"] == record.loaded
    assert engine.restorations.last(0) == []
