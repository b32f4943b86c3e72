"""A question to key-addressed tiers pays or not: learned by tenant, noticed again when it changes."""

from __future__ import annotations

from kvstored.store.remote import (
    DEADLINE_MS,
    FIRST_EVERY,
    LAST_EVERY,
    LEAST_DEADLINE_MS,
    AnswerTimes,
    RemoteValue,
    RemoteVerdict,
)
from kvstored.store.transfer.lane import Lane, Priority

BLOCKS, TOKENS, NBYTES = 64, 64, 1 << 20


def answer_times(seconds: float) -> AnswerTimes:
    times = AnswerTimes()
    for _ in range(64):
        times.add(seconds)
    return times


def judge(value: RemoteValue, times: AnswerTimes, tenant: int = 0, load_us: float = 0.0) -> RemoteVerdict:
    return value.judge(tenant, BLOCKS, TOKENS, load_us, times)


def test_the_first_question_is_asked_and_a_store_without_hits_soon_is_not() -> None:
    value, times = RemoteValue(), answer_times(0.001)
    asked = 0
    while judge(value, times) is RemoteVerdict.WAIT:
        value.answered(0, BLOCKS, 0, 0)
        asked += 1
    assert 0 < asked < 20
    assert judge(value, times, tenant=1) is RemoteVerdict.WAIT, "another tenant's questions say nothing"


def test_a_store_that_does_not_pay_is_asked_more_and_more_rarely_and_no_request_waits() -> None:
    value, times = RemoteValue(), answer_times(0.001)
    for _ in range(30):
        value.answered(0, BLOCKS, 0, 0)
    pauses = []
    for _ in range(4):
        pause = 1
        while (verdict := judge(value, times)) is RemoteVerdict.NO:
            pause += 1
        assert verdict is RemoteVerdict.ASIDE
        pauses.append(pause)
        value.answered(0, BLOCKS, 0, 0)
    assert set(pauses) == {LAST_EVERY}
    value.answered(0, BLOCKS, BLOCKS, BLOCKS * NBYTES)
    assert judge(value, times) is RemoteVerdict.WAIT, "one question that found all says that it pays again"


def test_the_short_answer_is_that_of_the_long_one() -> None:
    quick, slow, times = RemoteValue(), RemoteValue(), answer_times(1e9)
    for value in (quick, slow):
        value.answered(0, BLOCKS, 0, 0)
    for at in range(200):
        verdict = judge(slow, times)
        if quick.declines(0, BLOCKS * TOKENS):
            assert verdict is RemoteVerdict.NO
        else:
            assert judge(quick, times) is verdict
        assert at == 0 or not quick.declines(0, BLOCKS * TOKENS + 1), "more blocks may pay"
        if verdict is RemoteVerdict.ASIDE:
            quick.answered(0, BLOCKS, 0, 0)
            slow.answered(0, BLOCKS, 0, 0)


def test_pauses_grow_from_the_first() -> None:
    value, times = RemoteValue(), answer_times(1e9)  # never pays
    for expected in (FIRST_EVERY, 2 * FIRST_EVERY, 4 * FIRST_EVERY):
        verdicts = [judge(value, times) for _ in range(expected)]
        assert verdicts == [RemoteVerdict.NO] * (expected - 1) + [RemoteVerdict.ASIDE]
        value.answered(0, BLOCKS, 0, 0)


def test_a_store_that_loads_slower_than_computing_does_not_pay() -> None:
    value, times = RemoteValue(saved_us_per_token=50), answer_times(0.001)
    value.answered(0, BLOCKS, BLOCKS, BLOCKS * NBYTES)
    assert value.block_bytes(0) == NBYTES
    assert judge(value, times, load_us=1000) is RemoteVerdict.WAIT
    assert judge(value, times, load_us=BLOCKS * TOKENS * 50) is RemoteVerdict.NO


def test_no_request_waits_for_answers_that_take_longer_than_any_deadline() -> None:
    value = RemoteValue(saved_us_per_token=1000)
    value.answered(0, BLOCKS, BLOCKS, BLOCKS * NBYTES)
    assert judge(value, answer_times(2 * DEADLINE_MS / 1000)) is RemoteVerdict.ASIDE


def test_the_deadline_follows_the_slower_answers_within_bounds() -> None:
    assert AnswerTimes().deadline_s == DEADLINE_MS / 1000
    assert answer_times(0.0001).deadline_s == LEAST_DEADLINE_MS / 1000
    assert answer_times(10).deadline_s == DEADLINE_MS / 1000
    assert answer_times(0.012).deadline_s == 2 * 0.012


def test_a_slow_store_is_expected_to_be_slow_before_the_first_read() -> None:
    lane: Lane[None] = Lane("remote→host")
    before_us = lane.estimate_us(NBYTES)
    lane.service.answered(0.05)
    assert lane.estimate_us(NBYTES) >= 50_000 > before_us
    ticket = lane.submit(Priority.DEMAND, NBYTES, None, 0)
    assert isinstance(ticket, int) and len(lane.next(0)) == 1
    lane.completed(ticket, 1_000_000)
    lane.service.answered(10.0)
    assert lane.estimate_us(NBYTES) < 1_000_000, "what was read says more than a question"
