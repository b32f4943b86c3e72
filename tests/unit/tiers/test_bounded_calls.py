"""Calls that are given up: in time, with an end that changes nothing, and not without bound."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from kvstore_tiers.remote.drivers.bounded_calls import BoundedCall, BoundedCalls, GivenUp

PATIENCE_S = 30.0


class Stuck:
    """A library that hangs until it is let go."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.saw_given_up: list[bool] = []

    def __call__(self, call: BoundedCall) -> str:
        assert self.go.wait(PATIENCE_S)
        self.saw_given_up.append(call.is_given_up)
        return "late"


@pytest.fixture
def stuck() -> Iterator[Stuck]:
    library = Stuck()
    yield library
    library.go.set()


def test_a_call_returns_and_raises_what_the_library_does() -> None:
    calls = BoundedCalls("library", 1)

    def fail(_: BoundedCall) -> None:
        raise ConnectionError("away")

    assert calls.run(lambda call: call.remaining_s > 0, PATIENCE_S) is True
    with pytest.raises(ConnectionError, match="away"):
        calls.run(fail, PATIENCE_S)
    assert calls.wait_idle(0)


def test_a_timeout_of_the_librarys_own_is_not_a_call_given_up() -> None:
    def time_out(_: BoundedCall) -> None:
        raise TimeoutError("its own")

    with pytest.raises(TimeoutError) as failed:
        BoundedCalls("library", 1).run(time_out, PATIENCE_S)
    assert not isinstance(failed.value, GivenUp)


def test_a_call_that_hangs_is_given_up_and_sees_it(stuck: Stuck) -> None:
    calls = BoundedCalls("library", 1)
    with pytest.raises(GivenUp):
        calls.run(stuck, 0.01)
    assert not calls.wait_idle(0)
    stuck.go.set()
    assert calls.wait_idle(PATIENCE_S)
    assert stuck.saw_given_up == [True]


def test_calls_that_hang_do_not_pile_up(stuck: Stuck) -> None:
    calls = BoundedCalls("library", 2)
    for _ in range(2):
        with pytest.raises(GivenUp):
            calls.run(stuck, 0.01)
    with pytest.raises(TimeoutError, match="2 calls that were given up are still running") as refused:
        calls.run(stuck, PATIENCE_S)
    assert not isinstance(refused.value, GivenUp)
    stuck.go.set()
    assert calls.wait_idle(PATIENCE_S)
    assert calls.run(stuck, PATIENCE_S) == "late"
