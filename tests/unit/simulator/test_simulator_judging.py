"""Guesses are judged on a trace."""

from __future__ import annotations

import numpy as np
import pytest

from kvstore_predictor.base import Guess, Hint, PredictorRequest
from kvstore_predictor.session_return import SessionReturn
from kvstore_simulator.judging import Judged, RequestTimes, ece, events, judge, log_loss, question_times
from kvstore_simulator.trace import Op, RecordedHint, Trace, TraceBuilder

S = 10**9


def trace_of_sessions(requests: int = 60, sessions: int = 4) -> Trace:
    """Each session goes on every `sessions` seconds, by a block."""
    builder = TraceBuilder("t", "t", 512)
    for number in range(requests):
        session, turn = number % sessions, number // sessions
        chain = [1000 * session + block for block in range(3 + turn)]
        builder.add(number * S, chain, input_tokens=512 * len(chain), output_tokens=50)
    return builder.build()


def test_ece_and_log_loss() -> None:
    came = np.array([1.0] * 3 + [0.0] * 7)
    assert ece(np.full(10, 0.3), came) == pytest.approx(0.0)
    assert ece(np.full(10, 0.8), came) == pytest.approx(0.5)
    assert log_loss(np.full(10, 0.5), came) == pytest.approx(np.log(2))


def test_a_guess_comes_true_by_its_block_or_the_one_before() -> None:
    builder = TraceBuilder("t", "t", 512)
    for at_s, ids in ((0, [1, 2, 3]), (10, [1, 2, 4]), (20, [9, 10]), (30, [9, 11]), (40, [9, 12]), (50, [9, 13])):
        builder.add(at_s * 10**9, ids)
    trace = builder.build()
    uses = RequestTimes(trace)
    assert uses.is_within(trace.key(2), 0.0, 10.0)  # block 3: the one before it, 2, was used at 10 s
    assert not uses.is_within(trace.key(2), 0.0, 9.0)
    assert not uses.is_within(trace.key(2), 10.0, 100.0)
    assert not uses.is_within(trace.key(5), 20.0, 100.0)  # four different blocks follow block 9


def test_a_put_is_no_request() -> None:
    builder = TraceBuilder("t", "t", 512)
    builder.add(0, [1, 2, 3])
    builder.add(5 * S, [1, 2, 3], op=Op.PUT)
    trace = builder.build()
    assert not RequestTimes(trace).is_within(trace.key(2), 0.0, 10.0)


def test_the_brier_score_and_the_calibration_error() -> None:
    judged = Judged([0.2, 0.2, 0.9, 0.9], [False, True, True, True])
    assert judged.figures()["brier"] == pytest.approx((0.04 + 0.64 + 0.01 + 0.01) / 4)
    assert judged.figures()["ece"] == pytest.approx((2 * 0.3 + 2 * 0.1) / 4)
    assert Judged().figures() == {"guesses": 0}


class _Heard(SessionReturn):
    """Writes down what it hears, and when it is asked."""

    def __init__(self) -> None:
        super().__init__(64)
        self.heard: list[tuple[str, float]] = []

    def requested(self, request: PredictorRequest, now_s: float) -> None:
        self.heard.append(("request", now_s))

    def answered(self, number: int, output_tokens: int, now_s: float) -> None:
        self.heard.append(("answer", now_s))

    def hinted(self, tenant: int, key: bytes, hint: Hint, now_s: float) -> None:
        self.heard.append((f"due {hint.due_s}", now_s))

    def guesses(self, now_s: float, horizon_s: float, limit: int) -> list[Guess]:
        self.heard.append(("question", now_s))
        return []


def test_events_come_in_the_order_of_time_with_recorded_hints() -> None:
    builder = TraceBuilder("t", "t", 512)
    builder.add(0, [1, 2], output_tokens=100)
    builder.add_hint(RecordedHint(1, S, 0, -1, due_in_ns=4 * S), [1, 2])
    builder.add(9 * S, [1, 2, 3])
    predictor = _Heard()
    for now_s, said in events(builder.build(), [5.0]):
        if said is None:
            predictor.guesses(now_s, 10.0, 1)
        else:
            said(predictor)
    assert predictor.heard == [("request", 0.0), ("due 5.0", 1.0), ("answer", 2.0), ("question", 5.0), ("request", 9.0)]


def test_questions_are_asked_after_the_part_that_is_learned_from() -> None:
    trace = trace_of_sessions()
    times = question_times(trace, 0.5, 1.0, 5)
    assert len(times) == 5 and times[0] == 30.0 and times[-1] == 59.0 - 10.0
    assert judge(trace, SessionReturn(), 0.5, 5)[10.0].foretold
    assert not judge(trace, SessionReturn(), 0.5, 5)[300.0].foretold  # it would end after the trace
