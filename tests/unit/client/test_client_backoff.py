"""Back-off grows, jitters, is bounded and resets; the breaker opens only on timeouts in a row."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from kvstore_client.connection import Backoff, Breaker


@given(st.integers(0, 1000), st.integers(1, 40))
def test_delays_stay_under_a_doubling_ceiling(seed: int, attempts: int) -> None:
    backoff = Backoff(random.Random(seed), initial_s=0.1, maximum_s=2.0, floor_s=0.01)
    for attempt in range(attempts):
        assert 0.01 <= backoff.next_delay_s() <= min(0.1 * 2**attempt, 2.0)


def test_two_clients_do_not_return_in_step() -> None:
    one, other = (Backoff(random.Random(seed)) for seed in (1, 2))
    assert [one.next_delay_s() for _ in range(5)] != [other.next_delay_s() for _ in range(5)]


def test_reset_starts_over() -> None:
    backoff = Backoff(random.Random(0), initial_s=0.1, maximum_s=100.0)
    for _ in range(10):
        backoff.next_delay_s()
    backoff.reset()
    assert all(backoff_delay <= 0.1 for backoff_delay in [backoff.next_delay_s()])


@given(st.lists(st.booleans()))
def test_the_breaker_counts_timeouts_in_a_row(answers: list[bool]) -> None:
    breaker = Breaker(limit=3)
    for answered in answers:
        if answered:
            breaker.answered()
        else:
            breaker.timed_out()
    assert breaker.is_open == (len(answers) >= 3 and not any(answers[-3:]))


def test_a_daemon_s_wish_to_wait_is_kept_and_bounded() -> None:
    backoff = Backoff(random.Random(0))
    for asked_s in (0.25, 3.0, 10.0):
        assert asked_s <= backoff.next_delay_s(asked_s) <= asked_s * 2 + 2.0
    assert backoff.next_delay_s(1e9) <= 22.0


@given(st.integers(0, 1000))
def test_clients_that_lost_one_daemon_do_not_return_as_a_herd(seed: int) -> None:
    """256 clients lose a daemon, which is back after 1.5 s: no tenth of a second sees more than a quarter of them."""
    clients, away_s, returned = 256, 1.5, []
    for client in range(clients):
        backoff, now_s = Backoff(random.Random(seed * clients + client)), 0.0
        while now_s < away_s:
            now_s += backoff.next_delay_s()
        returned.append(now_s)
    most = max(sum(start <= at < start + 0.1 for at in returned) for start in returned)
    assert most <= clients // 4, most
    assert max(returned) <= away_s + 2.0, "and none is late"
