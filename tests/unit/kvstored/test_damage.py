"""Blocks with a bad copy are removed or kept, and orphans leave in order: no device, and a clock that is given."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore_tiers.base import Completion, Outcome, OutcomeKind, Slot
from kvstore_tiers.testing.memory import MemoryTier
from kvstored.clock import NS_PER_S
from kvstored.lifecycle import Cause
from kvstored.store.blocks.check import check
from kvstored.store.blocks.orphans import find, snapshot
from kvstored.store.policies import Share, create
from kvstored.store.transfer.damage import QUIET_S, Damage
from kvstored.store.transfer.victims import OrphanQueue
from kvstored.telemetry import Counters
from tests.reference.blocks import Shelf, key
from tests.reference.tiers import HOST, NVME


class Quarantining(MemoryTier):
    """Remembers what is quarantined; its slots are a shelf's, so it frees nothing."""

    def __init__(self) -> None:
        super().__init__(1 << 20)
        self.bad: dict[Slot, str] = {}
        self.syncs = 0

    def quarantine(self, slot: Slot, reason: str) -> None:
        self.bad[slot] = reason

    def sync(self, done: Completion) -> None:
        self.syncs += 1
        done(Outcome(OutcomeKind.DONE))


class StoppedClock:
    def __init__(self) -> None:
        self.now_ns = 10 * NS_PER_S

    def monotonic_ns(self) -> int:
        return self.now_ns

    def wall_ns(self) -> int:
        return self.now_ns


class Scene:
    def __init__(self) -> None:
        self.shelf = Shelf("host", "nvme")
        self.residency = self.shelf.residency
        self.nvme, self.clock, self.counters = Quarantining(), StoppedClock(), Counters()
        self.retired: list[Slot] = []
        self.coming: set[int] = set()  # tokens of blocks whose write waits
        self.commit: Any = SimpleNamespace(backlog=self.coming, sync=lambda: self.nvme.sync(lambda outcome: None))
        self.damage = Damage(
            self.residency,
            [self.nvme, self.nvme],
            [lambda slot, tenant: self.retired.append(slot)] * 2,
            self.clock,
            self.counters,
            self.commit,
        )

    def in_both(self, number: int, parent: int | None = None) -> int:
        row = self.shelf.store(number, parent, tier=NVME)
        self.residency.attach(row, HOST, self.shelf.slot(), 1)
        return row


def test_a_bad_nvme_copy_goes_and_is_written_again_from_dram() -> None:
    scene = Scene()
    row = scene.in_both(1)
    slot = scene.residency.slot(row, NVME)
    scene.damage.found(NVME, row, "flipped")
    assert scene.nvme.bad == {slot: "flipped"} and scene.nvme.syncs == 1
    assert scene.residency.has(row, HOST) and not scene.residency.has(row, NVME)
    assert scene.damage.to_write_again == [scene.residency.token(row)] and scene.retired == []
    assert check(scene.residency) == []


def test_a_bad_dram_copy_goes_and_nvme_serves() -> None:
    scene = Scene()
    row = scene.in_both(1)
    slot = scene.residency.slot(row, HOST)
    scene.residency.pin(row)  # a reader holds a lease: the slot goes to limbo, which is `retire`'s business
    scene.damage.found(HOST, row, "flipped")
    assert scene.retired == [slot] and scene.nvme.bad == {}
    assert scene.residency.has(row, NVME) and not scene.residency.has(row, HOST)
    assert scene.residency.pin_count(row) == 1 and check(scene.residency) == []


@pytest.mark.parametrize("tier", [HOST, NVME])
def test_the_last_copy_takes_the_block_with_it_and_says_why(tier: int) -> None:
    scene = Scene()
    scene.shelf.chain(1, 2, 3, tier=tier)
    row = scene.residency.find(0, key(1))
    scene.damage.found(tier, row, "flipped")
    assert scene.residency.find(0, key(1)) == -1
    assert scene.residency.why_missing(0, key(1), 7).cause is Cause.CORRUPT
    assert (len(scene.retired), len(scene.nvme.bad)) == ((1, 0) if tier == HOST else (0, 1))
    assert (scene.counters["corrupt_blocks"], scene.counters["orphaned_blocks"]) == (1, 1)
    scene.shelf.store(1, None, tier=tier)
    assert snapshot(scene.residency) is None, "put again, the chain is whole"
    assert check(scene.residency) == []


def test_a_dram_copy_that_is_being_written_down_stays() -> None:
    scene = Scene()
    row = scene.shelf.store(1, tier=HOST)
    scene.residency.attach(row, NVME, scene.shelf.slot(), 1, filling=True)
    scene.damage.found(HOST, row, "flipped")
    assert scene.residency.has(row, HOST) and scene.retired == [] and scene.counters["corrupt_blocks"] == 0


def test_a_slot_is_logged_once_an_hour(caplog: pytest.LogCaptureFixture) -> None:
    scene = Scene()
    place = scene.shelf.slot()
    caplog.set_level(logging.ERROR)
    for number, after_s in ((1, 0), (2, 60), (3, QUIET_S + 60)):
        scene.clock.now_ns = (10 + after_s) * NS_PER_S
        row = scene.shelf.insert(number)
        scene.residency.attach(row, NVME, place._replace(generation=number), 1)
        scene.damage.found(NVME, row, "flipped")
    assert len(caplog.records) == 2 and scene.counters["corrupt_blocks"] == 3


# Orphans


@given(st.lists(st.integers(0, 30), min_size=1, max_size=40), st.sets(st.integers(0, 39), max_size=6))
def test_orphans_are_those_behind_a_missing_block(parents: list[int], taken: set[int]) -> None:
    """Against a walk from each block to the head of its chain."""
    shelf = Shelf("host")
    rows: list[int] = []
    for number, parent in enumerate(parents):
        above = parent if parent < number else None
        depth = 0 if above is None else shelf.residency.depth(rows[above]) + 1
        rows.append(shelf.store(number, above, depth=depth))
    residency = shelf.residency
    for number in taken:
        if number < len(rows):
            residency.remove(rows[number], Cause.CORRUPT, 1)

    def is_orphan(number: int) -> bool:
        row = residency.find(0, key(number))
        while row >= 0 and (row := residency.parent(row)) >= 0:
            if not residency.tier_mask(row):
                return residency.find(0, key(number)) >= 0
        return False

    expected = {residency.find(0, key(number)) for number in range(len(rows)) if is_orphan(number)}
    chains = snapshot(residency)
    found = [] if chains is None else [residency.current(token) for token in find(chains, 1).tokens.tolist()]
    assert set(found) == expected and len(found) == len(expected)
    depths = [residency.depth(row) for row in found]
    assert depths == sorted(depths, reverse=True)


def orphaned(*numbers: int, tenants: int = 1) -> tuple[Shelf, OrphanQueue]:
    """A chain whose first block is gone, on a shelf of one tier."""
    shelf = Shelf("host", tenants=tenants)
    shelf.chain(*numbers)
    shelf.residency.remove(shelf.residency.find(0, key(numbers[0])), Cause.CORRUPT, 1)
    chains = snapshot(shelf.residency)
    assert chains is not None
    orphans = OrphanQueue(shelf.residency)
    orphans.replace(find(chains, 1).by_tier)
    return shelf, orphans


def test_orphans_go_before_what_the_policy_would_choose_the_deepest_first() -> None:
    shelf, orphans = orphaned(1, 2, 3, 4)
    policy = create("lru", shelf.residency, 0)
    gone = []
    while (row := orphans.next(policy, set(), None)) >= 0:
        gone.append(shelf.residency.key(row))
        shelf.residency.remove(row, Cause.EVICTED, 2)
    assert gone == [key(4), key(3), key(2)]
    assert check(shelf.residency) == []


def test_an_orphan_stays_while_it_is_pinned_excluded_or_owed_to_its_tenant() -> None:
    shelf, orphans = orphaned(1, 2, tenants=2)
    policy = create("lru", shelf.residency, 0)
    row = shelf.residency.find(0, key(2))
    assert orphans.next(policy, set(), None) == row
    assert orphans.next(policy, {row}, None) == -1
    assert orphans.next(policy, set(), 1) == -1, "another tenant makes room among its own"
    assert orphans.next(policy, set(), 0) == row
    policy.set_share(0, Share(min_bytes=1))
    assert orphans.next(policy, set(), None) == -1
    policy.set_share(0, Share())
    shelf.residency.pin(row)
    assert orphans.next(policy, set(), None) == -1
    shelf.residency.unpin(row)
    shelf.residency.remove(row, Cause.DROPPED, 2)
    shelf.store(9)  # may take its row number
    assert orphans.next(policy, set(), None) == -1


def test_a_block_that_took_the_row_of_an_orphan_while_they_were_found_is_none() -> None:
    shelf = Shelf("host")
    shelf.chain(1, 2)
    residency = shelf.residency
    residency.remove(residency.find(0, key(1)), Cause.CORRUPT, 1)
    chains = snapshot(residency)
    row = residency.find(0, key(2))
    residency.remove(row, Cause.DROPPED, 2)  # while a thread walks over the copy
    assert shelf.store(10) == row or shelf.store(11) == row, "its row number is used again"
    assert chains is not None
    orphans = OrphanQueue(residency)
    orphans.replace(find(chains, 1).by_tier)
    assert orphans.next(create("lru", residency, 0), set(), None) == -1


def test_each_tier_has_its_own_orphans_and_none_is_lost_on_the_way() -> None:
    shelf = Shelf("host", "nvme")
    residency = shelf.residency
    shelf.chain(1, 2, 3, 4)
    for number in (3, 4):
        residency.attach(residency.find(0, key(number)), NVME, shelf.slot(), 1)
    residency.detach(residency.find(0, key(4)), HOST)
    residency.remove(residency.find(0, key(1)), Cause.CORRUPT, 1)
    chains = snapshot(residency)
    assert chains is not None
    orphans = OrphanQueue(residency)
    orphans.replace(find(chains, 2).by_tier)
    host, nvme = create("lru", residency, HOST), create("lru", residency, NVME)
    second, third, fourth = (residency.find(0, key(number)) for number in (2, 3, 4))
    residency.pin(third)
    for _ in range(3):  # kept where it is, round after round
        assert orphans.next(host, {second}, None) == -1
    residency.unpin(third)
    assert orphans.next(host, {second}, None) == third
    assert orphans.next(nvme, set(), None) == fourth
    residency.detach(third, HOST)
    assert orphans.next(host, set(), None) == second
