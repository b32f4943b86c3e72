"""Blocks of windowed and recurrent layer groups that no likely boundary needs leave first."""

from __future__ import annotations

import asyncio
import random
from itertools import pairwise

import numpy as np
import pytest

from kvstored.clock import ManualClock
from kvstored.lifecycle import Cause
from kvstored.store.blocks.check import check
from kvstored.store.policies import EvictionPolicy, Share
from kvstored.store.policies.boundaries import SPENT, Boundaries
from kvstored.store.policies.factory import create
from kvstored.store.policies.ranked import Priorities
from kvstored.store.transfer.victims import OrphanQueue, Victims
from tests.reference.blocks import Shelf, key


class Scene:
    """A tier with a policy over chains of one group, whose window is `window` blocks."""

    def __init__(self, window: int, policy: str = "lru") -> None:
        self.shelf, self.window = Shelf("host", "nvme"), window
        self.residency = self.shelf.residency
        self.residency.window_of = lambda fingerprint_id, group: self.window
        self.clock = ManualClock(10**9)
        self.policy: EvictionPolicy = create(policy, self.residency, 0)
        self.priorities = Priorities(self.residency)
        self.priorities.follow(self.policy)
        self.boundaries = Boundaries(self.residency, self.priorities, self.clock)
        self.victims = Victims(self.policy, self.residency, OrphanQueue(self.residency), self.priorities, self.clock)

    def put(self, *chain: int) -> None:
        """Store what is missing of a chain, as a put does."""
        known = {number for number in chain if self.residency.find(0, key(number)) >= 0}
        rows = self.shelf.chain(*chain)
        self.boundaries.stored([row for number, row in zip(chain, rows, strict=True) if number not in known])

    def put_after_gap(self, before: range, *chain: int) -> None:
        """Store `chain`, whose first block continues the last of `before`, which may not be stored."""
        residency = self.residency
        rows = [self.shelf.store(number, parent) for parent, number in pairwise((before[-1], *chain))]
        self.boundaries.stored(rows, [key(number) for number in before[:-1]])
        residency.touch_run(rows, 1)

    def row(self, number: int) -> int:
        return self.residency.find(0, key(number))

    def spent(self, *numbers: int) -> list[int]:
        return [number for number in numbers if self.residency.priority(self.row(number)) == SPENT]

    def evict(self) -> int:
        """Evict one block; its number."""
        row = self.victims.next(())
        assert row >= 0 and self.residency.is_evictable(row, 0)
        number = int.from_bytes(self.residency.key(row), "big") - 1
        above = self.residency.parent(row)
        self.residency.remove(row, Cause.EVICTED, 1)
        if above >= 0 and self.residency.rows.mask[above]:
            self.boundaries.lost(above, self.residency.find_any(0, key(number)) < 0)
        return number


@pytest.mark.parametrize("policy", ["lru", "s3-fifo", "lfu-ttl", "chain-hazard"])
def test_blocks_before_the_window_leave_first_and_the_tail_stays(policy: str) -> None:
    scene = Scene(2, policy)
    scene.put(*range(6))
    scene.put(100, 101)
    assert scene.spent(*range(6), 100, 101) == [0, 1, 2, 3]
    assert sorted(scene.evict() for _ in range(4)) == [0, 1, 2, 3]
    assert scene.row(4) >= 0 and scene.row(5) >= 0 and check(scene.residency) == []


def test_a_longer_prompt_moves_the_window_on() -> None:
    scene = Scene(2)
    scene.put(0, 1, 2)
    assert scene.spent(0, 1, 2) == [0]
    scene.put(0, 1, 2, 3)
    assert scene.spent(0, 1, 2, 3) == [0, 1]
    scene.put(*range(9))
    assert scene.spent(*range(9)) == list(range(7))


def test_what_another_prompt_branched_from_stays() -> None:
    scene = Scene(2)
    scene.put(*range(8))
    scene.put(0, 1, 2, 3, 20, 21, 22, 23)
    assert scene.spent(*range(8)) == [0, 1, 4, 5], "2 and 3 are before the branch"
    assert scene.spent(20, 21, 22, 23) == [20, 21]
    scene.put(0, 1, 30)
    assert scene.spent(*range(4)) == []


def test_what_was_stored_before_a_gap_ends_no_prompt() -> None:
    scene = Scene(3)
    scene.put(*range(6))
    scene.put_after_gap(range(9), 9, 10, 11, 12)
    assert scene.spent(*range(6), 9, 10, 11, 12) == [*range(6), 9]
    scene.put_after_gap(range(14), 14)
    assert scene.spent(*range(6), 9, 10, 11, 12, 14) == [*range(6), 9, 10, 11, 12]
    assert list(np.flatnonzero(~scene.boundaries._spent([0]))) == [scene.row(14)]
    scene.put(0, 1, 2, 3, 20)
    assert scene.spent(*range(6)) == [0, 4, 5], "another prompt has branched behind 3"
    assert check(scene.residency) == []
    while len(scene.residency):
        scene.evict()
    assert scene.residency.rows.live == 0 and check(scene.residency) == []


def test_keys_before_a_gap_that_are_forged_make_no_circle() -> None:
    scene = Scene(2)
    scene.put_after_gap(range(5), 5, 6)
    residency = scene.residency
    placeholder = residency.parent(scene.row(5))
    residency.continue_after(placeholder, scene.row(6))
    assert residency.parent(placeholder) < 0 and check(residency) == []
    residency.continue_after(scene.row(6), placeholder)
    assert residency.parent(scene.row(6)) == scene.row(5) and check(residency) == []


@pytest.mark.parametrize("last", [7, 6])
def test_what_is_left_of_a_window_leaves_next(last: int) -> None:
    """A window that lost a block is of no use, unless another prompt branched there."""
    scene = Scene(4)
    scene.put(*range(100, 108))
    scene.put(*range(8))
    assert sorted(scene.evict() for _ in range(8)) == [0, 1, 2, 3, 100, 101, 102, 103]
    row = scene.row(last)
    scene.residency.remove(row, Cause.EVICTED, 1)
    scene.boundaries.lost(scene.row(last - 1), last == 7)
    assert scene.spent(*range(4, last)) == list(range(4, last))
    assert {scene.evict() for _ in range(last - 4)} == set(range(4, last))
    assert scene.spent(104, 105, 106, 107) == []


def test_a_shorter_boundary_takes_the_place_of_one_that_is_lost() -> None:
    scene = Scene(2)
    scene.put(0, 1, 2, 3)
    scene.residency.remove(scene.row(3), Cause.EVICTED, 1)
    scene.boundaries.lost(scene.row(2), True)
    assert scene.spent(0, 1, 2) == [0], "the window before 3 is there"


def test_a_recurrent_group_keeps_the_state_at_the_end_and_at_a_branch() -> None:
    scene = Scene(1)
    scene.put(*range(6))
    assert scene.spent(*range(6)) == [0, 1, 2, 3, 4]
    scene.put(0, 1, 2, 30)
    assert scene.spent(*range(6)) == [0, 1, 3, 4]


def test_a_group_that_needs_all_blocks_has_none_to_spare() -> None:
    scene = Scene(0)
    scene.put(*range(6))
    scene.put(0, 1, 9)
    assert scene.spent(*range(6), 9) == [] and not scene.priorities.in_tier
    assert [scene.evict() for _ in range(2)] == [5, 4], "the suffix of a chain goes first"


def test_a_priority_that_was_asked_for_stays() -> None:
    scene = Scene(1)
    scene.put(0, 1, 2)
    for number in (0, 1):
        scene.priorities.set(scene.row(number), 3, 1)
    scene.put(0, 1, 2, 3, 4)
    assert [scene.residency.priority(scene.row(number)) for number in range(5)] == [3, 3, SPENT, SPENT, 0]


def test_a_minimum_of_a_tenant_keeps_even_what_no_boundary_needs() -> None:
    scene = Scene(1)
    scene.put(0, 1, 2)
    scene.policy.set_share(0, Share(min_bytes=3 * 8192))
    assert scene.victims.next(()) == -1


def test_windows_that_become_known_later_count_for_what_is_stored() -> None:
    scene = Scene(0)
    scene.put(*range(6))
    for _ in range(3):  # asking parks what may not leave
        assert scene.evict() >= 0
    scene.put(*range(6))
    scene.put(0, 1, 2, 20, 21)
    scene.window = 2
    assert len(list(scene.boundaries.learn())) > 0 and list(scene.boundaries.learn()) == []
    assert scene.spent(*range(6), 20, 21) == [0, 3]
    assert [scene.evict() for _ in range(8)][:2] in ([0, 3], [3, 0])
    assert len(scene.residency) == 0 and check(scene.residency) == []


@pytest.mark.parametrize("policy", ["lru", "chain-hazard"])
def test_evicted_blocks_leave_few_rows_behind(policy: str) -> None:
    """The ends of long chains stay long: an index that kept a row for each block before them would grow for ever."""
    scene, chance = Scene(2, policy), random.Random(1)
    for number in range(1, 60):
        scene.put(0, 1, *range(1000 * number, 1000 * number + chance.randrange(1, 60)))
        while len(scene.residency) > 40:
            scene.evict()
        assert check(scene.residency) == []
        assert scene.residency.rows.live <= 4 * len(scene.residency)
    for number in range(1, 60):  # some of it comes back
        scene.put(0, 1, *range(1000 * number, 1000 * number + 30))
        while len(scene.residency) > 40:
            scene.evict()
    assert check(scene.residency) == []
    while len(scene.residency):
        scene.evict()
    assert scene.residency.rows.live == 0 and check(scene.residency) == []


def test_a_client_that_makes_a_window_known_holds_up_nobody() -> None:
    """The fingerprint has a window, and blocks of it were stored by a daemon before: they are marked bit by bit."""

    async def run() -> None:
        scene = Scene(0)
        scene.put(*range(2000))
        scene.window = 2
        scene.boundaries.learn_soon()
        assert scene.residency.kind_window == [2], "at once"
        marked = 0
        while marked < 1998:
            before, marked = marked, len(scene.spent(*range(2000)))
            assert marked - before <= 512
            await asyncio.sleep(0)
        assert scene.spent(1998, 1999) == []

    asyncio.run(run())


def test_step_by_step_is_the_same_as_all_at_once() -> None:
    chance = random.Random(3)
    for window in (1, 2, 3, 5):
        for _ in range(60):
            scene, chains, fresh = Scene(window), [[0]], iter(range(1, 1000))
            for _ in range(12):
                base = chance.choice(chains)
                chain = base[: chance.randrange(1, len(base) + 1)] + [
                    next(fresh) for _ in range(chance.randrange(1, 6))
                ]
                chains.append(chain)
                scene.put(*chain)
            numbers = sorted({number for chain in chains for number in chain})
            rows = [scene.row(number) for number in numbers]
            at_once = scene.boundaries._spent([0])[rows]
            step_by_step = [scene.residency.priority(row) == SPENT for row in rows]
            # Where a chain ended before a longer one continued it elsewhere, a block may be kept that is not needed.
            assert np.all(at_once | ~np.array(step_by_step)), (window, chains)
            assert all(needed_by_definition(scene, chains, number, window) <= (not spent)
                       for number, spent in zip(numbers, step_by_step, strict=True))  # fmt: skip


def needed_by_definition(scene: Scene, chains: list[list[int]], number: int, window: int) -> bool:
    parents = {below: above for chain in chains for above, below in pairwise(chain)}
    children: dict[int, int] = {}
    for above in parents.values():
        children[above] = children.get(above, 0) + 1
    for boundary in {number for chain in chains for number in chain}:
        if children.get(boundary, 0) == 1:
            continue
        block: int | None = boundary
        for _ in range(window):
            if block == number:
                return True
            block = parents.get(block) if block is not None else None
    return False
