"""Storing and removing many blocks at once does what one at a time does."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from kvstored.lifecycle import Cause
from kvstored.store.blocks.check import check
from kvstored.store.blocks.runs import SlotRun
from kvstored.store.policies import create
from tests.reference.blocks import BLOCK_BYTES, Shelf, key


def store(shelf: Shelf, numbers: range, parent: int) -> list[int]:
    return shelf.residency.store_run(
        0, [key(number) for number in numbers], parent, 0, [shelf.slot() for _ in numbers],
        fingerprint_id=7, group=0, payload_bytes=4096, now_ns=shelf.now_ns,
    )  # fmt: skip


def test_a_run_continues_its_parent_as_single_blocks_do() -> None:
    one, many = Shelf(), Shelf()
    single = one.chain(*range(6))
    head = store(many, range(2), -1)
    rest = store(many, range(2, 6), head[-1])
    many.residency.touch_run(head + rest, many.now_ns)
    assert check(many.residency) == []
    for row, other in zip(head + rest, single, strict=True):
        for fact in ("key", "parent_key", "depth", "accesses", "payload_bytes", "tier_mask", "last_access_ns"):
            assert getattr(many.residency, fact)(row) == getattr(one.residency, fact)(other), fact
    assert many.residency.tenant_bytes(0, 0) == 6 * BLOCK_BYTES
    with pytest.raises(RuntimeError, match="stored already"):
        store(many, range(5, 7), rest[-2])


def test_chosen_blocks_leave_until_none_is_chosen() -> None:
    shelf = Shelf()
    policy = create("lru", shelf.residency, 0)
    rows = shelf.chain(*range(5))
    other = shelf.chain(10)
    slots = [shelf.residency.slot(row, 0) for row in rows]
    freed = shelf.residency.remove_chosen(0, policy.next_victim, 3, Cause.EVICTED, 2)
    assert freed == slots[:1:-1], "from the tail"
    assert check(shelf.residency) == []
    assert len(shelf.residency) == len(policy) == 3
    assert shelf.residency.why_missing(0, key(4)).cause is Cause.EVICTED
    shelf.residency.pin(other[0])
    assert len(shelf.residency.remove_chosen(0, policy.next_victim, 9, Cause.EVICTED, 3)) == 2
    assert check(shelf.residency) == []


def test_choosing_what_must_stay_is_refused() -> None:
    shelf = Shelf()
    parent, _ = shelf.chain(0, 1)
    with pytest.raises(RuntimeError, match="cannot be evicted"):
        shelf.residency.remove_chosen(0, lambda now_ns: parent, 1, Cause.EVICTED, 2)


def test_a_block_with_a_copy_elsewhere_is_refused() -> None:
    shelf = Shelf("host", "nvme")
    (row,) = shelf.chain(0)
    shelf.residency.attach(row, 1, shelf.slot(), 1)
    with pytest.raises(RuntimeError, match="a copy in another tier"):
        shelf.residency.remove_chosen(0, lambda now_ns: row, 1, Cause.EVICTED, 2)
    assert check(shelf.residency) == []


def test_a_run_goes_as_its_blocks_do_one_by_one() -> None:
    one, many = Shelf(), Shelf()
    runs = []
    for shelf in (one, many):
        rows = shelf.chain(*range(6))
        shelf.chain(0, 1, 20)
        runs.append(rows[:1:-1])
    slots = [many.residency.slot(row, 0) for row in runs[1]]
    policies = [create("lru", shelf.residency, 0) for shelf in (one, many)]
    for row in runs[0]:
        one.residency.remove(row, Cause.EVICTED, 7 << 20)
    assert many.residency.remove_run(runs[1], 0, Cause.EVICTED, 7 << 20) == slots
    for shelf, policy in zip((one, many), policies, strict=True):
        assert check(shelf.residency) == []
        assert len(policy) == len(shelf.residency) == 3
        assert shelf.residency.children(shelf.residency.find(0, key(1)), 0) == 1
        assert shelf.residency.why_missing(0, key(4)).at_ns == 7 << 20
        assert policy.next_victim(8) == shelf.residency.find(0, key(20))
    assert many.residency.tenant_bytes(0, 0) == one.residency.tenant_bytes(0, 0)


@pytest.mark.parametrize("way", ["run", "chosen"])
def test_whoever_saved_terms_of_blocks_learns_that_they_go_together(way: str) -> None:
    shelf, gone = Shelf(), list[bytes]()
    rows = shelf.chain(*range(4))[::-1]
    for row in rows[1:]:
        shelf.residency.rows.optional.set("later_terms", row, 2)
        shelf.residency.rows.optional.set("expires_s", row, 60)
    shelf.residency.terms_gone = lambda row: gone.append(shelf.residency.key(row))
    if way == "run":
        shelf.residency.remove_run(rows[:3], 0, Cause.EVICTED, 2)
    else:
        named = iter(rows)
        shelf.residency.remove_chosen(0, lambda now_ns: next(named), 3, Cause.EVICTED, 2)
    assert gone == [key(2), key(1)]
    assert [shelf.residency.terms_of(row) for row in rows] == [(0, 0, 0)] * 3 + [(60, 0, 0)]
    assert check(shelf.residency) == []


def test_a_run_stops_at_what_must_stay() -> None:
    shelf = Shelf()
    rows = shelf.chain(*range(4))
    shelf.residency.pin(rows[1])
    with pytest.raises(RuntimeError, match="cannot be evicted"):
        shelf.residency.remove_run(rows[::-1], 0, Cause.EVICTED, 2)
    assert [shelf.residency.find(0, key(number)) for number in range(4)] == [rows[0], rows[1], -1, -1]
    assert shelf.residency.run_above(rows[1], 0, 9) == rows[1:2] + rows[:1], "the first is the caller's to judge"
    assert check(shelf.residency) == []


def test_copies_of_a_run_go_as_they_do_one_by_one() -> None:
    one, many = Shelf("host", "nvme"), Shelf("host", "nvme")
    runs = []
    for shelf in (one, many):
        rows = shelf.chain(*range(6))
        shelf.chain(0, 20)
        for row in rows:
            shelf.residency.attach(row, 1, shelf.slot(), 1)
        runs.append(rows[:1:-1])
    slots = [many.residency.slot(row, 0) for row in runs[1]]
    policies = [create("lru", shelf.residency, 0) for shelf in (one, many)]
    noted: list[int] = []
    many.residency.note_with(noted.extend)
    for row in runs[0]:
        one.residency.detach(row, 0)
    assert many.residency.detach_run(runs[1], 0) == slots
    assert noted == runs[1]
    for shelf, policy in zip((one, many), policies, strict=True):
        assert check(shelf.residency) == []
        assert len(policy) == 3 and len(shelf.residency) == 7
        assert shelf.residency.children(shelf.residency.find(0, key(1)), 0) == 0
        assert shelf.residency.children(shelf.residency.find(0, key(1)), 1) == 1
    assert policies[0].next_victim(8) == policies[1].next_victim(8)
    assert many.residency.tenant_bytes(0, 0) == one.residency.tenant_bytes(0, 0) == 3 * BLOCK_BYTES


def test_a_last_copy_is_not_detached_with_a_run() -> None:
    shelf = Shelf("host", "nvme")
    rows = shelf.chain(0, 1, 2)
    for row in rows[1:]:
        shelf.residency.attach(row, 1, shelf.slot(), 1)
    for run in (rows[::-1], [rows[2], rows[0]]):
        with pytest.raises(RuntimeError, match="not the next of a run"):
            shelf.residency.detach_run(run, 0)
    assert all(shelf.residency.has(row, 0) for row in rows), "none has gone"
    assert check(shelf.residency) == []


def test_unpinning_a_run_names_only_the_block_that_no_other_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    shelf = Shelf()
    policy = create("lru", shelf.residency, 0)
    rows, released = shelf.chain(*range(4)), list[int]()
    shelf.residency.pin_run(rows)
    monkeypatch.setattr(policy, "released", released.append)
    shelf.residency.unpin_run([shelf.residency.token(row) for row in rows])
    assert released == rows[-1:], "a child keeps each of the others"
    assert check(shelf.residency) == []


@pytest.mark.parametrize("picked", [range(6), range(1, 2), (0, 2, 3), (3, 2), ()])
def test_a_run_of_rows_reads_what_each_row_has(picked: Sequence[int]) -> None:
    shelf = Shelf()
    rows = shelf.chain(*range(6))
    here = [rows[at] for at in picked]
    run, columns = shelf.residency.rows.run_of(here), shelf.residency.rows
    assert list(run.of(columns.depth)) == [columns.depth[row] for row in here] and run.rows == here
    slots = shelf.residency.slots(run, 0)
    assert slots == [shelf.residency.slot(row, 0) for row in here] and len(slots) == len(here)
    assert SlotRun.of(list(slots)) == slots


@pytest.mark.parametrize("picked", [range(4), (0, 3)])
def test_a_run_names_only_the_blocks_that_are_still_there(picked: Sequence[int]) -> None:
    shelf = Shelf()
    rows = shelf.chain(*range(4))
    run = shelf.residency.rows.run_of([rows[at] for at in picked])
    assert shelf.residency.rows.still_there(run) == run.rows
    shelf.residency.remove(rows[3], Cause.EVICTED, 2)
    assert shelf.residency.rows.still_there(run) == run.rows[:-1]
    assert shelf.chain(9) == rows[3:], "the row is another block's"
    assert shelf.residency.rows.still_there(run) == run.rows[:-1]


def test_a_run_keeps_its_blocks_before_anybody_has_asked_for_pins(monkeypatch: pytest.MonkeyPatch) -> None:
    shelf = Shelf()
    policy = create("lru", shelf.residency, 0)
    rows, released, residency = shelf.chain(*range(3)), list[int](), shelf.residency
    monkeypatch.setattr(policy, "released", released.append)
    first, second = residency.rows.run_of(rows), residency.rows.run_of(rows[2:])
    residency.pin_run(first)
    residency.unpin_run(first)
    assert not residency.pins and not released, "nobody can have passed over a block for pins that nobody saw"
    for run in (first, second):
        residency.pin_run(run)
    assert not residency.is_evictable(rows[2], 0) and residency.pin_count(rows[2]) == 2
    residency.pin_run(third := residency.rows.run_of(rows))
    residency.unpin_run(first)
    residency.unpin_run(second)
    assert not residency.is_evictable(rows[2], 0), "the third holds it"
    residency.unpin_run(third)
    assert residency.is_evictable(rows[2], 0) and released[-1] == rows[2] and not residency.pins
    residency.pin_run(first)
    residency.remove(rows[2], Cause.CORRUPT, 2)
    assert residency.pins == {rows[0]: 1, rows[1]: 1}, "what is removed by force has no pins"
    residency.unpin_run(first)
    assert not residency.pins and check(residency) == []


@pytest.mark.parametrize("blocks", [11, 40])
def test_a_run_is_found_as_its_blocks_are_one_by_one(blocks: int) -> None:
    shelf = Shelf(tenants=2)
    residency = shelf.residency
    rows = shelf.chain(*range(blocks))
    keys = [key(number) for number in range(blocks)]
    asked = [keys, keys[3:], keys[:-1], [*keys, key(99)], [*keys[:20], key(99), *keys[20:]], keys[::-1], keys * 2, []]
    for each in asked:
        expected = [residency.find(0, name) for name in each]
        assert residency.find_each(0, b"".join(each)) == expected
        leading = expected.index(-1) if -1 in expected else len(expected)
        assert residency.find_run(0, b"".join(each)) == expected[:leading]
    assert residency.find_run(1, b"".join(keys)) == [], "another tenant's"
    theirs = shelf.store(0, tenant=1)
    assert residency.find_run(1, b"".join(keys)) == [theirs]
    residency.remove(rows[8], Cause.CORRUPT, 2)
    assert residency.find_run(0, b"".join(keys)) == rows[:8], "a gap"
    assert residency.find_each(0, b"".join(keys)) == [*rows[:8], -1, *rows[9:]]


def test_lru_moves_neighbours_as_it_moves_single_blocks() -> None:
    shelf, chance = Shelf(), random.Random(3)
    policy = create("lru", shelf.residency, 0)
    rows = [row for number in range(4) for row in shelf.chain(*range(100 * number, 100 * number + 30))]
    order: dict[int, None] = {}  # the next victim first
    for first in range(0, 120, 30):
        order |= dict.fromkeys(reversed(rows[first : first + 30]))
    for _ in range(300):
        first = chance.randrange(len(rows) - 12)
        used = rows[first : first + chance.randrange(12, 31)]
        if chance.random() < 0.2:
            chance.shuffle(used)
        shelf.residency.touch_run(used, shelf.now_ns)
        for row in reversed(used):
            order.pop(row)
            order[row] = None
        assert list(policy.queues.of[0]) == list(order)  # type: ignore[attr-defined]
        assert sorted(rows, key=policy.stamp.__getitem__) == list(order)  # type: ignore[attr-defined]
    links, queue = policy.queues.links, policy.queues.of[0]  # type: ignore[attr-defined]
    backwards = [queue.back]
    while (before := links.before[backwards[-1]]) >= 0:
        backwards.append(before)
    assert backwards[::-1] == list(order)


def test_pins_of_several_holders_end_one_by_one() -> None:
    shelf = Shelf()
    rows = shelf.chain(*range(4))
    runs = [shelf.residency.rows.run_of(rows[:end]) for end in (4, 2)]
    twice = shelf.residency.rows.run_of([rows[3], rows[3]])  # a client may name a block twice
    for run in (*runs, twice):
        shelf.residency.pin_run(run.rows)
    assert [shelf.residency.pin_count(row) for row in rows] == [2, 2, 1, 3]
    shelf.residency.unpin_run(runs[0])
    assert [shelf.residency.pin_count(row) for row in rows] == [1, 1, 0, 2]
    shelf.residency.unpin_run(twice)
    shelf.residency.unpin_run(runs[1])
    assert not shelf.residency.pins
    shelf.residency.pin(rows[0])
    with pytest.raises(RuntimeError, match="more often"):
        shelf.residency.unpin_run(runs[1])
