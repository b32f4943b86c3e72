"""Optional columns: no memory until a block needs one, defaults before and after."""

from array import array
from pathlib import Path

import pytest

from kvstore_tiers.base import Slot
from kvstored.lifecycle import Cause
from kvstored.store.blocks.check import check
from kvstored.store.blocks.columns import OF_BLOCKS, OF_COPIES, Column, OptionalColumns
from kvstored.store.blocks.rows import add_zeros
from kvstored.store.policies import create
from tests.reference.blocks import Shelf, key

HOST, NVME = 0, 1


def test_a_column_has_memory_from_the_first_value_that_is_not_the_default() -> None:
    columns = OptionalColumns((Column("warmth", "b", -1), Column("weight", "I")))
    columns.grow(4)
    columns.set("warmth", 2, -1)
    assert not columns.used and columns.view("warmth") is None
    assert columns.get("warmth", 3) == -1
    columns.set("warmth", 2, 5)
    assert list(columns.used) == ["warmth"]
    assert columns.view("warmth").tolist() == [-1, -1, 5, -1]  # type: ignore[union-attr]
    columns.grow(6)
    assert columns.view("warmth").tolist() == [-1, -1, 5, -1, -1, -1]  # type: ignore[union-attr]
    columns.reset((2, 5))
    assert columns.get("warmth", 2) == -1
    with pytest.raises(KeyError):
        columns.get("height", 0)
    with pytest.raises(OverflowError):
        columns.set("weight", 0, -1)


def test_a_store_that_uses_none_keeps_no_byte_for_them() -> None:
    shelf = Shelf("host", "nvme")
    shelf.chain(*range(3000))
    residency = shelf.residency
    assert not residency.rows.optional.used
    assert not any(copies.optional.used for copies in residency.copies)
    assert (residency.expires_s(5), residency.priority(5), residency.pinned_by(5)) == (0, 0, 0)
    assert (residency.codec(5, HOST), residency.stored_bytes(5, HOST)) == (0, residency.payload_bytes(5))


def test_every_column_of_the_tables_follows_the_rows() -> None:
    shelf = Shelf("host", "nvme")
    residency = shelf.residency
    rows = shelf.chain(0, 1)
    residency.attach(rows[1], NVME, shelf.slot(), 1)
    for column in OF_BLOCKS:
        residency.rows.optional.set(column.name, rows[1], 7)
    for column in OF_COPIES:
        residency.copies[NVME].optional.set(column.name, rows[1], 9)
    assert residency.codec(rows[1], NVME) == residency.stored_bytes(rows[1], NVME) == 9
    assert residency.codec(rows[1], HOST) == 0
    more = shelf.chain(*range(2, 3000))  # the index grows
    assert {residency.rows.optional.get(column.name, more[-1]) for column in OF_BLOCKS} == {0}
    residency.detach(rows[1], NVME)
    assert residency.stored_bytes(rows[1], NVME) == residency.payload_bytes(rows[1])
    assert residency.priority(rows[1]) == 7


def test_a_value_that_does_not_fit_widens_its_column_and_changes_no_other() -> None:
    shelf = Shelf("host", "nvme", tenants=300)
    residency, slots = shelf.residency, [Slot(70_000, 8192, 8192, 1), Slot(1, 2**32, 8192, 2**40)]
    first = shelf.store(0)
    kinds = [shelf.store(10 + tenant, tenant=tenant) for tenant in range(300)]
    deep = residency.insert(
        0, key(1), key(0), fingerprint_id=7, group=0, depth=70_000, payload_bytes=4096, now_ns=1
    )  # fmt: skip
    residency.attach(deep, HOST, slots[0], 1)
    rows = residency.store_run(
        0, [key(2), key(3)], deep, HOST, [slots[1], Slot(900, 0, 8192, 3)],
        fingerprint_id=7, group=0, payload_bytes=4096, now_ns=1,
    )  # fmt: skip
    assert [residency.depth(row) for row in (first, deep, *rows)] == [0, 70_000, 70_001, 70_002]
    assert [residency.tenant_of(row) for row in kinds] == list(range(300))
    assert [residency.slot(row, HOST) for row in (deep, rows[0])] == slots
    assert residency.slot(first, HOST) == Slot(0, 8192, 8192, 1)
    assert not check(residency)


def test_a_block_may_have_any_number_of_children() -> None:
    """One by one, in runs and promoted: more than one byte, and then two, can count."""
    shelf = Shelf("host", "nvme")
    residency, top = shelf.residency, shelf.store(0)
    many = 70_000
    for number in range(1, many):
        residency.store_run(
            0, [key(number)], top, NVME, [Slot(1, 8192 * number, 8192, 1)],
            fingerprint_id=7, group=0, payload_bytes=4096, now_ns=1,
        )  # fmt: skip
    last = residency.insert(0, key(many), key(0), fingerprint_id=7, group=0, depth=1, payload_bytes=4096, now_ns=1)
    residency.attach(last, NVME, Slot(2, 0, 8192, 1), 1)
    assert residency.children(top) == residency.children(top, NVME) == many
    children = [residency.find(0, key(number)) for number in range(1, 300)]
    residency.attach_run(children, HOST, [Slot(3, 8192 * row, 8192, 1) for row in children])
    assert residency.children(top, HOST) == 299 and not check(residency)
    for row in (last, *children[:50]):
        residency.remove(row, Cause.EXPIRED, 1)
    assert residency.children(top) == many - 51 and not check(residency)


def test_zeros_take_no_memory_until_they_are_written() -> None:
    """A tier of few blocks beside one of a hundred million."""

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    column, before = array("Q", range(1, 5000)), resident()
    add_zeros(column, 32 << 20)
    assert resident() - before < 64 << 20, "of 256 MiB"
    assert column[:4999].tolist() == list(range(1, 5000))
    column[-2] = 7
    assert column[5000] == column[-1] == 0 and column[-2] == 7


@pytest.mark.parametrize("name", ["lru", "lfu-ttl", "chain-hazard"])
def test_the_order_of_uses_survives_their_four_thousand_millionth(name: str) -> None:
    shelf = Shelf()
    policy = create(name, shelf.residency, HOST)
    ordered = getattr(policy, "follower", policy)
    getattr(ordered, "lru", ordered).accesses = 2**32 - 4
    rows = [shelf.chain(number)[0] for number in range(8)]
    shelf.chain(0)
    order = []
    for _ in rows:
        order.append(policy.next_victim(1))
        shelf.residency.remove(order[-1], Cause.EVICTED, 1)
    assert order == [*rows[1:], rows[0]]
