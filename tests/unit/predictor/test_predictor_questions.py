"""A predictor's open questions: which blocks concern which, and when they are over."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from kvstore_predictor.questions import HORIZONS_S, OpenQuestions, nearest


@dataclass(eq=False)
class Asked:
    due_s: float


@pytest.fixture
def open_questions() -> OpenQuestions[Asked]:
    return OpenQuestions(most=2)


def test_a_block_concerns_a_guess_once(open_questions: OpenQuestions[Asked]) -> None:
    first, second = Asked(10.0), Asked(20.0)
    open_questions.ask(first, [((0, b"a"), 0), ((0, b"b"), 1)])
    assert open_questions.has_room
    open_questions.ask(second, [((0, b"a"), 0), ((1, b"a"), 1)])
    assert not open_questions.has_room
    assert list(open_questions.taken(0, [b"x", b"a", b"a"])) == [(first, 0), (second, 0)]
    assert list(open_questions.taken(0, None)) == [(first, 1)]
    assert list(open_questions.taken(0, None)) == []
    assert list(open_questions.taken(1, None)) == [(second, 1)]


def test_what_is_over_is_concerned_by_nothing(open_questions: OpenQuestions[Asked]) -> None:
    first, second = Asked(10.0), Asked(20.0)
    for question in (first, second):
        open_questions.ask(question, [((0, b"a"), 0)])
    assert open_questions.over(10.0) == []
    assert open_questions.over(10.1) == [first]
    assert open_questions.has_room
    assert list(open_questions.taken(0, [b"a"])) == [(second, 0)]
    assert open_questions.over(30.0) == [second]
    assert open_questions.over(40.0) == []


def test_a_horizon_is_like_the_one_at_the_least_ratio() -> None:
    assert [HORIZONS_S[nearest(horizon_s)] for horizon_s in (0.0, 10.0, 24.0, 25.0, 1e4)] == [
        10.0,
        10.0,
        10.0,
        60.0,
        300.0,
    ]
