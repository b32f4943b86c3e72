"""Policies against naive ones: the victim is found by looking at every row."""

from __future__ import annotations

import random
from collections import OrderedDict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvstore_simulator.policies import POLICIES, create
from kvstored.lifecycle import Cause
from kvstored.store.blocks.check import check
from tests.reference.blocks import Shelf, key, pack
from tests.reference.examples import examples
from tests.reference.policies import victims

HOST, NVME = 0, 1
# A small forest: block n's parent.
PARENTS = {0: None, 1: 0, 2: 1, 3: 1, 4: 3, 5: None, 6: 5, 7: 5, 8: 4}
numbers = st.sampled_from(sorted(PARENTS))


def path(number: int) -> list[int]:
    chain = [number]
    while (parent := PARENTS[chain[-1]]) is not None:
        chain.append(parent)
    return chain[::-1]


class PolicyAgainstNaive(RuleBasedStateMachine):
    """Ranks every row of the host tier by the definition of the policy, and filters by the definition of a
    leaf.
    """

    policy_name = "lru"
    window = 0  # blocks that a resume needs; 0: all, so that only leaves may leave

    def __init__(self) -> None:
        super().__init__()
        self.shelf = Shelf("host", "nvme")
        self.residency = self.shelf.residency
        self.residency.window_of = lambda fingerprint_id, group: self.window
        self.policy = create(self.policy_name, self.residency, HOST)
        self.stamps: dict[int, int] = {}  # row → when it was last used
        self.worth: dict[int, int] = {}  # row → K of LFU-DA, from its definition
        self.age = 0
        self.uses = 0
        self.pinned: set[int] = set()

    def stamp(self, row: int) -> None:
        self.uses += 1
        self.stamps[row] = self.uses
        self.worth[row] = self.age + min(64, self.residency.accesses(row))

    def rank(self, row: int) -> tuple[int, int]:
        return (self.worth[row] if self.policy_name == "lfu-ttl" else 0, self.stamps[row])

    def free_to_leave(self) -> list[int]:
        parents = set() if self.window else {self.residency.parent(row) for row in self.stamps}
        return [row for row in self.stamps if row not in parents and row not in self.pinned]

    def victim(self) -> int:
        row = min(self.free_to_leave(), key=self.rank, default=-1)
        if row >= 0:
            self.age = max(self.age, self.worth[row])
        return row

    @rule(number=numbers)
    def request(self, number: int) -> None:
        """Store or promote what is missing of a path, then use all of it, tail first."""
        chain = path(number)
        known = set(self.stamps)
        rows: list[int] = []
        for depth, block in enumerate(chain):
            row = self.residency.find(0, key(block))
            if row < 0:
                row = self.shelf.insert(block, PARENTS[block], depth=depth)
            if not self.residency.has(row, HOST):
                self.residency.attach(row, HOST, self.shelf.slot(), 1)
            rows.append(row)
        for row in rows:
            if row not in known:
                self.stamp(row)
        self.residency.touch_run(rows, 1)
        for row in reversed(rows):
            self.stamp(row)

    @rule(number=numbers)
    def use_one_alone(self, number: int) -> None:
        row = self.residency.find(0, key(number))
        if row in self.stamps:
            self.residency.touch_run([row], 1)
            self.stamp(row)

    @rule(number=numbers)
    def pin(self, number: int) -> None:
        row = self.residency.find(0, key(number))
        if row >= 0 and row not in self.pinned:
            self.residency.pin(row)
            self.pinned.add(row)

    @rule(number=numbers)
    def unpin(self, number: int) -> None:
        row = self.residency.find(0, key(number))
        if row in self.pinned:
            self.residency.unpin(row)
            self.pinned.discard(row)

    @rule()
    def evict(self) -> None:
        row = self.victim()
        assert self.policy.next_victim(1) == row
        if row >= 0 and self.residency.may_forget(row):
            self.residency.remove(row, Cause.EVICTED, 1)
            del self.stamps[row], self.worth[row]

    @rule()
    def demote(self) -> None:
        row = self.victim()
        assert self.policy.next_victim(1) == row
        if row >= 0:
            if not self.residency.has(row, NVME):
                self.residency.attach(row, NVME, self.shelf.slot(), 1)
            self.residency.detach(row, HOST)
            del self.stamps[row], self.worth[row]

    @rule(number=numbers)
    def quarantine(self, number: int) -> None:
        row = self.residency.find(0, key(number))
        if row >= 0:
            self.residency.remove(row, Cause.CORRUPT, 1)
            for held in (self.stamps, self.worth):
                held.pop(row, None)
            self.pinned.discard(row)

    @invariant()
    def the_victim_is_the_naive_one(self) -> None:
        assert self.policy.next_victim(1) == self.victim()
        assert len(self.policy) == len(self.stamps)
        assert check(self.residency) == []

    @invariant()
    def excluding_leads_to_every_other(self) -> None:
        free = self.free_to_leave()
        assert set(victims(self.policy, 1, 20)) == set(free)


class LfuAgainstNaive(PolicyAgainstNaive):
    policy_name = "lfu-ttl"

    @invariant()
    def excluding_leads_to_every_other(self) -> None:
        pass  # asking past the victim moves the age on, which the naive one does not follow


class AnyPolicy(PolicyAgainstNaive):
    """The rules of any order: the victim may leave, repeated calls name the same one, and all are reached."""

    def victim(self) -> int:
        row = self.policy.next_victim(1)
        free = self.free_to_leave()
        assert row in free or (row == -1 and not free)
        return row


class LruOfWindows(PolicyAgainstNaive):
    """The machine with a windowed layer group, whose blocks may leave from the middle of their chain."""

    window = 2


def _machine_of(name: str, window: int = 0) -> type[AnyPolicy]:
    return type(f"Any_{name}_{window}", (AnyPolicy,), {"policy_name": name, "window": window})


TestFifo = _machine_of("fifo").TestCase
TestSieve = _machine_of("sieve").TestCase
TestS3Fifo = _machine_of("s3-fifo").TestCase
TestArc = _machine_of("arc").TestCase
TestWTinyLfu = _machine_of("w-tinylfu").TestCase
TestGdsf = _machine_of("gdsf").TestCase
TestBestOfWindows = _machine_of("best", 1).TestCase
TestS3FifoOfWindows = _machine_of("s3-fifo", 2).TestCase
TestLfuOfWindows = _machine_of("lfu-ttl", 2).TestCase
for _case in (
    TestFifo, TestSieve, TestS3Fifo, TestArc, TestWTinyLfu, TestGdsf,
    TestBestOfWindows, TestS3FifoOfWindows, TestLfuOfWindows,
):  # fmt: skip
    _case.settings = settings(max_examples=examples(25), stateful_step_count=40, deadline=None)

for _machine in (PolicyAgainstNaive, LfuAgainstNaive, LruOfWindows):
    _machine.TestCase.settings = settings(max_examples=examples(50), stateful_step_count=40, deadline=None)
TestLru = PolicyAgainstNaive.TestCase
TestLfu = LfuAgainstNaive.TestCase
TestLruOfWindows = LruOfWindows.TestCase


def naive_lru_hits(requests: list[list[int]], capacity: int) -> int:
    """Leading resident run of each request; blocks touched tail first; the least recent leaves."""
    held: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for request in requests:
        for block in request:
            if block not in held:
                break
            hits += 1
        for block in reversed(request):
            held[block] = None
            held.move_to_end(block)
        while len(held) > capacity:
            held.popitem(last=False)
    return hits


def hits(policy_name: str, requests: list[list[int]], capacity: int) -> int:
    shelf = Shelf("host")
    policy = create(policy_name, shelf.residency, HOST)
    found = 0
    for request in requests:
        found += len(shelf.residency.find_run(0, pack(*request)))
        shelf.chain(*request)
        while len(shelf.residency) > capacity:
            shelf.residency.remove(policy.next_victim(1), Cause.EVICTED, 1)
    assert check(shelf.residency) == []
    return found


def trace(seed: int, requests: int) -> list[list[int]]:
    """Sessions over shared system prompts that grow by a few blocks a turn."""
    chance = random.Random(seed)
    fresh = iter(range(10**6))
    prompts = [[next(fresh) for _ in range(chance.randrange(1, 6))] for _ in range(3)]
    sessions: list[list[int]] = []
    made: list[list[int]] = []
    for _ in range(requests):
        if not sessions or chance.random() < 0.3:
            sessions.append(list(chance.choice(prompts)))
        session = chance.choice(sessions[-8:])
        session += [next(fresh) for _ in range(chance.randrange(4))]
        made.append(list(session))
    return made


@settings(max_examples=examples(25), deadline=None)
@given(seed=st.integers(0, 10**6), capacity=st.integers(1, 120))
def test_lru_hits_are_those_of_a_plain_lru(seed: int, capacity: int) -> None:
    requests = trace(seed, 60)
    assert hits("lru", requests, capacity) == naive_lru_hits(requests, capacity)


@pytest.mark.parametrize("policy_name", sorted(POLICIES))
def test_with_room_for_all_every_repeat_hits(policy_name: str) -> None:
    requests = trace(1, 80)
    seen: set[int] = set()
    repeats = 0
    for request in requests:
        repeats += sum(block in seen for block in request)
        seen.update(request)
    assert hits(policy_name, requests, len(seen)) == repeats
