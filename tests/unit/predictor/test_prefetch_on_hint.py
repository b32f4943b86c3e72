"""Predicting what engines announce: sure where they were right, spread where they were not."""

from __future__ import annotations

import random
import time

import pytest

from kvstore_predictor.base import Guess, Hint, NextStep, PredictorRequest
from kvstored.store.prefetch.on_hint import BEFORE_MAX, LATE_S, OnHint
from tests.contract.test_predictor_contract import state_of

TENANT = 3


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


def announce(predictor: OnHint, number: int, pause_s: float, now_s: float, **more: object) -> None:
    predictor.hinted(TENANT, key(number), Hint(due_s=now_s + pause_s, **more), now_s)  # type: ignore[arg-type]


def ask(predictor: OnHint, now_s: float, horizon_s: float = 60.0) -> list[Guess]:
    return predictor.guesses(now_s, horizon_s, 64)


def come(predictor: OnHint, number: int, now_s: float) -> None:
    predictor.requested(PredictorRequest(TENANT, [key(0), key(number), key(number + 1)]), now_s)


def test_an_engine_that_is_right_is_believed_and_to_the_second() -> None:
    predictor, now_s = OnHint(), 0.0
    for number in range(10, 200, 2):
        announce(predictor, number, 600.0, now_s)
        now_s += 600.0
        come(predictor, number, now_s)
    announce(predictor, 1000, 600.0, now_s)
    (guess,) = ask(predictor, now_s + 560.0)
    assert (guess.tenant, guess.key, guess.confidence) == (TENANT, key(1000), 1.0)
    assert guess.probability > 0.95
    assert guess.first_s == guess.due_s == pytest.approx(now_s + 600.0)
    assert not ask(predictor, now_s + 500.0), "it comes after the horizon"


def test_an_engine_that_is_wrong_by_a_fifth_is_spread_over_the_time_in_which_its_requests_come() -> None:
    predictor, now_s, chance = OnHint(), 0.0, random.Random(1)
    for number in range(10, 600, 2):
        announce(predictor, number, 600.0, now_s)
        now_s += 600.0 / chance.lognormvariate(0.0, 0.2)
        ask(predictor, now_s)
        come(predictor, number, now_s)
    announce(predictor, 1000, 600.0, now_s)
    (guess,) = ask(predictor, now_s + 400.0, 600.0)
    assert guess.probability > 0.9
    assert 430 < guess.first_s - now_s < 500 and 560 < guess.due_s - now_s < 640
    (soon,) = ask(predictor, now_s + 570.0, 60.0)
    assert 0.2 < soon.probability < 0.6, "only some of them come within a minute"
    (late,) = ask(predictor, now_s + 700.0, 60.0)
    assert late.probability > 0.3 and late.due_s > now_s + 700.0, "it has not come yet: it will"


def test_requests_that_do_not_come_make_the_next_one_less_likely() -> None:
    predictor, now_s = OnHint(), 0.0
    for number in range(10, 90):
        announce(predictor, number, 10.0, now_s)
        now_s += 11.0 + LATE_S
        assert not ask(predictor, now_s)
    announce(predictor, 1000, 10.0, now_s)
    (guess,) = ask(predictor, now_s)
    assert guess.probability < 0.2


def test_the_request_ends_the_guess_also_without_the_last_block_which_may_be_partial() -> None:
    predictor = OnHint()
    predictor.requested(PredictorRequest(TENANT, [key(0), key(1), key(2)]), 0.0)
    announce(predictor, 2, 10.0, 1.0)
    assert len(ask(predictor, 5.0)) == 1
    predictor.requested(PredictorRequest(TENANT, [key(0), key(1), key(7), key(8)]), 11.0)
    assert not ask(predictor, 11.0)


def test_a_closed_session_and_a_chance_of_none_end_it() -> None:
    predictor = OnHint()
    for number, more in ((1, {"next_step": NextStep.CLOSED}), (2, {"will_continue": 0.0})):
        announce(predictor, number, 10.0, 0.0)
        announce(predictor, number, 10.0, 1.0, **more)
    assert not ask(predictor, 5.0)


def test_the_engine_s_own_doubt_counts() -> None:
    predictor = OnHint()
    announce(predictor, 1, 10.0, 0.0, will_continue=0.5)
    announce(predictor, 2, 10.0, 0.0)
    sure, doubted = ask(predictor, 5.0)
    assert (sure.key, doubted.key) == (key(2), key(1))
    assert doubted.probability == pytest.approx(0.5 * sure.probability)


@pytest.mark.parametrize("gone", [[key(1)], [key(2)], None])
def test_nothing_names_a_deleted_block(gone: list[bytes] | None) -> None:
    predictor = OnHint()
    predictor.requested(PredictorRequest(TENANT, [key(0), key(1), key(2)]), 0.0)
    announce(predictor, 2, 10.0, 1.0)
    predictor.forget(TENANT, gone)
    assert not ask(predictor, 5.0)
    assert not any((predictor._due, predictor._names, predictor._before, predictor._ends))


def test_a_deletion_costs_no_more_the_more_requests_are_known() -> None:
    predictor = OnHint()
    for number in range(BEFORE_MAX + 100):
        predictor.requested(PredictorRequest(TENANT, [key(0), key(2 * number + 1), key(2 * number + 2)]), 0.0)
    assert len(predictor._before) == len(predictor._ends) == BEFORE_MAX
    began_s = time.process_time()
    for number in range(2000):
        predictor.forget(TENANT, [key(number)])
    assert time.process_time() - began_s < 1.0, "it was 9 ms a key where all were looked through"
    assert len(predictor._before) == len(predictor._ends) == BEFORE_MAX - 900


def test_one_tenant_s_mistakes_are_not_another_s() -> None:
    predictor = OnHint()
    for number in range(10, 90):
        predictor.hinted(0, key(number), Hint(due_s=10.0), 0.0)
    ask(predictor, 100.0)
    predictor.hinted(0, key(1), Hint(due_s=110.0), 100.0)
    predictor.hinted(1, key(1), Hint(due_s=110.0), 100.0)
    found = {guess.tenant: guess.probability for guess in ask(predictor, 105.0)}
    assert found[0] < 0.2 < 0.8 < found[1]


@pytest.mark.parametrize("comes", [True, False])
def test_what_fell_due_while_there_was_no_daemon_is_neither_kept_nor_broken(comes: bool) -> None:
    before, after = OnHint(), OnHint()
    for number in range(10, 50, 2):
        announce(before, number, 10.0, 0.0)
    after.import_state(state_of(before), 0.0)
    started_s = 11.0
    for number in range(10, 50, 2):
        ask(after, started_s)
        if comes:
            come(after, number, started_s + 20.0)
    ask(after, started_s + 100.0)
    announce(after, 1000, 10.0, 200.0)
    announce(fresh := OnHint(), 1000, 10.0, 200.0)
    assert ask(after, 206.0) == ask(fresh, 206.0)


def test_what_falls_due_after_the_restart_counts_as_ever() -> None:
    before, after = OnHint(), OnHint()
    for number in range(10, 50, 2):
        announce(before, number, 10.0, 0.0)
    after.import_state(state_of(before), 0.0)
    for predictor in (before, after):
        ask(predictor, 9.0)
        ask(predictor, 100.0)
        announce(predictor, 1000, 10.0, 200.0)
    assert ask(before, 206.0) == ask(after, 206.0) and ask(after, 206.0)[0].probability < 0.4


def call(predictor: OnHint, number: int, now_s: float) -> None:
    predictor.hinted(TENANT, key(number), Hint(next_step=NextStep.TOOL_CALL), now_s)


def test_a_tool_call_is_expected_to_take_as_long_as_the_tenants_others_did() -> None:
    predictor, now_s, chance = OnHint(), 0.0, random.Random(2)
    for number in range(10, 200, 2):
        call(predictor, number, now_s)
        assert number > 10 or not ask(predictor, now_s), "nothing is known of them yet"
        now_s += chance.uniform(6.0, 10.0)
        come(predictor, number, now_s)
    call(predictor, 1000, now_s)
    announce(predictor, 2000, 20.0, now_s)
    other = OnHint()
    other.import_state(state_of(predictor), 0.0)
    for each in (predictor, other):
        guesses = {guess.key: guess for guess in ask(each, now_s + 12.0)}
        assert guesses[key(2000)].first_s == pytest.approx(now_s + 20.0, abs=1.5), "what is announced is no tool call"
        assert key(1000) not in guesses, "it took longer than all others"
        (soon,) = (guess for guess in ask(each, now_s) if guess.key == key(1000))
        assert soon.probability > 0.85
        assert now_s + 6.0 < soon.first_s < now_s + 7.0 < now_s + 7.5 < soon.due_s < now_s + 8.5
    announce(predictor, 1000, 3.0, now_s)
    call(predictor, 1000, now_s)
    assert min(guess.due_s for guess in ask(predictor, now_s + 2.0)) < now_s + 4.0, "what an engine says counts more"
