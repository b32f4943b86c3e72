"""The lane's rules, one at a time."""

import pytest

from kvstored.store.transfer.lane import Lane, LaneSettings, Limits, Priority, Refused

DEMAND, PREFETCH, DEMOTION, MAINTENANCE = Priority
MS = 1_000_000
S = 1000 * MS
KIB = 1024


def limits(**changed: Limits) -> dict[Priority, Limits]:
    standard = {p.name.lower(): Limits(queued_items=100, in_flight=4) for p in Priority}
    standard["prefetch"] = Limits(queued_items=100, in_flight=1)
    return {Priority[name.upper()]: limit for name, limit in (standard | changed).items()}


def make(max_in_flight: int = 4, quiet_s: float = 0.0, aged_s: float = 1.0, **changed: Limits) -> Lane[str]:
    return Lane("nvme→host", LaneSettings(max_in_flight, limits(**changed), quiet_s=quiet_s, aged_s=aged_s))


def put(lane: Lane[str], priority: Priority, work: str, now_ns: int = 0, nbytes: int = KIB) -> int:
    answer = lane.submit(priority, nbytes, work, now_ns)
    assert isinstance(answer, int)
    return answer


def started(lane: Lane[str], now_ns: int = 0) -> list[str]:
    return [item.work for item in lane.next(now_ns)]


def test_demand_first_then_in_order_of_arrival() -> None:
    lane = make(max_in_flight=1)
    for priority, work in ((MAINTENANCE, "m"), (DEMOTION, "d"), (PREFETCH, "p"), (DEMAND, "1"), (DEMAND, "2")):
        put(lane, priority, work)
    order = []
    while items := lane.next(0):
        order += [item.work for item in items]
        lane.completed(items[0].ticket, 0)
    assert order == ["1", "2", "p", "d", "m"]
    assert not lane.has_queued and not any(lane.statistics(0).in_flight)


def test_of_demand_the_earliest_deadline_is_first_and_what_has_none_does_not_starve() -> None:
    lane = make(max_in_flight=1)
    undated = put(lane, DEMAND, "undated")
    dues = {"late": 9 * S, "soon": 2 * S, "soon too": 2 * S, "taken back": S, "hastened": 8 * S, "after": 11 * S}
    tickets = {work: lane.submit(DEMAND, KIB, work, 0, due_ns) for work, due_ns in dues.items()}
    assert lane.cancel(tickets["taken back"], 0) == "taken back"  # type: ignore[arg-type]
    assert lane.promote(tickets["hastened"], DEMAND, 0, S)  # type: ignore[arg-type]
    assert not lane.promote(tickets["hastened"], DEMAND, 0, 5 * S), "never later"  # type: ignore[arg-type]
    assert not lane.promote(undated, DEMAND, 0)
    order = []
    while items := lane.next(0):
        order += [item.work for item in items]
        lane.completed(items[0].ticket, 0)
    assert order == ["hastened", "soon", "soon too", "late", "undated", "after"]


def test_demand_that_is_taken_back_again_and_again_leaves_no_trace() -> None:
    lane = make(max_in_flight=1)
    for number in range(1000):
        lane.cancel(put(lane, DEMAND, f"{number}"), 0)
    assert len(lane._by_due) < 100
    put(lane, DEMAND, "last")
    assert started(lane) == ["last"]


def test_no_more_in_flight_than_the_limits_say() -> None:
    lane = make(max_in_flight=3, demotion=Limits(queued_items=100, in_flight=2))
    for number in range(5):
        put(lane, DEMOTION, f"d{number}")
    assert started(lane) == ["d0", "d1"]
    for number in range(5):
        put(lane, DEMAND, f"{number}")
    assert started(lane) == ["0"]
    assert started(lane) == []
    assert lane.statistics(0).in_flight == (1, 0, 2, 0)


def test_prefetch_waits_for_demand_to_be_over_and_quiet() -> None:
    lane = make(quiet_s=0.002)
    demand = put(lane, DEMAND, "demand")
    put(lane, PREFETCH, "p0")
    put(lane, PREFETCH, "p1")
    assert started(lane) == ["demand"]
    assert lane.wake_at(0) is None, "only the completion can change anything"
    lane.completed(demand, 5 * MS)
    assert started(lane, 5 * MS) == []
    assert lane.wake_at(5 * MS) == 7 * MS
    assert started(lane, 7 * MS - 1) == []
    assert started(lane, 7 * MS) == ["p0"]
    assert started(lane, 8 * MS) == [], "one at a time"


def test_demand_in_a_lane_of_the_same_medium_stops_prefetch() -> None:
    reading, writing = make(), make()
    reading.share_medium([reading, writing])
    ticket = put(writing, DEMAND, "w")
    put(reading, PREFETCH, "p")
    assert started(reading) == []
    assert started(writing) == ["w"]
    assert started(reading) == []
    writing.completed(ticket, 1)
    assert started(reading, 1) == ["p"]


def test_a_prefetch_that_becomes_demand_is_promoted_behind_it() -> None:
    lane = make(max_in_flight=1)
    late = put(lane, PREFETCH, "guess")
    put(lane, DEMAND, "first")
    assert lane.promote(late, DEMAND, 0)
    assert not lane.promote(late, DEMAND, 0)
    assert not lane.promote(late, DEMOTION, 0), "never lowered"
    (item,) = lane.next(0)
    assert (item.work, item.nbytes, item.priority) == ("first", KIB, DEMAND)
    assert not lane.promote(item.ticket, DEMAND, 0), "in flight"
    lane.completed(item.ticket, 1)
    assert [(each.ticket, each.priority) for each in lane.next(1)] == [(late, DEMAND)]
    assert not lane.promote(999, DEMAND, 0)


def test_queued_items_can_be_taken_back_and_started_ones_cannot() -> None:
    lane = make(max_in_flight=1)
    running, waiting = put(lane, DEMAND, "a"), put(lane, DEMAND, "b")
    lane.next(0)
    assert lane.cancel(running, 0) is None
    assert lane.cancel(waiting, 0) == "b"
    assert lane.cancel(waiting, 0) is None
    lane.completed(running, 1)
    assert lane.next(1) == []
    assert lane.statistics(1).cancelled == 1
    assert lane.statistics(1).queued_bytes == (0, 0, 0, 0)


def test_demand_that_was_taken_back_no_longer_stops_prefetch() -> None:
    lane = make()
    put(lane, PREFETCH, "p")
    ticket = put(lane, DEMAND, "d")
    lane.cancel(ticket, 5)
    assert started(lane, 5) == ["p"]


def test_a_full_queue_refuses_with_the_reason() -> None:
    lane = make(demotion=Limits(queued_items=1, in_flight=1))
    put(lane, DEMOTION, "a")
    assert lane.submit(DEMOTION, KIB, "b", 0) == Refused.QUEUE_FULL
    assert lane.submit(PREFETCH, 1 << 30, "huge", 0) == Refused.ITEM_TOO_LARGE
    assert lane.statistics(0).refused == (0, 1, 1, 0)
    put(lane, DEMAND, "others are not concerned")


def test_a_closed_lane_gives_back_what_waits_and_finishes_what_runs() -> None:
    lane = make(max_in_flight=1)
    ticket = put(lane, DEMAND, "runs")
    put(lane, DEMAND, "waits")
    put(lane, DEMOTION, "waits too")
    lane.next(0)
    assert lane.close() == ["waits", "waits too"]
    assert lane.submit(DEMAND, KIB, "late", 0) == Refused.CLOSED
    lane.completed(ticket, 1)
    assert not lane.has_queued and not any(lane.statistics(0).in_flight)


def test_a_budget_holds_over_time_and_wakes_the_caller() -> None:
    lane = make(demotion=Limits(queued_items=100, in_flight=4, bytes_per_s=1000.0, burst_bytes=1000))
    tickets = [put(lane, DEMOTION, f"{number}", nbytes=1000) for number in range(4)]
    assert started(lane) == ["0"]
    lane.completed(tickets[0], 1)
    wake = lane.wake_at(1)
    assert wake is not None
    assert wake == pytest.approx(1, abs=S // 100)
    now_ns, finished = 0, 1
    while finished < 4:
        now_ns = lane.wake_at(now_ns) or pytest.fail("never to be woken")
        for item in lane.next(now_ns):
            lane.completed(item.ticket, now_ns)
            finished += 1
    assert now_ns >= 2 * S, "4000 bytes at 1000 a second with a burst of 1000, and the last on credit"
    assert now_ns <= 3 * S + S // 10


def test_wake_at_is_now_when_something_may_start() -> None:
    lane = make()
    assert lane.wake_at(5) is None
    put(lane, DEMAND, "a", 5)
    assert lane.wake_at(5) == 5
    lane.next(5)
    assert lane.wake_at(5) is None


def test_an_aged_demotion_passes_demand_only_on_credit() -> None:
    lane = make(max_in_flight=1, aged_s=1.0)
    put(lane, DEMOTION, "old", nbytes=KIB)
    served = 0
    for step in range(60):
        put(lane, DEMAND, "demand", step * 100 * MS)
        put(lane, DEMAND, "demand", step * 100 * MS)
        (item,) = lane.next(step * 100 * MS)
        lane.completed(item.ticket, step * 100 * MS + 1)
        if item.work == "old":
            break
        served += 1
    assert served == 20, "a share of 5 % is one in twenty; it has been old enough for ten of them"


def test_a_failed_item_counts_as_failed_and_not_as_moved() -> None:
    lane = make()
    first, second = put(lane, DEMAND, "a"), put(lane, DEMAND, "b")
    lane.next(0)
    lane.completed(first, 1 * MS, ok=False)
    lane.completed(second, 2 * MS)
    report = lane.statistics(2 * MS)
    assert (report.failed, report.moved_blocks, report.moved_bytes) == (1, (1, 0, 0, 0), (KIB, 0, 0, 0))
    assert report.bytes_per_s > 0
    assert lane.statistics(600 * S).bytes_per_s < 1e-6


def test_completing_what_is_not_in_flight_crashes() -> None:
    lane = make()
    ticket = put(lane, DEMAND, "a")
    with pytest.raises(RuntimeError, match="not in flight"):
        lane.completed(ticket, 0)


def test_an_estimate_grows_with_what_is_ahead() -> None:
    lane = Lane[str]("x", LaneSettings(prior_bytes_per_s=1e9, prior_latency_us=100))
    assert lane.estimate_us(1_000_000) == pytest.approx(1100)
    put(lane, DEMAND, "a", nbytes=2_000_000)
    put(lane, DEMOTION, "not ahead", nbytes=9_000_000)
    assert lane.estimate_us(1_000_000) == pytest.approx(3100)
    assert lane.estimate_us(1_000_000, queued=False) == pytest.approx(1100)
