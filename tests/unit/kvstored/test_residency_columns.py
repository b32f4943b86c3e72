"""Optional columns: no memory until a block needs one, defaults before and after."""

import pytest

from kvstored.store.blocks.columns import OF_BLOCKS, OF_COPIES, Column, OptionalColumns
from tests.reference.blocks import Shelf

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
