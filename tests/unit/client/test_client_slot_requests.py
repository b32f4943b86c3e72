"""Slots held ahead for the next put: used once, of the right size, in time, or given back."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvstore_client.call import Call, Late
from kvstore_client.slot_requests import AHEAD_BYTES, IDLE_S, SlotRequests, SlotSize
from kvstore_proto.v1 import kvstore_pb2 as wire
from kvstored.clock import NS_PER_S, ManualClock

SIZE = SlotSize(0, 1 << 20)


class Daemon:
    """Grants reservations 1, 2, ... when it is asked to answer; also the stream of the calls."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.asked: list[wire.ReserveSlots] = []
        self.late: list[Late | None] = []
        self.waited_for: list[int] = []
        self.answers_soon = False
        self.timers: list[tuple[float, Callable[[], None]]] = []
        self.requests = SlotRequests(self.begin, self.call_later, clock=self.now)

    def now(self) -> float:
        return self.clock.monotonic_ns() / NS_PER_S

    def begin(self, request: wire.Request, deadline_s: float) -> Call:
        self.asked.append(request.reserve_slots)
        self.late.append(None)
        return Call(len(self.asked) - 1, self)  # type: ignore[arg-type]  # `abandon` and `wait` are all it needs here

    def abandon(self, call: Call, late: Late | None) -> None:
        self.late[call.request_id] = late

    def wait(self, call: Call, timeout_s: float) -> None:
        self.waited_for.append(call.request_id)
        if self.answers_soon:
            self.answer(call.request_id)

    def call_later(self, delay_s: float, function: Callable[[], None]) -> None:
        self.timers.append((self.now() + delay_s, function))

    def answer(self, number: int, *, expires_in_ms: int = 30_000) -> None:
        reply = wire.ReserveSlotsReply(
            reservation=number + 1, arena_ids=[1] * 4, offsets=range(4), expires_in_ms=expires_in_ms
        )
        late = self.late[number]
        assert late is not None
        late(wire.Response(reserve_slots=reply))

    def pass_time(self, seconds: float) -> None:
        self.clock.advance(s=seconds)
        due = [function for at, function in self.timers if at <= self.now()]
        self.timers = [timer for timer in self.timers if timer[0] > self.now()]
        for function in due:
            function()

    @property
    def given_back(self) -> list[int]:
        return [request.give_back for request in self.asked if request.give_back]


@pytest.fixture
def daemon() -> Daemon:
    return Daemon()


def hold(daemon: Daemon, **options: int) -> None:
    daemon.requests.request_ahead(SIZE, 4)()
    daemon.answer(len(daemon.asked) - 1, **options)


def test_slots_are_taken_once(daemon: Daemon) -> None:
    hold(daemon)
    granted = daemon.requests.take_ahead(SIZE, 1.0)
    assert granted is not None and granted.slots == 4
    assert daemon.requests.take_ahead(SIZE, 1.0) is None
    daemon.pass_time(2 * IDLE_S)
    assert daemon.given_back == []


def test_slots_that_are_about_to_be_granted_are_waited_for(daemon: Daemon) -> None:
    """A put that follows at once needs no request of its own."""
    daemon.answers_soon = True
    daemon.requests.request_ahead(SIZE, 4)()
    granted = daemon.requests.take_ahead(SIZE, 1.0)
    assert granted is not None and granted.slots == 4 and daemon.waited_for == [0]
    assert daemon.requests.take_ahead(SIZE, 1.0) is None and daemon.waited_for == [0]


def test_an_answer_that_another_put_may_still_read_is_not_waited_for(daemon: Daemon) -> None:
    """The slots would be lost to both: `wait` takes the answer away from the put that requested them."""
    hold_granted = daemon.requests.request_ahead(SIZE, 4)
    assert daemon.requests.take_ahead(SIZE, 1.0) is None and daemon.waited_for == []
    hold_granted()
    daemon.answer(0)
    assert daemon.requests.take_ahead(SIZE, 1.0) is not None


def test_slots_of_another_size_are_given_back(daemon: Daemon) -> None:
    hold(daemon)
    assert daemon.requests.take_ahead(SlotSize(0, 4096), 1.0) is None
    assert daemon.given_back == [1]


def test_slots_that_expire_soon_are_given_back(daemon: Daemon) -> None:
    hold(daemon, expires_in_ms=4_000)
    daemon.pass_time(3.0)
    assert daemon.requests.take_ahead(SIZE, 1.0) is None
    assert daemon.given_back == [1]


def test_slots_that_no_put_takes_are_given_back(daemon: Daemon) -> None:
    hold(daemon)
    daemon.pass_time(IDLE_S - 1)
    assert daemon.given_back == []
    daemon.pass_time(2.0)
    assert daemon.given_back == [1]
    assert daemon.requests.take_ahead(SIZE, 0.0) is None


def test_slots_held_later_live_as_long(daemon: Daemon) -> None:
    hold(daemon)
    daemon.pass_time(IDLE_S - 1)
    assert daemon.requests.take_ahead(SIZE, 0.0) is not None
    hold(daemon)
    daemon.pass_time(2.0)
    assert daemon.given_back == []
    daemon.pass_time(IDLE_S)
    assert daemon.given_back == [2]


def test_one_request_is_under_way_at_a_time(daemon: Daemon) -> None:
    daemon.requests.request_ahead(SIZE, 4)()
    daemon.requests.request_ahead(SIZE, 4)()
    assert len(daemon.asked) == 1
    daemon.answer(0)
    daemon.requests.request_ahead(SIZE, 4)
    assert len(daemon.asked) == 1, "slots are held"


def test_an_answer_that_was_lost_is_not_waited_for(daemon: Daemon) -> None:
    """The stream may have ended. Should it arrive all the same, the slots beyond those held are given back."""
    daemon.requests.request_ahead(SIZE, 4)()
    daemon.pass_time(2.0)
    hold(daemon)
    daemon.answer(0)
    assert daemon.given_back == [1]


def test_slots_are_given_back_even_if_a_look_was_lost_with_its_stream(daemon: Daemon) -> None:
    hold(daemon)
    daemon.timers.clear()
    assert daemon.requests.take_ahead(SIZE, 0.0) is not None
    daemon.pass_time(IDLE_S + 2)
    hold(daemon)
    daemon.pass_time(IDLE_S)
    assert daemon.given_back == [2]


def test_no_slot_granted_holds_none(daemon: Daemon) -> None:
    daemon.requests.request_ahead(SIZE, 4)()
    late = daemon.late[0]
    assert late is not None
    late(wire.Response(reserve_slots=wire.ReserveSlotsReply()))
    assert daemon.requests.take_ahead(SIZE, 0.0) is None and daemon.given_back == []


def test_what_is_held_ahead_is_bounded(daemon: Daemon) -> None:
    daemon.requests.request_ahead(SIZE, 1 << 20)
    assert 0 < daemon.asked[0].blocks * SIZE.nbytes <= AHEAD_BYTES
