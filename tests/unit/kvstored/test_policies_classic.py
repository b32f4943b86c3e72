"""Each of the classical policies is set apart, on a handful of blocks; and the sketch that one counts with."""

from __future__ import annotations

import random

from kvstore_simulator.policies import create
from kvstore_simulator.policies.w_tinylfu import FrequencySketch
from kvstored.lifecycle import Cause
from kvstored.store.policies import EvictionPolicy
from tests.reference.blocks import Shelf, key

S = 1_000_000_000


def shelf_of(name: str) -> tuple[Shelf, EvictionPolicy]:
    shelf = Shelf()
    return shelf, create(name, shelf.residency, 0)


def evict(shelf: Shelf, policy: EvictionPolicy) -> int:
    row = policy.next_victim(shelf.now_ns)
    shelf.residency.remove(row, Cause.EVICTED, shelf.now_ns)
    return row


def test_fifo_does_not_look_at_use() -> None:
    shelf, policy = shelf_of("fifo")
    (a,), (b,) = shelf.chain(0), shelf.chain(1)
    for _ in range(5):
        shelf.chain(0)
    assert [evict(shelf, policy), evict(shelf, policy)] == [a, b]


def test_sieve_spares_once_for_any_number_of_uses() -> None:
    shelf, policy = shelf_of("sieve")
    (a,), (b,), (c,) = shelf.chain(0), shelf.chain(1), shelf.chain(2)
    for _ in range(9):
        shelf.chain(0)
    assert evict(shelf, policy) == b
    (d,) = shelf.chain(3)
    assert [evict(shelf, policy) for _ in range(3)] == [c, d, a], "the hand goes on from where it was, then round"


def test_s3_fifo_lets_what_comes_back_into_the_main_queue() -> None:
    shelf, policy = shelf_of("s3-fifo")
    for number in range(20):
        shelf.chain(number)
    for number in range(4, 8):
        shelf.chain(number)  # used on trial: they will move to the main queue
    first = evict(shelf, policy)
    assert first == 0
    (back,) = shelf.chain(0)
    order = [evict(shelf, policy) for _ in range(20)]
    once = {1, 2, 3, *range(8, 20)}
    assert set(order[:-5]) <= once, "one-time blocks leave first"
    assert back in order[-5:]


def test_arc_keeps_used_blocks_through_a_scan() -> None:
    shelf, policy = shelf_of("arc")
    hot = [shelf.chain(number)[0] for number in range(4)]
    for number in range(4):
        shelf.chain(number)
    for number in range(100, 130):
        shelf.chain(number)
        if len(policy) > 8:
            assert evict(shelf, policy) not in hot


def test_arc_gives_recency_more_room_when_its_victims_return() -> None:
    shelf, policy = shelf_of("arc")
    often = [shelf.chain(number)[0] for number in (0, 1)]
    shelf.chain(0)
    shelf.chain(1)
    gone = []
    for number in range(10, 14):
        shelf.chain(number)
        gone.append(number)
        evict(shelf, policy)
    for number in gone[:3]:  # each was remembered: the target of T1 grows
        shelf.chain(number)
    assert policy.next_victim(1) in often, "T1 is within its target now, so the frequent side gives"


def test_gdsf_keeps_the_deep_one_of_two() -> None:
    shelf, policy = shelf_of("gdsf")
    deep = shelf.chain(*range(100))
    (shallow,) = shelf.chain(500)
    assert evict(shelf, policy) == shallow, "its children hold back the heads of the long chain"
    assert evict(shelf, policy) == deep[-1]


def test_w_tinylfu_refuses_newcomers_that_were_seen_less_often() -> None:
    shelf, policy = shelf_of("w-tinylfu")
    for number in range(20):
        shelf.chain(number)
    for _ in range(3):
        for number in range(20):
            shelf.chain(number)
    evict(shelf, policy)  # from here on the tier is full
    for number in range(100, 140):
        shelf.chain(number)
        evict(shelf, policy)
    left = sum(shelf.residency.find(0, key(number)) >= 0 for number in range(20))
    assert left >= 18, "but for the one evicted first, and one that stood in the window"


def test_w_tinylfu_admits_who_returns_often_enough() -> None:
    shelf, policy = shelf_of("w-tinylfu")
    for number in range(20):
        shelf.chain(number)
    evict(shelf, policy)
    for _ in range(8):
        for number in (200, 201, 202):
            shelf.chain(number)
            evict(shelf, policy)
    assert any(shelf.residency.find(0, key(number)) >= 0 for number in (200, 201, 202))


def test_the_sketch_counts_and_forgets() -> None:
    sketch = FrequencySketch(1000)
    for number in range(200):
        for _ in range(1 + number % 5):
            sketch.add(key(number))
    counts = [sketch.count(key(number)) for number in range(200)]
    assert all(count >= 1 + number % 5 for number, count in enumerate(counts)), "never too low"
    assert sum(count > 1 + number % 5 for number, count in enumerate(counts)) < 10, "and rarely too high"
    for _ in range(40):
        sketch.add(key(7))
    assert sketch.count(key(7)) == 15
    for number in range(10_000):
        sketch.add(key(10_000 + number % 3000))
    assert sketch.count(key(7)) <= 9, "halved"


def test_blocks_that_a_put_continued_leave_together_where_they_would_leave_one_by_one() -> None:
    """A get touches what is there before the put that continues it is stored, so parents are older than children."""
    orders, asked = list[list[bytes]](), list[int]()
    for at_once in (1, 50):
        chance, order = random.Random(5), list[bytes]()
        shelf, policy = shelf_of("lru")
        asked.append(0)
        for turn in range(300):
            shelf.now_ns += S
            chat, held = 1000 * chance.randrange(12), chance.randrange(40)
            rows = [shelf.residency.find(0, key(chat + at)) for at in range(held)]
            rows = rows[: rows.index(-1)] if -1 in rows else rows
            if rows:
                shelf.residency.touch_run(rows, shelf.now_ns)
            new = [
                shelf.store(chat + at, chat + at - 1 if at else None, depth=at)
                for at in range(len(rows), len(rows) + chance.randrange(6))
                if shelf.residency.find(0, key(chat + at)) < 0
            ]
            if new:
                shelf.residency.touch_run(new, shelf.now_ns)
            pinned = [*rows[-1:], *new[-1:]] if chance.random() < 0.3 else []
            for row in pinned:
                shelf.residency.pin(row)
            left = 60 if turn % 15 == 0 else 300
            while len(policy) > left and (run := policy.next_victims(shelf.now_ns, min(at_once, len(policy) - left))):
                asked[-1] += 1
                order += [shelf.residency.key(row) for row in run]
                shelf.residency.remove_run(run, 0, Cause.EVICTED, shelf.now_ns)
            for row in pinned:
                shelf.residency.unpin(row)
        orders.append(order)
    assert orders[0] == orders[1]
    assert asked[0] > 300
    assert asked[1] < asked[0] / 4
