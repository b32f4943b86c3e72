"""Steps that compute behind blocks which are still coming: they count only if the blocks have come."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import pytest

from kvstore_engine.batching.engine import BatchEngine
from kvstore_engine.batching.settings import EngineSettings
from kvstore_restore.learned import MAPPED, LearnedCosts
from tests.reference.assumed_costs import assume
from tests.reference.batch_runs import Outcome, check, request, run
from tests.reference.block_invariants import check_blocks
from tests.reference.late_copies import LateCopies
from tests.reference.memory_session import MemorySession
from tests.reference.twin_compute import StepClock, TwinCompute, TwinTokenizer, answer_alone, twin_pool


def _prompt(count: int, seed: int = 1) -> list[int]:
    tokens: list[int] = np.random.default_rng(seed).integers(0, 64, count).tolist()
    return tokens


def _engine(session: MemorySession, lost: Collection[int] = ()) -> tuple[BatchEngine, TwinCompute, LateCopies]:
    compute, clock = TwinCompute(twin_pool(256)), StepClock()
    copies = LateCopies(compute.pool, lost)
    compute.on_step = lambda slices: (copies.arrive(), clock.step(slices))[1]
    costs = LearnedCosts()
    assume(costs)  # computing looks slow: restore all that is stored
    engine = BatchEngine(
        compute,
        TwinTokenizer(),
        settings=EngineSettings(max_queue_s=1e9),
        sessions=lambda tenant: session,
        copies=copies,
        costs=costs,
    )
    return engine, compute, copies


@pytest.fixture
def session() -> MemorySession:
    """Holds two prompts of three blocks."""
    held = MemorySession(twin_pool(4).payload_bytes(4))
    engine, _, _ = _engine(held)
    for seed in (1, 2):
        engine.add(request(str(seed), _prompt(200, seed), 2))
    run(engine)
    engine.close()
    held.leases.clear()
    return held


def test_the_step_behind_arriving_blocks_computes_the_tail_alone(session: MemorySession) -> None:
    engine, compute, copies = _engine(session)
    before = engine.costs.steps.count
    engine.add(request("asks", _prompt(200), 4, store=False))
    outcome = run(engine)
    assert (compute.steps, engine.costs.steps.count - before) == (4, 3), "one waited for copies: nothing is learned"
    assert outcome.tokens["asks", 0] == answer_alone(_prompt(200), 4)
    usage = outcome.finished["asks", 0].usage
    assert (usage.daemon_tokens, usage.computed_tokens, compute.computed_tokens) == (192, 8, 8 + 3)
    (record,) = engine.restorations.last(9)
    assert (record.mapped, len(copies.loads)) == (3, 1)
    assert engine.costs.load_s(MAPPED, 3 * session.block_bytes) == pytest.approx(0.25, rel=0.5), "the copies' own time"
    engine.close()
    assert all(lease.released for lease in session.leases)


def test_a_step_behind_blocks_that_are_lost_has_no_effect(session: MemorySession) -> None:
    engine, _, _ = _engine(session, lost=[0])
    engine.add(request("beside", _prompt(30, 9), 12, store=False))
    outcome = Outcome()
    for _ in range(3):
        outcome.take(engine.step())
    engine.add(request("asks", _prompt(200), 4, store=False))
    run(engine, outcome)
    assert outcome.tokens["asks", 0] == answer_alone(_prompt(200), 4)
    assert outcome.tokens["beside", 0] == answer_alone(_prompt(30, 9), 12)
    usage = outcome.finished["asks", 0].usage
    assert (usage.daemon_tokens, usage.computed_tokens) == (0, 200)
    (lost,) = [record for record in engine.restorations.last(9) if record.request_id == "asks"]
    assert (lost.mapped, lost.reason) == (0, "0 of 3 planned blocks could be restored")
    engine.close()
    check_blocks(engine.space, [])


def test_a_lease_that_ends_while_its_blocks_come_counts_as_lost(session: MemorySession) -> None:
    session.leases_stay_valid = False
    engine, _, copies = _engine(session)
    engine.add(request("asks", _prompt(200), 4, store=False))
    outcome = run(engine)
    assert outcome.tokens["asks", 0] == answer_alone(_prompt(200), 4)
    assert outcome.finished["asks", 0].usage.daemon_tokens == 0 and len(copies.loads) == 1
    engine.close()


def test_one_of_two_that_come_may_be_lost(session: MemorySession) -> None:
    engine, _, copies = _engine(session, lost=[1])
    for seed in (1, 2):
        engine.add(request(str(seed), _prompt(200, seed), 4, store=False))
    outcome = run(engine)
    for seed in (1, 2):
        assert outcome.tokens[str(seed), 0] == answer_alone(_prompt(200, seed), 4)
    restored = sorted(outcome.finished[str(seed), 0].usage.daemon_tokens for seed in (1, 2))
    assert (restored, len(copies.loads)) == ([0, 192], 2)
    engine.close()
    check_blocks(engine.space, [])


def test_blocks_are_not_free_before_the_copies_into_them_have_ended(session: MemorySession) -> None:
    """A step that fails keeps its loads under way: the end of their sequence waits for them."""
    engine, compute, copies = _engine(session)

    def fails(slices: object) -> None:
        raise MemoryError("of this step")

    engine.add(request("asks", _prompt(200), 4, store=False))
    arrives, compute.on_step = compute.on_step, fails
    with pytest.raises(MemoryError):
        run(engine)
    (load,) = copies.loads
    assert not load.has_come and engine.restorer.is_busy
    engine.cancel("asks")
    assert load.has_come and not engine.restorer.is_busy
    check(engine)
    compute.on_step = arrives
    engine.add(request("again", _prompt(200), 4, store=False))
    assert run(engine).tokens["again", 0] == answer_alone(_prompt(200), 4)
    engine.close()


def test_copies_hear_before_each_step_whether_it_continues_answers(session: MemorySession) -> None:
    engine, _, copies = _engine(session)
    engine.add(request("asks", _prompt(200, 3), 4, store=False))
    run(engine)
    first = copies.decodes.index(True)
    assert first and not any(copies.decodes[:first]), "while the prompt is computed"
    assert copies.decodes[first:] == [True, True, True, False], "the last answer has ended, and nothing decodes"
    engine.add(request("ends", _prompt(200, 4), 4, store=False))
    while not copies.decodes[-1]:
        engine.step()
    engine.close()
    assert not copies.decodes[-1], "what is still stored is waited for"
