"""Leases and limbo against a plain model: a slot is free exactly when its block has left and no client may read it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvstore_tiers.base import Slot
from kvstored.clock import ManualClock
from kvstored.store.leases import LeaseTable
from tests.reference.examples import examples

SLOT_BYTES = 8192
TTL_NS = 1000
SLOTS = 6


def slot(number: int, generation: int = 1) -> Slot:
    return Slot(number // 4, number % 4 * SLOT_BYTES, SLOT_BYTES, generation)


class Table:
    """A LeaseTable that remembers what it unpinned and freed."""

    def __init__(self) -> None:
        self.pins: Counter[int] = Counter()
        self.freed: list[Slot] = []
        self.clock = ManualClock()
        self.leases = LeaseTable(self._unpin, self.freed.append)

    def _unpin(self, rows: Iterable[int]) -> None:
        self.pins.subtract(rows)

    def grant(self, *rows: int, session: int = 1, tenant: int = 0) -> int:
        self.pins.update(rows)
        expires_ns = self.clock.monotonic_ns() + TTL_NS
        return self.leases.grant(session, tenant, list(rows), [slot(row) for row in rows], expires_ns).lease_id

    def later(self, ns: int) -> int:
        return self.leases.expire(self.clock.advance(ns=ns))


def test_a_slot_without_readers_is_freed_at_once() -> None:
    table = Table()
    table.leases.retire(slot(0), 0)
    assert table.freed == [slot(0)]


def test_bytes_outlive_an_expired_lease_until_its_reader_lets_go() -> None:
    table = Table()
    lease = table.grant(0)
    assert table.later(TTL_NS - 1) == 0 and table.pins[0] == 1
    assert table.later(1) == 1 and table.pins[0] == 0
    table.leases.retire(slot(0), 0)
    assert (table.freed, table.leases.limbo_bytes(0), table.leases.limbo_bytes(1)) == ([], SLOT_BYTES, 0)
    assert table.leases.release(1, lease)
    assert (table.freed, table.leases.limbo_bytes()) == ([slot(0)], 0)
    assert not table.leases.release(1, lease), "released twice"


def test_the_last_of_several_readers_ends_limbo() -> None:
    table = Table()
    first, second = table.grant(0), table.grant(0, session=2)
    table.later(TTL_NS)
    table.leases.retire(slot(0), 0)
    table.leases.release(1, first)
    assert table.freed == []
    assert table.leases.release_session(2) == 1
    assert table.freed == [slot(0)]
    assert not table.leases.release(2, second)


def test_another_session_can_neither_renew_nor_release() -> None:
    table = Table()
    lease = table.grant(0)
    assert not table.leases.renew(2, lease, 10**9)
    assert not table.leases.release(2, lease)
    assert not table.leases.release(1, lease + 1)
    assert table.pins[0] == 1


def test_a_renewed_lease_lives_longer_and_an_expired_one_cannot_be_renewed() -> None:
    table = Table()
    lease, other = table.grant(0), table.grant(1)
    table.clock.advance(ns=TTL_NS // 2)
    assert table.leases.renew(1, lease, table.clock.monotonic_ns() + TTL_NS)
    assert table.later(TTL_NS // 2) == 1 and table.pins == {0: 1, 1: 0}
    assert not table.leases.renew(1, other, 10**9)
    assert table.later(TTL_NS) == 1 and table.pins[0] == 0


def test_retiring_a_slot_twice_is_a_broken_invariant() -> None:
    table = Table()
    table.grant(0)
    table.leases.retire(slot(0), 0)
    with pytest.raises(RuntimeError, match="retired twice"):
        table.leases.retire(slot(0), 0)


def test_an_expired_lease_does_not_count_against_its_session() -> None:
    table = Table()
    first, second = table.grant(0), table.grant(1)
    assert (table.leases.count(1), table.leases.live) == (2, 2)
    table.later(TTL_NS)
    assert (table.leases.count(1), table.leases.live, len(table.leases)) == (0, 0, 2)
    table.leases.retire(slot(0), 0)
    assert table.freed == [], "but its bytes are kept"
    assert table.leases.release(1, first) and table.leases.release(1, second) and table.freed == [slot(0)]
    assert (table.leases.count(1), len(table.leases)) == (0, 0)


def test_leases_that_nobody_releases_are_joined_and_keep_their_bytes() -> None:
    table = Table()
    table.leases = LeaseTable(table._unpin, table.freed.append, expired_limit=4)
    leases = [table.grant(number % 3) for number in range(40)]
    table.later(TTL_NS)
    assert len(table.leases) <= 5 and sum(table.pins.values()) == 0
    for number in range(3):
        table.leases.retire(slot(number), 0)
    assert table.freed == [] and table.leases.limbo_bytes(0) == 3 * SLOT_BYTES
    assert not table.leases.release(1, leases[0]), "joined"
    assert table.leases.release(1, leases[-1]) and table.freed == []
    table.leases.release_session(1)
    assert sorted(table.freed) == [slot(0), slot(1), slot(2)] and len(table.leases) == 0


def test_further_runs_of_one_request_do_not_count() -> None:
    table = Table()
    table.grant(0)
    table.leases.grant(1, 0, [], [slot(1)], TTL_NS, continues=True)
    assert (table.leases.count(1), table.leases.live) == (1, 2)
    table.leases.release_session(1)
    assert (table.leases.count(1), table.leases.live) == (0, 0)


class LeaseMachine(RuleBasedStateMachine):
    """Model: leases as (session, rows, expiry, expired); a block in each slot until it is retired."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = ManualClock()
        self.freed: list[Slot] = []
        self.pins: Counter[int] = Counter()
        self.table = LeaseTable(self._unpin, self._free)
        self.model: dict[int, tuple[int, list[int]]] = {}
        self.expiry: dict[int, int] = {}
        self.expired: set[int] = set()
        self.generation = dict.fromkeys(range(SLOTS), 1)
        self.in_limbo: set[int] = set()

    def _unpin(self, rows: Iterable[int]) -> None:
        self.pins.subtract(rows)

    def _free(self, freed: Slot) -> None:
        number = freed.container * 4 + freed.offset // SLOT_BYTES
        assert freed == slot(number, self.generation[number]), "freed under another generation"
        assert not any(number in rows for _, rows in self.model.values()), "freed under a reader"
        self.in_limbo.discard(number)
        self.generation[number] += 1

    @rule(session=st.integers(1, 3), rows=st.lists(st.integers(0, SLOTS - 1), min_size=1, max_size=4))
    def grant(self, session: int, rows: list[int]) -> None:
        rows = [row for row in rows if row not in self.in_limbo]
        if not rows:
            return
        self.pins.update(rows)
        expires_ns = self.clock.monotonic_ns() + TTL_NS
        slots = [slot(row, self.generation[row]) for row in rows]
        lease = self.table.grant(session, 0, list(rows), slots, expires_ns)
        self.model[lease.lease_id] = (session, rows)
        self.expiry[lease.lease_id] = expires_ns

    @precondition(lambda self: self.model)
    @rule(data=st.data(), session=st.integers(1, 3))
    def release(self, data: st.DataObject, session: int) -> None:
        lease_id = data.draw(st.sampled_from(sorted(self.model)))
        owner = self.model[lease_id]
        mine = owner[0] == session
        if mine:
            del self.model[lease_id]
        assert self.table.release(session, lease_id) == mine

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def renew(self, data: st.DataObject) -> None:
        lease_id = data.draw(st.sampled_from(sorted(self.model)))
        expires_ns = self.clock.monotonic_ns() + TTL_NS
        renewed = self.table.renew(self.model[lease_id][0], lease_id, expires_ns)
        assert renewed == (lease_id not in self.expired)
        if renewed:
            self.expiry[lease_id] = expires_ns

    @rule(ns=st.integers(0, TTL_NS))
    def time_passes(self, ns: int) -> None:
        now_ns = self.clock.advance(ns=ns)
        due = {one for one in self.model if one not in self.expired and self.expiry[one] <= now_ns}
        assert self.table.expire(now_ns) == len(due)
        self.expired |= due

    @rule(session=st.integers(1, 3))
    def session_ends(self, session: int) -> None:
        mine = [lease_id for lease_id, (owner, _) in self.model.items() if owner == session]
        for lease_id in mine:
            del self.model[lease_id]
        assert self.table.release_session(session) == len(mine)

    @rule(number=st.integers(0, SLOTS - 1))
    def evict(self, number: int) -> None:
        if self.pins[number] or number in self.in_limbo:
            return
        read = any(number in rows for _, rows in self.model.values())
        if read:
            self.in_limbo.add(number)
        self.table.retire(slot(number, self.generation[number]), 0)
        assert self.table.has_readers(slot(number)) == read

    @invariant()
    def books_agree(self) -> None:
        pins: Counter[int] = Counter()
        for lease_id, (_, rows) in self.model.items():
            if lease_id not in self.expired:
                pins.update(rows)
        assert +self.pins == pins and min(self.pins.values(), default=0) >= 0
        assert len(self.table) == len(self.model)
        assert self.table.limbo_bytes(0) == len(self.in_limbo) * SLOT_BYTES


LeaseMachine.TestCase.settings = settings(max_examples=examples(60), stateful_step_count=40, deadline=None)
TestLeaseMachine = LeaseMachine.TestCase
