"""session-return: what returns and hints do to a guess; what session-return holds."""

from __future__ import annotations

import numpy as np
import pytest

from kvstore_predictor.ages import BINS, EDGES_S, END_S, age_of, at_age, chance, cumulative
from kvstore_predictor.base import Guess, Hint, NextStep, PredictorRequest
from kvstore_predictor.session_return import SessionReturn


def keys(session: int, blocks: int) -> list[bytes]:
    return [session.to_bytes(8, "big") + at.to_bytes(8, "big") for at in range(blocks)]


def guess_of(predictor: SessionReturn, session: int, now_s: float, horizon_s: float = 60.0) -> Guess | None:
    prefix = session.to_bytes(8, "big")
    return next((each for each in predictor.guesses(now_s, horizon_s, 10_000) if each.key[:8] == prefix), None)


def of(predictor: SessionReturn, session: int, now_s: float, horizon_s: float = 60.0) -> float:
    found = guess_of(predictor, session, now_s, horizon_s)
    return 0.0 if found is None else found.probability


def taught() -> tuple[SessionReturn, float]:
    """Sessions 0 to 39 go on every 5 s; 100 and up are asked for once."""
    predictor, now_s = SessionReturn(1024), 0.0
    for turn in range(30):
        for session in range(40):
            now_s += 0.125
            predictor.requested(PredictorRequest(0, keys(session, 4 + turn)), now_s)
        predictor.requested(PredictorRequest(0, keys(100 + turn, 12)), now_s)
    return predictor, now_s


def test_it_learns_who_returns_and_when() -> None:
    predictor, now_s = taught()
    often, once = guess_of(predictor, 39, now_s, 10.0), of(predictor, 129, now_s, 10.0)
    assert often is not None
    assert often.probability > 0.8 > 0.3 > once
    assert often.blocks == 33
    assert often.due_s == pytest.approx(now_s + 5.0, abs=2.0)
    assert of(predictor, 39, now_s + 200.0, 10.0) < of(predictor, 39, now_s, 10.0)


def test_a_class_that_is_new_is_told_from_others_at_once() -> None:
    predictor = SessionReturn(1024)
    for session, first_s in ((1, 0.0), (2, 298.0)):  # the one comes again after 300 s, the other after 2 s
        predictor.requested(PredictorRequest(0, keys(session, 4)), first_s)
    for session in (1, 2):
        predictor.requested(PredictorRequest(0, keys(session, 6)), 300.0)
    assert of(predictor, 2, 300.0, 10.0) > 1.5 * of(predictor, 1, 300.0, 10.0)


def test_a_longer_horizon_is_more_probable() -> None:
    predictor, now_s = taught()
    chances = [of(predictor, 20, now_s, horizon_s) for horizon_s in (1.0, 10.0, 100.0)]
    assert chances == sorted(chances)


def test_a_request_that_is_due_is_certain_until_it_is_late() -> None:
    predictor, now_s = taught()
    predictor.hinted(0, keys(129, 12)[-1], Hint(due_s=now_s + 8.0), now_s)
    found = guess_of(predictor, 129, now_s, 10.0)
    assert found is not None
    assert (found.first_s, found.due_s, found.confidence) == (now_s + 8.0, now_s + 8.0, 1.0)
    assert found.probability > 0.9
    assert of(predictor, 129, now_s, 5.0) < 0.5
    assert of(predictor, 129, now_s + 60.0, 5.0) < 0.5


def test_hints_raise_lower_and_end() -> None:
    predictor, now_s = taught()
    before = of(predictor, 129, now_s)
    predictor.hinted(0, keys(129, 12)[-1], Hint(will_continue=0.95), now_s)
    assert of(predictor, 129, now_s) > before
    predictor.hinted(0, keys(129, 12)[-1], Hint(will_continue=0.05), now_s)
    assert of(predictor, 129, now_s) < before
    predictor.hinted(0, keys(30, 33)[-1], Hint(next_step=NextStep.CLOSED), now_s)
    assert guess_of(predictor, 30, now_s) is None
    predictor.hinted(0, b"an unknown block", Hint(will_continue=1.0), now_s)


def test_an_answer_is_that_of_its_own_request() -> None:
    predictor = SessionReturn(64)
    predictor.requested(PredictorRequest(0, keys(1, 3), 7, 1500), 1.0)
    predictor.answered(7, 100, 2.0)
    predictor.answered(7, 900, 3.0)  # again: no longer awaited
    assert predictor.sessions.tokens[0] == 1600
    predictor.requested(PredictorRequest(0, keys(1, 5), 8, 1700), 4.0)
    predictor.requested(PredictorRequest(0, keys(1, 6), 9, 2000), 5.0)
    predictor.answered(8, 100, 6.0)  # another request continues the chain by now
    assert predictor.sessions.tokens[2] == 2000


def test_a_system_prompt_belongs_to_no_session() -> None:
    predictor, prompt = SessionReturn(256), keys(999, 3)
    for session in range(40):
        predictor.requested(PredictorRequest(0, prompt + keys(session, 1)), float(session))
    turns = [each for each in predictor.sessions.turn if each]
    assert turns.count(1) >= 30


def test_horizons_are_the_inverse_of_ages() -> None:
    hazards = np.full((2, BINS), 0.1)
    hazards[1] = np.linspace(0.01, 0.5, BINS)
    table, rows = cumulative(hazards), np.array([0, 1, 1])
    ages_s = np.array([0.4, 33.0, 1000.0])
    assert age_of(table, rows, at_age(table, rows, ages_s)) == pytest.approx(ages_s)
    zero = np.zeros(1)
    assert chance(zero, at_age(table, np.array([0]), np.array([EDGES_S[3]]))) == pytest.approx([1 - 0.9**3])
    assert at_age(table, rows[:1], np.array([END_S])) == at_age(table, rows[:1], np.array([9 * END_S]))


@pytest.mark.parametrize("slots", [8, 5000])
def test_chains_are_copied_in_the_order_of_their_last_use_and_a_few_at_a_time(slots: int) -> None:
    predictor = SessionReturn(slots)
    for number in range(slots + 300):
        predictor.requested(PredictorRequest(0, [number.to_bytes(16, "big")]), float(number))
    pieces = [piece for name, piece in predictor.export_state() if name == "chains"]
    assert max(map(len, pieces)) <= 128
    assert np.concatenate(pieces)["used_s"].tolist() == list(range(300, slots + 300))
