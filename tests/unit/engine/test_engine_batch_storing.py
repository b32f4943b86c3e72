"""Storing for several sequences at a time, with a daemon in memory that can misbehave."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.reference.batch_runs import Outcome, request, run
from tests.reference.stored_batches import (
    HeldSession,
    Reports,
    close_stored,
    engine_with,
    new_session,
    prompt_of,
    usages_of,
)
from tests.reference.twin_compute import answer_alone


def test_tenants_have_sessions_of_their_own() -> None:
    sessions = [new_session(), new_session()]
    engine = engine_with(*sessions)
    prompt = prompt_of(1, 200)
    engine.add(request("nameless", prompt, 4))
    engine.add(request("one", prompt, 4, tenant="1"))
    engine.add(request("none", prompt, 4, tenant="2"))
    outcome = run(engine)
    close_stored(engine)
    assert [len(session.blocks) for session in sessions] == [3, 3]
    assert {usage.daemon_tokens + usage.local_tokens for usage in usages_of(outcome)} == {0}


def test_requests_that_do_not_store_do_not() -> None:
    session = new_session()
    engine = engine_with(session)
    engine.add(request("secret", prompt_of(1, 200), 4, store=False))
    run(engine)
    close_stored(engine)
    assert not session.puts


@pytest.mark.parametrize("status", ["throttled", "failed"])
def test_blocks_after_a_gap_are_not_stored(status: str) -> None:
    session = new_session(status_of=lambda block: status if block >= 1 else "stored")
    engine = engine_with(session)
    engine.add(request("long", prompt_of(1, 640), 40))
    outcome = run(engine)
    assert outcome.tokens["long", 0] == answer_alone(prompt_of(1, 640), 40)
    close_stored(engine)
    assert len(session.blocks) == 1


@pytest.mark.parametrize("fails", [False, True])
def test_why_blocks_were_not_stored_is_reported(fails: bool) -> None:
    reports, prompt = Reports(), prompt_of(1, 640)
    session = new_session(status_of=lambda block: "throttled" if block == 1 else "stored")
    engine = engine_with(session, observer=reports)
    engine.add(request("long", prompt, 4))
    if fails:
        engine.step()
        session.fail_with = ConnectionResetError("gone")
    run(engine)
    close_stored(engine)
    assert ("ConnectionResetError: gone" if fails else "block 1 was throttled") in reports.not_stored[0]


def test_what_led_to_a_failure_is_not_stored() -> None:
    session = new_session()
    engine = engine_with(session)
    forward = engine.compute.forward

    def broken(slices: Any) -> Any:
        logits = forward(slices)
        logits[:] = np.nan
        return logits

    engine.compute.forward = broken  # type: ignore[method-assign]
    engine.add(request("broken", prompt_of(1, 200), 4))
    assert run(engine).finished["broken", 0].reason == "failed"
    close_stored(engine)
    assert not session.blocks


def test_a_daemon_that_dies_costs_nothing_but_its_savings() -> None:
    session = new_session()
    engine = engine_with(session, blocks=24)
    outcome = Outcome()
    prompts = {str(n): prompt_of(n, 70 + n) for n in range(30)}
    for name, prompt in prompts.items():
        engine.add(request(name, prompt, 40))
    for _ in range(120):
        outcome.take(engine.step())
    session.fail_with = ConnectionResetError("gone")
    for _ in range(60):
        outcome.take(engine.step())
    session.state = "degraded"
    run(engine, outcome)
    for name, prompt in prompts.items():
        assert outcome.tokens[name, 0] == answer_alone(prompt, 40)
    close_stored(engine)


def test_a_daemon_that_hangs_on_a_put_stops_no_answer() -> None:
    session = HeldSession(new_session())
    session.stored.clear()
    engine = engine_with(session)
    for n in range(4):
        engine.add(request(str(n), prompt_of(n, 200), 100))
    outcome = run(engine)
    for n in range(4):
        assert outcome.tokens[str(n), 0] == answer_alone(prompt_of(n, 200), 100)
    assert engine.storer.outstanding > 0
    session.stored.set()
    close_stored(engine)
    assert len(session.inner.blocks) == 4 * (299 // 64)


def test_blocks_on_their_way_to_the_daemon_are_not_used_for_anything_else() -> None:
    session = HeldSession(new_session())
    session.stored.clear()
    engine = engine_with(session, blocks=32)
    engine.add(request("first", prompt_of(1, 200), 2))
    outcome = run(engine)
    for n in range(10):
        engine.add(request(str(n), prompt_of(100 + n, 200), 2, store=False))
        run(engine, outcome)
    session.stored.set()
    close_stored(engine)
    warm = engine_with(session.inner)
    warm.add(request("first", prompt_of(1, 200), 8))
    second = run(warm)
    assert second.finished["first", 0].usage.daemon_tokens == 192
    assert second.tokens["first", 0] == answer_alone(prompt_of(1, 200), 8)
    close_stored(warm)
