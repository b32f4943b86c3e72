"""The residency index: chains, copies, leases, and what is remembered of blocks that went."""

import pytest

from kvstored.lifecycle import Cause
from kvstored.store.blocks import CyclicChainError
from kvstored.store.blocks.check import check
from kvstored.store.blocks.keys import unpack_keys
from kvstored.store.blocks.listing import Selection, page, row_at, rows_in, rows_of_fingerprint
from tests.reference.blocks import BLOCK_BYTES, Shelf, key, pack

HOST, NVME = 0, 1


@pytest.fixture
def shelf():
    shelf = Shelf("host", "nvme", tenants=2)
    yield shelf
    assert check(shelf.residency) == []


def test_a_run_ends_at_the_first_missing_block(shelf: Shelf) -> None:
    rows = shelf.chain(0, 1, 2)
    shelf.chain(10, 11)
    assert shelf.residency.find_run(0, pack(0, 1, 2, 3, 10)) == rows
    assert shelf.residency.find_run(0, pack(3, 0)) == []
    assert shelf.residency.find_each(0, pack(3, 0)) == [-1, rows[0]]
    assert shelf.residency.find_run(0, b"") == []


def test_tenants_do_not_see_each_other(shelf: Shelf) -> None:
    shelf.chain(0, 1, tenant=0)
    assert shelf.residency.find_run(1, pack(0, 1)) == []
    other = shelf.chain(0, 1, tenant=1)
    assert shelf.residency.find_run(1, pack(0, 1)) == other
    assert shelf.residency.tenant_bytes(0, HOST) == 2 * BLOCK_BYTES


def test_packed_keys_of_odd_length_are_refused() -> None:
    with pytest.raises(ValueError, match="multiple of 16"):
        unpack_keys(b"x" * 17)


def test_a_filling_block_is_not_readable_until_published(shelf: Shelf) -> None:
    row = shelf.insert(0)
    shelf.residency.attach(row, HOST, shelf.slot(), 1, filling=True)
    assert shelf.residency.find(0, key(0)) == -1
    assert shelf.residency.find_any(0, key(0)) == row
    assert shelf.residency.being_filled(row)
    assert not shelf.residency.may_forget(row)
    shelf.residency.publish(row, HOST, 2)
    assert not shelf.residency.being_filled(row)
    assert shelf.residency.find(0, key(0)) == row
    assert shelf.residency.fastest(row) == HOST


def test_an_aborted_fill_leaves_nothing(shelf: Shelf) -> None:
    row = shelf.insert(0)
    slot = shelf.slot()
    shelf.residency.attach(row, HOST, slot, 1, filling=True)
    assert shelf.residency.detach(row, HOST) == slot
    assert shelf.residency.find_any(0, key(0)) == -1
    assert shelf.residency.rows.live == 0


def test_an_orphan_is_linked_when_its_parent_comes(shelf: Shelf) -> None:
    child = shelf.store(1, 0, depth=1)
    placeholder = shelf.residency.parent(child)
    assert shelf.residency.find(0, key(0)) == -1
    assert shelf.residency.find_run(0, pack(0, 1)) == []
    parent = shelf.store(0)
    assert parent == placeholder
    assert shelf.residency.find_run(0, pack(0, 1)) == [parent, child]
    assert shelf.residency.children(parent) == 1
    assert shelf.residency.children(parent, HOST) == 1


def test_an_orphan_that_goes_takes_its_placeholder_along(shelf: Shelf) -> None:
    child = shelf.store(1, 0, depth=1)
    shelf.residency.remove(child, Cause.EVICTED, 5)
    assert shelf.residency.rows.live == 0


def test_a_placeholder_revived_under_another_parent_lets_the_old_one_go(shelf: Shelf) -> None:
    rows = shelf.chain(0, 1, 2)
    shelf.residency.remove(rows[1], Cause.CORRUPT, 5)
    shelf.residency.remove(rows[0], Cause.DROPPED, 5)
    assert shelf.residency.find_any(0, key(0)) == rows[0]
    shelf.store(1, 9, depth=1)
    assert shelf.residency.find_any(0, key(0)) == -1
    assert shelf.residency.parent_key(shelf.residency.find(0, key(1))) == key(9)


def test_a_parent_cannot_be_evicted_and_its_child_can(shelf: Shelf) -> None:
    parent, child = shelf.chain(0, 1)
    with pytest.raises(RuntimeError, match="parent of a block"):
        shelf.residency.remove(parent, Cause.EVICTED, 5)
    slot = shelf.residency.slot(child, HOST)
    assert shelf.residency.remove(child, Cause.EVICTED, 5) == [(HOST, slot)]
    assert shelf.residency.may_forget(parent)
    with pytest.raises(RuntimeError):
        shelf.residency.remove(child, Cause.CORRUPT, 6)


def test_force_leaves_a_hole_that_storing_again_closes(shelf: Shelf) -> None:
    head, middle, tail = shelf.chain(0, 1, 2)
    shelf.residency.pin(middle)
    shelf.residency.remove(middle, Cause.CORRUPT, 5)
    assert shelf.residency.find_run(0, pack(0, 1, 2)) == [head]
    assert shelf.residency.pin_count(middle) == 0
    assert not shelf.residency.may_forget(head), "a placeholder still hangs on it"
    again = shelf.store(1, 0, depth=1)
    assert shelf.residency.find_run(0, pack(0, 1, 2)) == [head, again, tail]


@pytest.mark.parametrize("parent", [0, 2])
def test_a_block_cannot_be_its_own_ancestor(shelf: Shelf, parent: int) -> None:
    shelf.store(1, 0, depth=1)
    shelf.store(2, 1, depth=2)
    with pytest.raises(CyclicChainError):
        shelf.insert(0, parent)
    assert check(shelf.residency) == []


def test_a_copy_may_leave_while_another_tier_has_one(shelf: Shelf) -> None:
    parent, child = shelf.chain(0, 1)
    slot = shelf.slot()
    shelf.residency.attach(parent, NVME, slot, 2)
    assert shelf.residency.tier_mask(parent) == 0b11
    shelf.residency.detach(parent, HOST)
    assert shelf.residency.fastest(parent) == NVME
    assert shelf.residency.slot(parent, NVME) == slot
    with pytest.raises(RuntimeError, match="last readable copy"):
        shelf.residency.detach(parent, NVME)
    with pytest.raises(RuntimeError, match="no copy in host"):
        shelf.residency.slot(parent, HOST)
    assert shelf.residency.find_run(0, pack(0, 1)) == [parent, child]


def test_illegal_steps_crash(shelf: Shelf) -> None:
    (row,) = shelf.chain(0)
    with pytest.raises(RuntimeError, match="RECOVER while RESIDENT"):
        shelf.residency.attach(row, HOST, shelf.slot(), 2)
    with pytest.raises(RuntimeError, match="PUBLISH while RESIDENT"):
        shelf.residency.publish(row, HOST, 2)
    with pytest.raises(RuntimeError, match="while it has a copy"):
        shelf.insert(0)
    with pytest.raises(RuntimeError, match="more often"):
        shelf.residency.unpin(row)


def test_pins_hold_a_block(shelf: Shelf) -> None:
    (row,) = shelf.chain(0)
    shelf.residency.pin(row)
    shelf.residency.pin(row)
    shelf.residency.unpin(row)
    assert not shelf.residency.is_evictable(row, HOST)
    with pytest.raises(RuntimeError, match="pinned"):
        shelf.residency.remove(row, Cause.EVICTED, 3)
    shelf.residency.unpin(row)
    shelf.residency.remove(row, Cause.EVICTED, 3)


def test_a_token_outlives_its_block_by_saying_so(shelf: Shelf) -> None:
    (row,) = shelf.chain(0)
    token = shelf.residency.token(row)
    assert shelf.residency.current(token) == row
    shelf.residency.remove(row, Cause.EVICTED, 3)
    assert not shelf.residency.is_current(token)
    (again,) = shelf.chain(5)
    assert again == row, "row numbers are used again"
    assert not shelf.residency.is_current(token)


def test_a_token_of_a_block_taken_by_force_is_stale_though_the_row_stays(shelf: Shelf) -> None:
    parent, _ = shelf.chain(0, 1)
    token = shelf.residency.token(parent)
    shelf.residency.remove(parent, Cause.DROPPED, 3)
    assert shelf.store(0) == parent
    assert not shelf.residency.is_current(token)


def test_why_a_block_is_missing(shelf: Shelf) -> None:
    parent, child = shelf.chain(0, 1)
    assert shelf.residency.why_missing(0, key(9), 7, {7, 8}).cause is Cause.NEVER_STORED
    assert shelf.residency.why_missing(0, key(9), 8, {7, 8}).cause is Cause.OTHER_FINGERPRINT
    assert shelf.residency.why_missing(0, key(9), 8, {8, 9}).cause is Cause.NEVER_STORED, "7 is another model's"
    assert shelf.residency.why_missing(1, key(9), 8, {7, 8}).cause is Cause.NEVER_STORED
    shelf.residency.remove(child, Cause.EXPIRED, 77 << 20)
    absence = shelf.residency.why_missing(0, key(1))
    assert (absence.cause, absence.at_ns, absence.accesses) == (Cause.EXPIRED, 77 << 20, 1)
    shelf.residency.remove(parent, Cause.QUOTA, 78)
    assert shelf.residency.why_missing(0, key(0)).cause is Cause.QUOTA


def test_the_ghost_is_bounded_and_remembers_use() -> None:
    shelf = Shelf("host", ghost_keys=2)
    for number in (0, 1, 2):
        (row,) = shelf.chain(number)
        shelf.residency.remove(row, Cause.EVICTED, 5)
    assert shelf.residency.why_missing(0, key(0)).cause is Cause.NEVER_STORED
    assert shelf.residency.why_missing(0, key(1)).cause is Cause.EVICTED
    (row,) = shelf.chain(2)
    assert shelf.residency.accesses(row) == 2


def test_places_can_be_asked_for_blocks(shelf: Shelf) -> None:
    rows = shelf.chain(*range(6))
    slots = {row: shelf.residency.slot(row, HOST) for row in rows}
    for row, slot in slots.items():
        assert row_at(shelf.residency, HOST, slot.container, slot.offset) == row
    in_first = sorted((slot.offset, row) for row, slot in slots.items() if slot.container == 1)
    assert rows_in(shelf.residency, HOST, 1) == [row for _, row in in_first]
    assert row_at(shelf.residency, HOST, 99, 0) == -1
    assert rows_in(shelf.residency, NVME, 1) == []


def test_pages_cover_every_block_once(shelf: Shelf) -> None:
    mine = shelf.chain(*range(7))
    theirs = shelf.chain(20, 21, tenant=1)
    shelf.residency.attach(mine[3], NVME, shelf.slot(), 2)
    seen, after = [], 0
    while True:
        rows, after = page(shelf.residency, after=after, limit=2)
        seen += rows
        if not after:
            break
    assert sorted(seen) == sorted(mine + theirs)
    assert page(shelf.residency, Selection(tenant=1)).rows == theirs
    assert page(shelf.residency, Selection(tier=NVME)).rows == [mine[3]]
    assert page(shelf.residency, Selection(key_prefix=key(5).hex())).rows == [mine[5]]


def test_rows_of_a_fingerprint_come_deepest_first(shelf: Shelf) -> None:
    rows = shelf.chain(0, 1, 2)
    shelf.chain(0, tenant=1)
    assert rows_of_fingerprint(shelf.residency, 7, tenant=0) == rows[::-1]
    assert len(rows_of_fingerprint(shelf.residency, 7)) == 4
    assert rows_of_fingerprint(shelf.residency, 8) == []
    for row in rows_of_fingerprint(shelf.residency, 7):
        shelf.residency.remove(row, Cause.INVALIDATED, 3)
    assert shelf.residency.rows.live == 0


def test_rows_grow_without_losing_anything() -> None:
    shelf = Shelf("host")
    rows = shelf.chain(*range(3000))
    assert len(set(rows)) == 3000
    assert shelf.residency.find_run(0, pack(*range(3000))) == rows
    assert check(shelf.residency) == []


def test_the_walker_sees_a_miscount(shelf: Shelf) -> None:
    (row,) = shelf.chain(0)
    for spoil, repair in (
        (
            lambda: shelf.residency.rows.links.__setitem__(row, 5),
            lambda: shelf.residency.rows.links.__setitem__(row, 0),
        ),
        (lambda: shelf.residency.rows.mask.__setitem__(row, 2), lambda: shelf.residency.rows.mask.__setitem__(row, 1)),
    ):
        spoil()
        assert check(shelf.residency)
        repair()
