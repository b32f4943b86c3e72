"""The daemon sees what computing a block takes, between a get that missed and the put."""

from __future__ import annotations

from kvstored.store.remote import LONGEST_US, MOST_MISSES, ComputeTimes

MS = 1_000_000


def test_the_time_from_the_miss_to_the_put_is_shared_by_its_blocks() -> None:
    times = ComputeTimes()
    assert times.block_us(0) is None
    times.missed(0, b"k", 100 * MS)
    times.put(1, b"k", 4, 140 * MS)
    assert times.block_us(0) is None and times.block_us(1) is None, "another tenant's put says nothing"
    times.put(0, b"k", 4, 140 * MS)
    assert times.block_us(0) == 10_000
    times.put(0, b"k", 4, 150 * MS)
    assert times.block_us(0) == 10_000, "a put that no get missed says nothing"


def test_shorter_times_are_believed_sooner_than_longer_ones() -> None:
    times = ComputeTimes()
    for seen_us in (1000, 500, 5000, LONGEST_US + 1):
        times.missed(0, b"k", 0)
        times.put(0, b"k", 1, seen_us * 1000)
    assert times.block_us(0) == 750 + (5000 - 750) / 8


def test_misses_that_are_never_put_are_forgotten() -> None:
    times = ComputeTimes()
    for number in range(MOST_MISSES + 1):
        times.missed(0, number.to_bytes(16, "big"), 0)
    times.put(0, bytes(16), 1, MS)
    assert times.block_us(0) is None
    times.put(0, (1).to_bytes(16, "big"), 1, MS)
    assert times.block_us(0) == 1000
