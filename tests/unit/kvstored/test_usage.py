"""Uses of blocks come back over a restart: the same copies get their counts and times back, and no others do."""

from __future__ import annotations

from collections.abc import Generator
from typing import TypeVar

import numpy as np
import pytest

from kvstored.clock import NS_PER_S
from kvstored.lifecycle import Cause
from kvstored.store.blocks.usage import GROUP_BYTES, ROW, UsageRows, described
from tests.reference.blocks import Shelf
from tests.reference.tiers import HOST, NVME

WALL_NS = 10**18
BLOCKS = 40
LATER_NS = 5000 * NS_PER_S
Found = TypeVar("Found")


def ended(steps: Generator[None, None, Found]) -> Found:
    while True:
        try:
            next(steps)
        except StopIteration as end:
            found: Found = end.value
            return found


def used_shelf() -> Shelf:
    """Blocks on NVMe, of which block n was used n times, the last time n seconds after the start."""
    shelf = Shelf("host", "nvme")
    for number in range(1, BLOCKS + 1):
        shelf.store(number, tier=NVME)
    for number in range(1, BLOCKS + 1):
        row = number - 1
        for _ in range(number):
            shelf.residency.touch_run([row], number * NS_PER_S)
    return shelf


def forget(shelf: Shelf) -> None:
    """Forget as a start does: every block is taken over now, and not used."""
    rows = shelf.residency.rows
    for row in range(rows.capacity):
        rows.accesses[row], rows.last_access_ns[row] = 0, LATER_NS


def saved(usage: UsageRows, now_ns: int) -> list[tuple[bytes, bytes]]:
    """Save; return what differs from what was saved before."""
    digests = ended(usage.digests())
    parts = [ended(usage.entries(part, len(digests), WALL_NS - now_ns)) for part in usage.parts(digests)]
    usage.saved = digests
    return sorted(entry for part in parts for entry in part)


def apply(shelf: Shelf, entries: list[tuple[bytes, bytes]], now_ns: int, wall_ns: int, tier: int = NVME) -> int:
    usage = UsageRows(shelf.residency, tier)
    return ended(usage.apply(ended(usage.known(entries)), now_ns, wall_ns, now_ns))


def test_counts_and_the_order_of_use_come_back() -> None:
    shelf = used_shelf()
    before = [shelf.residency.accesses(row) for row in range(BLOCKS)]
    entries = saved(UsageRows(shelf.residency, NVME), 100 * NS_PER_S)
    forget(shelf)
    assert apply(shelf, entries, LATER_NS, WALL_NS + 50 * NS_PER_S) == BLOCKS
    assert [shelf.residency.accesses(row) for row in range(BLOCKS)] == before
    for row in range(BLOCKS):
        age_s = 150 - (row + 1)
        assert shelf.residency.last_access_ns(row) == (5000 - age_s) * NS_PER_S


def test_ages_that_are_older_than_the_clock_keep_their_order() -> None:
    """The monotonic clock is younger than the blocks after the machine started anew."""
    shelf = used_shelf()
    entries = saved(UsageRows(shelf.residency, NVME), 100 * NS_PER_S)
    rows = shelf.residency.rows
    for row in range(rows.capacity):
        rows.accesses[row], rows.last_access_ns[row] = 0, 10 * NS_PER_S
    assert apply(shelf, entries, 10 * NS_PER_S, WALL_NS + 3600 * NS_PER_S) == BLOCKS
    times = [shelf.residency.last_access_ns(row) for row in range(BLOCKS)]
    assert times == sorted(times) and times[0] >= 0 and times[-1] <= 10 * NS_PER_S
    assert len(set(times)) == BLOCKS


def test_what_was_used_before_it_was_read_stays_the_latest() -> None:
    shelf = used_shelf()
    usage = UsageRows(shelf.residency, NVME)
    entries = saved(usage, 100 * NS_PER_S)
    forget(shelf)
    known = ended(usage.known(entries))
    shelf.residency.touch_run([0, 1], LATER_NS + 3)
    shelf.residency.remove(2, Cause.DROPPED, LATER_NS + 4)
    assert ended(usage.apply(known, LATER_NS + 9, WALL_NS, LATER_NS)) == BLOCKS - 1
    assert [shelf.residency.last_access_ns(row) for row in (0, 1)] == [LATER_NS + 3] * 2
    assert [shelf.residency.accesses(row) for row in (0, 1)] == [1 + 1, 2 + 1], "of before, and since"
    assert shelf.residency.last_access_ns(3) < LATER_NS


def test_another_block_in_the_same_place_gets_nothing() -> None:
    shelf, other = used_shelf(), Shelf("host", "nvme")
    entries = saved(UsageRows(shelf.residency, NVME), 100 * NS_PER_S)
    for number in range(1, BLOCKS + 1):
        other.store(number if number > 10 else number + 1000, tier=NVME)
    forget(other)
    assert apply(other, entries, LATER_NS, WALL_NS) == BLOCKS - 10
    assert apply(other, entries, LATER_NS, WALL_NS, HOST) == 0
    assert apply(other, [], LATER_NS, WALL_NS) == 0


def test_only_what_has_changed_is_saved_again() -> None:
    shelf = Shelf("host", "nvme")
    rows = [shelf.store(number, tier=NVME) for number in range(1, 2001)]
    usage = UsageRows(shelf.residency, NVME)
    assert saved(usage, 0) == [], "of blocks that were not used there is nothing to save"
    shelf.residency.touch_run(rows, 1)
    everything = dict(saved(usage, 0))
    assert len(everything) >= 2000 // 64 and all(len(value) == GROUP_BYTES for value in everything.values())
    assert saved(usage, 0) == []
    shelf.residency.touch_run([rows[7]], LATER_NS)
    changed = dict(saved(usage, 0))
    assert 1 <= len(changed) < len(everything) / 2, "its bucket alone"
    (differs,) = [key for key, value in changed.items() if everything[key] != value]
    before, after = (np.frombuffer(each[differs], ROW) for each in (everything, changed))
    assert (before != after).sum() == 1
    shelf.residency.remove(rows[7], Cause.EVICTED, LATER_NS)
    gone = np.frombuffer(dict(saved(usage, 0))[differs], ROW)
    assert (gone["accesses"] > 0).sum() == (after["accesses"] > 0).sum() - 1, "no trace of it is kept"


@pytest.mark.parametrize("at", [0, 8, 16, 18])
def test_a_damaged_row_is_left_out_and_counted(at: int) -> None:
    shelf = used_shelf()
    usage = UsageRows(shelf.residency, NVME)
    ((key, value), *rest) = saved(usage, 100 * NS_PER_S)
    row = int(np.flatnonzero(np.frombuffer(value, ROW)["accesses"])[0])
    spoilt = bytearray(value)
    spoilt[row * ROW.itemsize + at] ^= 4
    forget(shelf)
    known = ended(usage.known([(key, bytes(spoilt)), *rest]))
    assert known.wrong == 1 and len(known.uses) == BLOCKS - 1
    assert described(key, bytes(spoilt))["wrong rows"] == 1
    other_place = (key[:-1] + bytes([key[-1] ^ 1]), value)
    assert len(ended(usage.known([other_place])).uses) == 0, "a value in another's place is none"
    cut = ended(usage.known([(key, value[:-1])]))
    assert len(cut.uses) == 0 and cut.wrong > 0


def test_rows_of_dram_are_those_of_blocks_that_nvme_has_not() -> None:
    shelf = Shelf("host", "nvme")
    alone, both = shelf.store(1), shelf.store(2)
    shelf.residency.attach(both, NVME, shelf.slot(), 1)
    shelf.residency.touch_run([alone], 1)
    shelf.residency.touch_run([both], 1)
    entries = saved(UsageRows(shelf.residency, HOST, alone=True), 0)
    rows = np.concatenate([np.frombuffer(value, ROW) for _, value in entries])
    assert (rows["accesses"] > 0).sum() == 1 and alone != both


@pytest.mark.parametrize("work", ["digests", "entries", "known"])
def test_blocks_are_stored_between_two_steps(work: str) -> None:
    """The index grows while what is saved is collected or read: no step holds on to its columns."""
    shelf = used_shelf()
    usage = UsageRows(shelf.residency, NVME)
    digests = ended(usage.digests())
    (part,) = usage.parts(digests)
    steps: Generator[None, None, object] = {
        "digests": lambda: usage.digests(),
        "entries": lambda: usage.entries(part, len(digests), WALL_NS),
        "known": lambda: usage.known(ended(usage.entries(part, len(digests), WALL_NS))),
    }[work]()
    next(steps)
    capacity, number = shelf.residency.rows.capacity, BLOCKS
    while shelf.residency.rows.capacity == capacity:
        number += 1
        shelf.store(number, tier=NVME)
    ended(steps)
