"""The loan's number and its extents, where answers come late or a caller has them no more."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvstore_client.staging import ClientStaging, Use
from kvstore_proto.v1 import kvstore_pb2 as wire

NBYTES = 16 * 4096
Late = Callable[[wire.Response], None]


def lent(number: int) -> wire.Response:
    return wire.Response(lend=wire.LendReply(loan=number))


class Daemon:
    """Each Lend is answered as the next of `answers` says, which gets what a late answer goes to."""

    def __init__(self, *answers: Callable[[Late], wire.Response | str]) -> None:
        self._answers = list(answers)
        self.asked: list[Late] = []

    def __call__(self, request: wire.Request, _timeout_s: float, late: Late) -> wire.Response | str:
        assert request.HasField("lend")
        self.asked.append(late)
        return self._answers.pop(0)(late)


def test_a_lend_that_is_answered_late_does_not_hide_the_number_of_the_next_one() -> None:
    """The daemon has renewed the loan by the second request: only the second number stands."""

    def first_one_meanwhile(_: Late) -> wire.Response:
        daemon.asked[0](lent(1))
        return lent(2)

    daemon: Any = Daemon(lambda _: "deadline", first_one_meanwhile)
    staging = ClientStaging(np.empty(NBYTES, np.uint8))
    assert staging.obtain(daemon, 1.0) == "deadline"
    assert staging.obtain(daemon, 1.0) == ""
    assert (staging.loan, staging.used_bytes()) == (2, 0)


def test_a_lend_that_is_answered_after_the_next_one_changes_nothing() -> None:
    daemon: Any = Daemon(lambda _: "deadline", lambda _: lent(2))
    staging = ClientStaging(np.empty(NBYTES, np.uint8))
    assert staging.obtain(daemon, 1.0) == "deadline"
    assert staging.obtain(daemon, 1.0) == ""
    extent = staging.take(4096, 3)
    assert extent is not None
    daemon.asked[0](lent(1))
    assert (staging.loan, staging.used_bytes()) == (2, 3 * 4096)


def test_renewals_that_cross_leave_the_last_number() -> None:
    """Two threads renew: the first answer, number 2, comes after the second."""
    daemon: Any = Daemon(lambda _: lent(1), lambda _: "deadline", lambda _: lent(3))
    staging = ClientStaging(np.empty(NBYTES, np.uint8))
    staging.obtain(daemon, 1.0)
    extent = staging.take(4096, 2)
    assert extent is not None
    staging.leave_unanswered(Use([extent] * 2))
    staging.renew(daemon, 1.0)
    staging.renew(daemon, 1.0)
    daemon.asked[1](lent(2))
    assert (staging.loan, staging.used_bytes()) == (3, 0)


def test_bytes_that_are_free_cannot_be_held() -> None:
    staging = ClientStaging(np.empty(NBYTES, np.uint8))
    staging.obtain(Daemon(lambda _: lent(1)), 1.0)
    extent = staging.take(4096, 1)
    assert extent is not None
    staging.end(Use([extent]))
    with pytest.raises(RuntimeError, match="are free"):
        staging.hold(extent)
    assert staging.used_bytes() == 0
