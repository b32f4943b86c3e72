"""Restoring for several sequences at a time, with a daemon in memory that can misbehave."""

from __future__ import annotations

import threading
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from kvstore_engine.restore.copies import HostPoolCopies
from tests.reference.batch_runs import Outcome, check, request, run
from tests.reference.stored_batches import (
    HeldSession,
    close_stored,
    compute_and_store,
    engine_with,
    new_session,
    prompt_of,
    report_of,
    session_holding,
    usages_of,
)
from tests.reference.twin_compute import answer_alone


def test_what_one_engine_computed_another_restores() -> None:
    session = new_session()
    prompts = [prompt_of(n, 130 + 20 * n) for n in range(6)]
    cold = engine_with(session)
    for n, prompt in enumerate(prompts):
        cold.add(request(str(n), prompt, 100))
    first = run(cold)
    close_stored(cold)
    assert {usage.daemon_tokens for usage in usages_of(first)} == {0}
    assert len(session.blocks) == sum((len(prompt) + 99) // 64 for prompt in prompts)
    warm = engine_with(session)
    for n, prompt in enumerate(prompts):
        warm.add(request(str(n), prompt, 100))
    second = run(warm)
    for n, prompt in enumerate(prompts):
        assert second.tokens[str(n), 0] == first.tokens[str(n), 0] == answer_alone(prompt, 100)
        usage = second.finished[str(n), 0].usage
        assert usage.daemon_tokens == (len(prompt) - 1) // 64 * 64
        assert usage.daemon_tokens + usage.computed_tokens == len(prompt)
    close_stored(warm)
    assert all(lease.released for lease in session.leases)


def test_a_prefix_that_several_want_is_restored_once() -> None:
    session = new_session()
    common = prompt_of(0, 256)
    compute_and_store(session, [*common, 1])
    warm = engine_with(session)
    for n in range(5):
        warm.add(request(str(n), common + prompt_of(n + 1, 40), 6))
    outcome = run(warm)
    for n in range(5):
        assert outcome.tokens[str(n), 0] == answer_alone(common + prompt_of(n + 1, 40), 6)
    usages = usages_of(outcome)
    assert sorted(usage.daemon_tokens for usage in usages) == [0, 0, 0, 0, 256]
    assert sum(usage.local_tokens for usage in usages) == 4 * 256
    close_stored(warm)


def test_what_the_daemon_does_not_have_is_asked_for_once() -> None:
    session = new_session()
    engine = engine_with(session)
    common = prompt_of(0, 256)
    for n in range(5):
        engine.add(request(str(n), common + prompt_of(n + 1, 10), 2))
    outcome = run(engine)
    for n in range(5):
        assert outcome.tokens[str(n), 0] == answer_alone(common + prompt_of(n + 1, 10), 2)
    assert len(session.leases) == 1
    close_stored(engine)


def test_a_conversation_finds_its_head_here_and_its_tail_in_the_daemon() -> None:
    session = new_session()
    common, own = prompt_of(0, 100), prompt_of(1, 200)
    compute_and_store(session, common + own)
    warm = engine_with(session)
    warm.add(request("other", [*common, 1, 2, 3], 2, store=False))
    run(warm)
    warm.add(request("back", common + own, 8))
    outcome = run(warm)
    usage = outcome.finished["back", 0].usage
    assert outcome.tokens["back", 0] == answer_alone(common + own, 8)
    # 96 tokens are here; the daemon's block of 64 to 128 is taken from 96 on, that of 256 on is not whole.
    assert (usage.local_tokens, usage.daemon_tokens, usage.computed_tokens) == (96, 160, 44)
    close_stored(warm)


def test_what_is_mapped_is_one_lease_and_what_is_not_comes_in_pieces() -> None:
    prompt = prompt_of(1, 300)
    session = session_holding(prompt)
    report = report_of(session, prompt)
    assert (report.tokens, report.bytes) == (256, 4 * session.block_bytes)
    assert [len(lease) for lease in session.leases] == [4]
    session.leases.clear()
    session.mapped_blocks = 1
    assert report_of(session, prompt).tokens == 256
    assert [len(lease) for lease in session.leases] == [1, 1, 1, 1, 1], "what was mapped comes again with the rest"


def test_a_slow_store_is_not_waited_for() -> None:
    prompt = prompt_of(1, 256)
    session = session_holding(prompt)
    session.estimated_load_s, session.mapped_blocks = 1e6, 0
    report = report_of(session, prompt)
    assert report.tokens == 0
    assert report.resident_blocks == 3, "the fourth holds the last token, which is computed in any case"
    assert report.estimated_load_s > report.estimated_compute_s
    assert [len(lease) for lease in session.leases] == [0]


def test_a_report_says_why_no_more_was_restored() -> None:
    prompt = prompt_of(1, 300)
    session = session_holding(prompt)
    session.granted_blocks, session.mapped_blocks = 2, 1
    report = report_of(session, prompt)
    assert (report.tokens, "2 of 4" in report.reason) == (128, True)
    session.leases_stay_valid = False
    report = report_of(session, prompt)
    assert (report.tokens, "0 of 4" in report.reason) == (0, True)
    assert report_of(session, prompt_of(2, 200)).reason == "never_stored"
    session.fail_with = ConnectionResetError("gone")
    assert report_of(session, prompt).reason == "restoring failed: ConnectionResetError: gone"


def test_a_lease_that_ended_while_it_was_copied_counts_for_nothing() -> None:
    session = new_session()
    prompt = prompt_of(1, 300)
    compute_and_store(session, prompt)
    session.leases_stay_valid = False
    for key in session.blocks:
        session.blocks[key] = np.full_like(session.blocks[key], 0x77)  # what the memory is used for now
    warm = engine_with(session)
    warm.add(request("again", prompt, 8))
    outcome = run(warm)
    assert outcome.tokens["again", 0] == answer_alone(prompt, 8)
    assert outcome.finished["again", 0].usage.daemon_tokens == 0
    close_stored(warm)


@pytest.mark.parametrize("damaged", [0, 2])
def test_a_stored_block_of_another_size_is_computed(damaged: int) -> None:
    session = new_session()
    prompt = prompt_of(1, 300)
    compute_and_store(session, prompt)
    key = sorted(session.blocks, key=len)[damaged]
    session.blocks[key] = session.blocks[key][:-8]
    warm = engine_with(session)
    warm.add(request("warm", prompt, 4))
    warm.add(request("beside", prompt_of(2, 50), 4))
    outcome = run(warm)
    assert outcome.tokens["warm", 0] == answer_alone(prompt, 4)
    assert outcome.tokens["beside", 0] == answer_alone(prompt_of(2, 50), 4)
    close_stored(warm)
    assert all(lease.released for lease in session.leases)


@pytest.mark.parametrize("budget_s, portions", [(1.0, [20]), (0.0, [8, 8, 4])])
def test_as_many_blocks_are_copied_at_once_as_there_is_time_for(budget_s: float, portions: list[int]) -> None:
    prompt, load = prompt_of(1, 20 * 64 + 1), HostPoolCopies.load
    with (
        patch("kvstore_engine.batching.engine._ALONE_S", budget_s),
        patch.object(HostPoolCopies, "load", autospec=True, side_effect=load) as copied,
    ):
        assert report_of(session_holding(prompt), prompt).tokens == 20 * 64
    assert [len(call.args[2]) for call in copied.call_args_list] == portions


def test_the_thread_that_pinged_the_daemon_looks_up_the_first_prompt() -> None:
    threads, session = list[int](), new_session()
    warm = engine_with(session)
    with (
        patch.object(session, "ping", side_effect=lambda: threads.append(threading.get_ident())),
        patch.object(session, "get", side_effect=lambda *_, **__: threads.append(threading.get_ident())),
    ):
        warm.restorer.fetcher.warm_up(session)
        warm.add(request("first", prompt_of(1, 130), 2))
        run(warm)
    assert len(threads) > 1 and set(threads) == {threads[0]} != {threading.get_ident()}
    close_stored(warm)


def test_what_must_be_promoted_is_waited_for_by_its_own_request_only() -> None:
    session = HeldSession(new_session())
    prompt = prompt_of(1, 300)
    compute_and_store(session.inner, prompt)
    session.inner.mapped_blocks = 0
    warm = engine_with(session)
    warm.add(request("slow", prompt, 8))
    warm.add(request("new", prompt_of(2, 50), 30))
    outcome = Outcome()
    waits: list[float] = []
    wait = warm.restorer.fetcher.wait

    def noted(fetches: Any, timeout_s: float) -> None:
        if session.is_promoting:
            waits.append(timeout_s)
        wait(fetches, timeout_s)

    warm.restorer.fetcher.wait = noted  # type: ignore[method-assign]
    while ("new", 0) not in outcome.finished:
        outcome.take(warm.step())
    assert not waits, "a running answer waited for another request's promotion"
    assert ("slow", 0) in outcome.finished, "a load that stalls is computed instead"
    session.promoted.set()
    run(warm, outcome)
    assert outcome.tokens["slow", 0] == answer_alone(prompt, 8)
    assert outcome.finished["slow", 0].usage.daemon_tokens == 0
    close_stored(warm)


def test_a_call_that_is_not_answered_in_time_holds_up_no_request() -> None:
    session = HeldSession(new_session())
    session.answered.clear()
    prompt = prompt_of(1, 300)
    engine = engine_with(session)
    engine.add(request("asks", prompt, 4))
    engine.add(request("asks as well", [*prompt, 1], 4))
    engine.add(request("beside", prompt_of(2, 50), 200))
    outcome = run(engine)
    assert outcome.tokens["asks", 0] == answer_alone(prompt, 4)
    assert outcome.tokens["asks as well", 0] == answer_alone([*prompt, 1], 4)
    session.answered.set()
    close_stored(engine)
    assert all(lease.released for lease in session.inner.leases)


@pytest.mark.parametrize("moment", ["asking", "promoting"])
def test_a_request_may_be_cancelled_while_it_restores(moment: str) -> None:
    session = HeldSession(new_session())
    prompt = prompt_of(1, 300)
    compute_and_store(session.inner, prompt)
    session.inner.mapped_blocks = 0
    warm = engine_with(session)
    session.answered.clear() if moment == "asking" else session.promoted.clear()
    warm.add(request("gone", prompt, 8))
    warm.add(request("same", prompt, 8))
    outcome = Outcome()
    for _ in range(3):
        outcome.take(warm.step())
    warm.cancel("gone")
    check(warm)
    session.answered.set()
    session.promoted.set()
    run(warm, outcome)
    assert outcome.finished["gone", 0].reason == "cancelled"
    assert outcome.tokens["same", 0] == answer_alone(prompt, 8)
    close_stored(warm)
    assert all(lease.released for lease in session.inner.leases)
