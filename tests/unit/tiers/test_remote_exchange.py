"""Shared memory of a remote tier: parts never overlap, what is given back is had again, a waiting caller is served."""

from __future__ import annotations

import itertools
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore_tiers.range_allocator import PART_ALIGNMENT, RangeAllocator
from kvstore_tiers.remote.store import Exchange
from tests.reference.running_daemon import eventually

PATIENCE_S = 30.0


@given(st.lists(st.one_of(st.integers(1, 5 * PART_ALIGNMENT), st.none()), max_size=60))
def test_parts_do_not_overlap_and_none_is_lost(steps: list[int | None]) -> None:
    end = 16 * PART_ALIGNMENT
    parts, out = RangeAllocator(PART_ALIGNMENT, end), list[tuple[int, int]]()
    for step in steps:
        used = sum(nbytes for _, nbytes in out)
        if step is None and out:
            parts.give_back(out.pop(len(out) // 2))
        elif step is not None and used + step <= (end - PART_ALIGNMENT) // 3:  # fits however it is split
            out.append(parts.take(step))
        places = sorted(out)
        assert all(a + n <= b for (a, n), (b, _) in itertools.pairwise(places))
        assert all(a >= PART_ALIGNMENT and a + n <= end for a, n in places)
    for part in out:
        parts.give_back(part)
    assert parts.take(parts.largest_bytes) == (PART_ALIGNMENT, end - PART_ALIGNMENT)


def test_a_caller_waits_for_room_and_ends_with_the_tier() -> None:
    parts = RangeAllocator(0, 4 * PART_ALIGNMENT)
    whole = parts.take(4 * PART_ALIGNMENT)
    taken: list[tuple[int, int]] = []
    waiting = threading.Thread(target=lambda: taken.append(parts.take(PART_ALIGNMENT)))
    waiting.start()
    parts.give_back(whole)
    waiting.join(PATIENCE_S)
    assert taken == [(0, PART_ALIGNMENT)]
    parts.close()
    with pytest.raises(OSError, match="closed"):
        parts.take(1)


def test_a_further_part_is_had_at_once_or_not_and_several_come_back_together() -> None:
    parts = RangeAllocator(0, 4 * PART_ALIGNMENT)
    first, second = parts.take(PART_ALIGNMENT), parts.take_now(PART_ALIGNMENT)
    assert second == (PART_ALIGNMENT, PART_ALIGNMENT)
    assert parts.take_now(3 * PART_ALIGNMENT) is None
    taken: list[tuple[int, int]] = []
    waiting = threading.Thread(target=lambda: taken.append(parts.take(4 * PART_ALIGNMENT)))
    waiting.start()
    assert eventually(lambda: parts.waiting == 1)
    assert parts.take_now(PART_ALIGNMENT) is None, "another caller was first"
    parts.give_back(first, second)
    waiting.join(PATIENCE_S)
    assert taken == [(0, 4 * PART_ALIGNMENT)]
    parts.close()
    parts.give_back(*taken)
    assert parts.take_now(1) is None


def test_a_large_part_is_not_passed_by_small_ones() -> None:
    parts = RangeAllocator(0, 4 * PART_ALIGNMENT)
    small, large = parts.take(PART_ALIGNMENT), parts.take(3 * PART_ALIGNMENT)
    taken: dict[int, tuple[int, int]] = {}

    def take(pages: int) -> None:
        taken[pages] = parts.take(pages * PART_ALIGNMENT)

    threads = [threading.Thread(target=take, args=(pages,)) for pages in (3, 1)]
    for number, thread in enumerate(threads, 1):
        thread.start()
        assert eventually(lambda number=number: parts.waiting == number)  # type: ignore[misc]
    parts.give_back(small)
    parts.give_back(large)
    for thread in threads:
        thread.join(PATIENCE_S)
    assert taken == {3: (0, 3 * PART_ALIGNMENT), 1: (3 * PART_ALIGNMENT, PART_ALIGNMENT)}, "who asked first"


def test_the_memory_is_that_of_the_descriptor() -> None:
    exchange = Exchange(2 * PART_ALIGNMENT)
    exchange.memory[5:8] = b"abc"
    with open(exchange.fd, "rb", closefd=False) as file:
        assert file.read(8)[5:] == b"abc"
    exchange.close()
