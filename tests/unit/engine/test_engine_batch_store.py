"""Restoring and storing for several sequences at a time, with a daemon in memory that can misbehave."""

from __future__ import annotations

import threading
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from kvstore_engine.batching.engine import BatchEngine
from kvstore_engine.batching.observer import Observer
from kvstore_engine.batching.settings import EngineSettings
from kvstore_engine.restore.copies import HostPoolCopies
from kvstore_engine.restore.record import RestoreReport
from kvstore_engine.restore.session import KvSession
from kvstore_restore.learned import LearnedCosts
from tests.reference.assumed_costs import assume
from tests.reference.batch_runs import Outcome, check, request, run
from tests.reference.block_invariants import check_blocks
from tests.reference.memory_session import MemorySession
from tests.reference.twin_compute import StepClock, TwinCompute, TwinTokenizer, answer_alone, text_of, twin_pool


def _prompt(seed: int, count: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 64, count).tolist()


def _session(**changes: Any) -> MemorySession:
    return MemorySession(twin_pool(4).payload_bytes(4), **changes)


def _engine(*sessions: KvSession, blocks: int = 256, observer: Observer | None = None, **settings: Any) -> BatchEngine:
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


class _Reports(Observer):
    """The reports of an engine about the store."""

    def __init__(self) -> None:
        self.restored_from: list[RestoreReport] = []
        self.not_stored: list[str] = []

    def store_answered(self, request_id: str, index: int, report: RestoreReport, t: float) -> None:
        self.restored_from.append(report)

    def stored(self, request_id: str, index: int, tokens: int, reason: str, begin_s: float, end_s: float) -> None:
        self.not_stored += [reason] if reason else []


def _report_of(session: MemorySession, prompt: list[int]) -> RestoreReport:
    """Return the report of an engine that knows nothing of the prompt, but what the session has."""
    reports = _Reports()
    engine = _engine(session, observer=reports)
    engine.add(request("asks", prompt, 2, store=False))
    assert run(engine).tokens["asks", 0] == answer_alone(prompt, 2)
    _stored(engine)
    assert all(lease.released for lease in session.leases)
    (report,) = reports.restored_from
    return report


def _compute_and_store(session: MemorySession, prompt: list[int]) -> None:
    """Let an engine compute the prompt and store its blocks."""
    engine = _engine(session)
    engine.add(request("stores", prompt, 2))
    run(engine)
    _stored(engine)


def _holding(prompt: list[int]) -> MemorySession:
    """A session that holds the prompt's blocks."""
    session = _session()
    _compute_and_store(session, prompt)
    session.leases.clear()
    return session


def _stored(engine: BatchEngine) -> None:
    """Wait until all that was offered is stored."""
    engine.close()
    check_blocks(engine.space, [])


def test_what_one_engine_computed_another_restores() -> None:
    session = _session()
    prompts = [_prompt(n, 130 + 20 * n) for n in range(6)]
    cold = _engine(session)
    for n, prompt in enumerate(prompts):
        cold.add(request(str(n), prompt, 100))
    first = run(cold)
    _stored(cold)
    assert {usage.daemon_tokens for usage in _usages(first)} == {0}
    assert len(session.blocks) == sum((len(prompt) + 99) // 64 for prompt in prompts)
    warm = _engine(session)
    for n, prompt in enumerate(prompts):
        warm.add(request(str(n), prompt, 100))
    second = run(warm)
    for n, prompt in enumerate(prompts):
        assert second.tokens[str(n), 0] == first.tokens[str(n), 0] == answer_alone(prompt, 100)
        usage = second.finished[str(n), 0].usage
        assert usage.daemon_tokens == (len(prompt) - 1) // 64 * 64
        assert usage.daemon_tokens + usage.computed_tokens == len(prompt)
    _stored(warm)
    assert all(lease.released for lease in session.leases)


def test_the_end_of_an_answer_is_hinted_when_its_blocks_are_stored() -> None:
    session = _session()
    engine = _engine(session)
    for n in range(4):  # the last step of each fills a block
        engine.add(request(str(n), _prompt(n, 100), 29 + 64 * n))
    run(engine)
    _stored(engine)
    assert sorted(session.answer_hints) == [(2 + n, 29 + 64 * n) for n in range(4)]


def test_a_prompt_has_one_answer_hint_and_none_for_what_is_not_stored_or_not_whole() -> None:
    session = _session()
    engine = _engine(session)
    engine.add(request("three", _prompt(1, 100), 9, n=3))
    engine.add(request("silent", _prompt(3, 100), 9, store=False))
    engine.add(request("short", _prompt(4, 20), 9))
    engine.add(request("cancelled", _prompt(5, 100), 9))
    outcome = Outcome()
    while not outcome.tokens["cancelled", 0]:
        outcome.take(engine.step())
    engine.cancel("cancelled")
    run(engine, outcome)
    _stored(engine)
    assert session.answer_hints == [(1, 9)]


def test_what_follows_an_answer_is_hinted_once_and_only_if_it_ended_by_itself() -> None:
    session = _session()
    engine = _engine(session)
    seen: list[int] = []

    def next_step(answer: Any) -> Any:
        seen.append(len(answer))
        return "tool_call"

    engine.add(request("cut", _prompt(1, 100), 9, next_step=next_step))
    run(engine)
    stop = text_of(answer_alone(_prompt(2, 100), 9))
    engine.add(request("stopped", _prompt(2, 100), 99, next_step=next_step, stop=(stop,)))
    run(engine)
    _stored(engine)
    assert (session.next_steps, seen) == ([None, "tool_call"], [9])


def test_a_request_that_has_to_wait_is_hinted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore_engine.batching.engine._LEAST_HINT_S", 1e-9)  # the twin answers quickly
    session = _session()
    engine = _engine(session, max_running=1, max_queue_s=1e9)
    engine.add(request("alone", _prompt(0, 100), 20))
    run(engine)
    assert not session.due, "it could begin at once"
    for n in range(1, 4):
        engine.add(request(str(n), _prompt(n, 100 + 64 * n), 20))
        engine.step()
    engine.add(request("short", _prompt(9, 30), 20))
    engine.add(request("gone", _prompt(8, 300), 20))
    engine.cancel("gone")
    run(engine)
    _stored(engine)
    assert [blocks for blocks, _ in session.due] == [3, 4], "the first had no need to, and the last has no whole block"
    assert 0 < session.due[0][1] < session.due[1][1]


def test_a_request_that_waits_for_blocks_is_hinted_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore_engine.batching.engine._LEAST_HINT_S", 1e-9)
    session = _session()
    engine = _engine(session, blocks=30, max_queue_s=1e9)
    engine.add(request("first", _prompt(0, 100), 20))
    run(engine)
    for n in range(1, 4):
        engine.add(request(str(n), _prompt(n, 320), 60))
    assert engine.scheduler.run_queue.free_places > 3
    run(engine)
    _stored(engine)
    assert session.due and {blocks for blocks, _ in session.due} == {5}


def test_a_daemon_that_knows_no_hints_does_not_matter() -> None:
    session = _session()
    session.hint = lambda *_, **__: 1 / 0  # type: ignore[method-assign,assignment,return-value]
    engine = _engine(session)
    for n in range(3):
        engine.add(request(str(n), _prompt(n, 130), 70))
    outcome = run(engine)
    _stored(engine)
    assert [outcome.tokens[str(n), 0] for n in range(3)] == [answer_alone(_prompt(n, 130), 70) for n in range(3)]
    assert len(session.blocks) == 9


def test_a_daemon_that_does_not_answer_hints_delays_no_answer_and_receives_each_once() -> None:
    session, answers = _session(), threading.Event()
    hint = session.hint

    def late(*tokens: Any, **expected: Any) -> int:
        assert answers.wait(60)
        return hint(*tokens, **expected)

    session.hint = late  # type: ignore[method-assign]
    engine = _engine(session)
    for n in range(3):
        engine.add(request(str(n), _prompt(n, 130), 9 + n, next_step=lambda answer: "end_of_turn", stop=(" ",)))
    outcome = run(engine)
    assert len(outcome.finished) == 3 and session.answer_hints == []
    answers.set()
    _stored(engine)
    engine.close()
    lengths = {end.usage.generated_tokens for end in outcome.finished.values()}
    assert {tokens for _, tokens in session.answer_hints} == lengths and len(session.next_steps) == 3


def test_a_prefix_that_several_want_is_restored_once() -> None:
    session = _session()
    common = _prompt(0, 256)
    _compute_and_store(session, [*common, 1])
    warm = _engine(session)
    for n in range(5):
        warm.add(request(str(n), common + _prompt(n + 1, 40), 6))
    outcome = run(warm)
    for n in range(5):
        assert outcome.tokens[str(n), 0] == answer_alone(common + _prompt(n + 1, 40), 6)
    usages = _usages(outcome)
    assert sorted(usage.daemon_tokens for usage in usages) == [0, 0, 0, 0, 256]
    assert sum(usage.local_tokens for usage in usages) == 4 * 256
    _stored(warm)


def test_what_the_daemon_does_not_have_is_asked_for_once() -> None:
    session = _session()
    engine = _engine(session)
    common = _prompt(0, 256)
    for n in range(5):
        engine.add(request(str(n), common + _prompt(n + 1, 10), 2))
    outcome = run(engine)
    for n in range(5):
        assert outcome.tokens[str(n), 0] == answer_alone(common + _prompt(n + 1, 10), 2)
    assert len(session.leases) == 1
    _stored(engine)


def test_a_conversation_finds_its_head_here_and_its_tail_in_the_daemon() -> None:
    session = _session()
    common, own = _prompt(0, 100), _prompt(1, 200)
    _compute_and_store(session, common + own)
    warm = _engine(session)
    warm.add(request("other", [*common, 1, 2, 3], 2, store=False))
    run(warm)
    warm.add(request("back", common + own, 8))
    outcome = run(warm)
    usage = outcome.finished["back", 0].usage
    assert outcome.tokens["back", 0] == answer_alone(common + own, 8)
    # 96 tokens are here; the daemon's block of 64 to 128 is taken from 96 on, that of 256 on is not whole.
    assert (usage.local_tokens, usage.daemon_tokens, usage.computed_tokens) == (96, 160, 44)
    _stored(warm)


def test_tenants_have_sessions_of_their_own() -> None:
    sessions = [_session(), _session()]
    engine = _engine(*sessions)
    prompt = _prompt(1, 200)
    engine.add(request("nameless", prompt, 4))
    engine.add(request("one", prompt, 4, tenant="1"))
    engine.add(request("none", prompt, 4, tenant="2"))
    outcome = run(engine)
    _stored(engine)
    assert [len(session.blocks) for session in sessions] == [3, 3]
    assert {usage.daemon_tokens + usage.local_tokens for usage in _usages(outcome)} == {0}


def test_requests_that_do_not_store_do_not() -> None:
    session = _session()
    engine = _engine(session)
    engine.add(request("secret", _prompt(1, 200), 4, store=False))
    run(engine)
    _stored(engine)
    assert not session.puts


@pytest.mark.parametrize("status", ["throttled", "failed"])
def test_blocks_after_a_gap_are_not_stored(status: str) -> None:
    session = _session(status_of=lambda block: status if block >= 1 else "stored")
    engine = _engine(session)
    engine.add(request("long", _prompt(1, 640), 40))
    outcome = run(engine)
    assert outcome.tokens["long", 0] == answer_alone(_prompt(1, 640), 40)
    _stored(engine)
    assert len(session.blocks) == 1


@pytest.mark.parametrize("fails", [False, True])
def test_why_blocks_were_not_stored_is_reported(fails: bool) -> None:
    reports, prompt = _Reports(), _prompt(1, 640)
    session = _session(status_of=lambda block: "throttled" if block == 1 else "stored")
    engine = _engine(session, observer=reports)
    engine.add(request("long", prompt, 4))
    if fails:
        engine.step()
        session.fail_with = ConnectionResetError("gone")
    run(engine)
    _stored(engine)
    assert ("ConnectionResetError: gone" if fails else "block 1 was throttled") in reports.not_stored[0]


def test_what_is_mapped_is_one_lease_and_what_is_not_comes_in_pieces() -> None:
    prompt = _prompt(1, 300)
    session = _holding(prompt)
    report = _report_of(session, prompt)
    assert (report.tokens, report.bytes) == (256, 4 * session.block_bytes)
    assert [len(lease) for lease in session.leases] == [4]
    session.leases.clear()
    session.mapped_blocks = 1
    assert _report_of(session, prompt).tokens == 256
    assert [len(lease) for lease in session.leases] == [1, 1, 1, 1, 1], "what was mapped comes again with the rest"


def test_a_slow_store_is_not_waited_for() -> None:
    prompt = _prompt(1, 256)
    session = _holding(prompt)
    session.estimated_load_s, session.mapped_blocks = 1e6, 0
    report = _report_of(session, prompt)
    assert report.tokens == 0
    assert report.resident_blocks == 3, "the fourth holds the last token, which is computed in any case"
    assert report.estimated_load_s > report.estimated_compute_s
    assert [len(lease) for lease in session.leases] == [0]


def test_a_report_says_why_no_more_was_restored() -> None:
    prompt = _prompt(1, 300)
    session = _holding(prompt)
    session.granted_blocks, session.mapped_blocks = 2, 1
    report = _report_of(session, prompt)
    assert (report.tokens, "2 of 4" in report.reason) == (128, True)
    session.leases_stay_valid = False
    report = _report_of(session, prompt)
    assert (report.tokens, "0 of 4" in report.reason) == (0, True)
    assert _report_of(session, _prompt(2, 200)).reason == "never_stored"
    session.fail_with = ConnectionResetError("gone")
    assert _report_of(session, prompt).reason == "restoring failed: ConnectionResetError: gone"


def test_what_led_to_a_failure_is_not_stored() -> None:
    session = _session()
    engine = _engine(session)
    forward = engine.compute.forward

    def broken(slices: Any) -> Any:
        logits = forward(slices)
        logits[:] = np.nan
        return logits

    engine.compute.forward = broken  # type: ignore[method-assign]
    engine.add(request("broken", _prompt(1, 200), 4))
    assert run(engine).finished["broken", 0].reason == "failed"
    _stored(engine)
    assert not session.blocks


def test_a_lease_that_ended_while_it_was_copied_counts_for_nothing() -> None:
    session = _session()
    prompt = _prompt(1, 300)
    _compute_and_store(session, prompt)
    session.leases_stay_valid = False
    for key in session.blocks:
        session.blocks[key] = np.full_like(session.blocks[key], 0x77)  # what the memory is used for now
    warm = _engine(session)
    warm.add(request("again", prompt, 8))
    outcome = run(warm)
    assert outcome.tokens["again", 0] == answer_alone(prompt, 8)
    assert outcome.finished["again", 0].usage.daemon_tokens == 0
    _stored(warm)


@pytest.mark.parametrize("damaged", [0, 2])
def test_a_stored_block_of_another_size_is_computed(damaged: int) -> None:
    session = _session()
    prompt = _prompt(1, 300)
    _compute_and_store(session, prompt)
    key = sorted(session.blocks, key=len)[damaged]
    session.blocks[key] = session.blocks[key][:-8]
    warm = _engine(session)
    warm.add(request("warm", prompt, 4))
    warm.add(request("beside", _prompt(2, 50), 4))
    outcome = run(warm)
    assert outcome.tokens["warm", 0] == answer_alone(prompt, 4)
    assert outcome.tokens["beside", 0] == answer_alone(_prompt(2, 50), 4)
    _stored(warm)
    assert all(lease.released for lease in session.leases)


@pytest.mark.parametrize("budget_s, portions", [(1.0, [20]), (0.0, [8, 8, 4])])
def test_as_many_blocks_are_copied_at_once_as_there_is_time_for(budget_s: float, portions: list[int]) -> None:
    prompt, load = _prompt(1, 20 * 64 + 1), HostPoolCopies.load
    with (
        patch("kvstore_engine.batching.engine._ALONE_S", budget_s),
        patch.object(HostPoolCopies, "load", autospec=True, side_effect=load) as copied,
    ):
        assert _report_of(_holding(prompt), prompt).tokens == 20 * 64
    assert [len(call.args[2]) for call in copied.call_args_list] == portions


def test_the_thread_that_pinged_the_daemon_looks_up_the_first_prompt() -> None:
    threads, session = list[int](), _session()
    warm = _engine(session)
    with (
        patch.object(session, "ping", side_effect=lambda: threads.append(threading.get_ident())),
        patch.object(session, "get", side_effect=lambda *_, **__: threads.append(threading.get_ident())),
    ):
        warm.restorer.fetcher.warm_up(session)
        warm.add(request("first", _prompt(1, 130), 2))
        run(warm)
    assert len(threads) > 1 and set(threads) == {threads[0]} != {threading.get_ident()}
    _stored(warm)


def test_what_must_be_promoted_is_waited_for_by_its_own_request_only() -> None:
    session = _HeldSession(_session())
    prompt = _prompt(1, 300)
    _compute_and_store(session.inner, prompt)
    session.inner.mapped_blocks = 0
    warm = _engine(session)
    warm.add(request("slow", prompt, 8))
    warm.add(request("new", _prompt(2, 50), 30))
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
    _stored(warm)


def test_a_call_that_is_not_answered_in_time_holds_up_no_request() -> None:
    session = _HeldSession(_session())
    session.answered.clear()
    prompt = _prompt(1, 300)
    engine = _engine(session)
    engine.add(request("asks", prompt, 4))
    engine.add(request("asks as well", [*prompt, 1], 4))
    engine.add(request("beside", _prompt(2, 50), 200))
    outcome = run(engine)
    assert outcome.tokens["asks", 0] == answer_alone(prompt, 4)
    assert outcome.tokens["asks as well", 0] == answer_alone([*prompt, 1], 4)
    session.answered.set()
    _stored(engine)
    assert all(lease.released for lease in session.inner.leases)


@pytest.mark.parametrize("moment", ["asking", "promoting"])
def test_a_request_may_be_cancelled_while_it_restores(moment: str) -> None:
    session = _HeldSession(_session())
    prompt = _prompt(1, 300)
    _compute_and_store(session.inner, prompt)
    session.inner.mapped_blocks = 0
    warm = _engine(session)
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
    _stored(warm)
    assert all(lease.released for lease in session.inner.leases)


def test_a_daemon_that_dies_costs_nothing_but_its_savings() -> None:
    session = _session()
    engine = _engine(session, blocks=24)
    outcome = Outcome()
    prompts = {str(n): _prompt(n, 70 + n) for n in range(30)}
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
    _stored(engine)


def test_a_daemon_that_hangs_on_a_put_stops_no_answer() -> None:
    session = _HeldSession(_session())
    session.stored.clear()
    engine = _engine(session)
    for n in range(4):
        engine.add(request(str(n), _prompt(n, 200), 100))
    outcome = run(engine)
    for n in range(4):
        assert outcome.tokens[str(n), 0] == answer_alone(_prompt(n, 200), 100)
    assert engine.storer.outstanding > 0
    session.stored.set()
    _stored(engine)
    assert len(session.inner.blocks) == 4 * (299 // 64)


def test_blocks_on_their_way_to_the_daemon_are_not_used_for_anything_else() -> None:
    session = _HeldSession(_session())
    session.stored.clear()
    engine = _engine(session, blocks=32)
    engine.add(request("first", _prompt(1, 200), 2))
    outcome = run(engine)
    for n in range(10):
        engine.add(request(str(n), _prompt(100 + n, 200), 2, store=False))
        run(engine, outcome)
    session.stored.set()
    _stored(engine)
    warm = _engine(session.inner)
    warm.add(request("first", _prompt(1, 200), 8))
    second = run(warm)
    assert second.finished["first", 0].usage.daemon_tokens == 192
    assert second.tokens["first", 0] == answer_alone(_prompt(1, 200), 8)
    _stored(warm)


def _usages(outcome: Outcome) -> list[Any]:
    return [finished.usage for finished in outcome.finished.values()]


class _HeldSession:
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
