"""Hints of the batch engine to the daemon: what answers end with, what may follow, and what waits."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from tests.reference.batch_runs import Outcome, request, run
from tests.reference.stored_batches import close_stored, engine_with, new_session, prompt_of
from tests.reference.twin_compute import answer_alone, text_of


def test_the_end_of_an_answer_is_hinted_when_its_blocks_are_stored() -> None:
    session = new_session()
    engine = engine_with(session)
    for n in range(4):  # the last step of each fills a block
        engine.add(request(str(n), prompt_of(n, 100), 29 + 64 * n))
    run(engine)
    close_stored(engine)
    assert sorted(session.answer_hints) == [(2 + n, 29 + 64 * n) for n in range(4)]


def test_a_prompt_has_one_answer_hint_and_none_for_what_is_not_stored_or_not_whole() -> None:
    session = new_session()
    engine = engine_with(session)
    engine.add(request("three", prompt_of(1, 100), 9, n=3))
    engine.add(request("silent", prompt_of(3, 100), 9, store=False))
    engine.add(request("short", prompt_of(4, 20), 9))
    engine.add(request("cancelled", prompt_of(5, 100), 9))
    outcome = Outcome()
    while not outcome.tokens["cancelled", 0]:
        outcome.take(engine.step())
    engine.cancel("cancelled")
    run(engine, outcome)
    close_stored(engine)
    assert session.answer_hints == [(1, 9)]


def test_what_follows_an_answer_is_hinted_once_and_only_if_it_ended_by_itself() -> None:
    session = new_session()
    engine = engine_with(session)
    seen: list[int] = []

    def next_step(answer: Any) -> Any:
        seen.append(len(answer))
        return "tool_call"

    engine.add(request("cut", prompt_of(1, 100), 9, next_step=next_step))
    run(engine)
    stop = text_of(answer_alone(prompt_of(2, 100), 9))
    engine.add(request("stopped", prompt_of(2, 100), 99, next_step=next_step, stop=(stop,)))
    run(engine)
    close_stored(engine)
    assert (session.next_steps, seen) == ([None, "tool_call"], [9])


def test_a_request_that_has_to_wait_is_hinted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore_engine.batching.engine._LEAST_HINT_S", 1e-9)  # the twin answers quickly
    session = new_session()
    engine = engine_with(session, max_running=1, max_queue_s=1e9)
    engine.add(request("alone", prompt_of(0, 100), 20))
    run(engine)
    assert not session.due, "it could begin at once"
    for n in range(1, 4):
        engine.add(request(str(n), prompt_of(n, 100 + 64 * n), 20))
        engine.step()
    engine.add(request("short", prompt_of(9, 30), 20))
    engine.add(request("gone", prompt_of(8, 300), 20))
    engine.cancel("gone")
    run(engine)
    close_stored(engine)
    assert [blocks for blocks, _ in session.due] == [3, 4], "the first had no need to, and the last has no whole block"
    assert 0 < session.due[0][1] < session.due[1][1]


def test_a_request_that_waits_for_blocks_is_hinted_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore_engine.batching.engine._LEAST_HINT_S", 1e-9)
    session = new_session()
    engine = engine_with(session, blocks=30, max_queue_s=1e9)
    engine.add(request("first", prompt_of(0, 100), 20))
    run(engine)
    for n in range(1, 4):
        engine.add(request(str(n), prompt_of(n, 320), 60))
    assert engine.scheduler.run_queue.free_places > 3
    run(engine)
    close_stored(engine)
    assert session.due and {blocks for blocks, _ in session.due} == {5}


def test_a_daemon_that_knows_no_hints_does_not_matter() -> None:
    session = new_session()
    session.hint = lambda *_, **__: 1 / 0  # type: ignore[method-assign,assignment,return-value]
    engine = engine_with(session)
    for n in range(3):
        engine.add(request(str(n), prompt_of(n, 130), 70))
    outcome = run(engine)
    close_stored(engine)
    assert [outcome.tokens[str(n), 0] for n in range(3)] == [answer_alone(prompt_of(n, 130), 70) for n in range(3)]
    assert len(session.blocks) == 9


def test_a_daemon_that_does_not_answer_hints_delays_no_answer_and_receives_each_once() -> None:
    session, answers = new_session(), threading.Event()
    hint = session.hint

    def late(*tokens: Any, **expected: Any) -> int:
        assert answers.wait(60)
        return hint(*tokens, **expected)

    session.hint = late  # type: ignore[method-assign]
    engine = engine_with(session)
    for n in range(3):
        engine.add(request(str(n), prompt_of(n, 130), 9 + n, next_step=lambda answer: "end_of_turn", stop=(" ",)))
    outcome = run(engine)
    assert len(outcome.finished) == 3 and session.answer_hints == []
    answers.set()
    close_stored(engine)
    engine.close()
    lengths = {end.usage.generated_tokens for end in outcome.finished.values()}
    assert {tokens for _, tokens in session.answer_hints} == lengths and len(session.next_steps) == 3
