"""Admission: what may enter a tier."""

from kvstored.lifecycle import Cause
from kvstored.movement.prefix import MAX_PATH_BLOCKS, missing_path
from kvstored.policies import create_admission
from tests.reference.blocks import Shelf


def test_always_admits() -> None:
    shelf = Shelf("host", "nvme")
    assert create_admission("always", shelf.residency, 1).admit(shelf.chain(0)[0], 1)


def test_second_touch_refuses_what_was_used_once() -> None:
    shelf = Shelf("host", "nvme")
    admission = create_admission("second-touch", shelf.residency, 1)
    row = shelf.chain(0)[0]
    assert not admission.admit(row, 1)
    shelf.chain(0)
    assert admission.admit(row, 1)


def test_second_touch_remembers_use_across_eviction() -> None:
    shelf = Shelf("host", "nvme")
    admission = create_admission("second-touch", shelf.residency, 1)
    shelf.residency.remove(shelf.chain(0)[0], Cause.EVICTED, 1)
    assert admission.admit(shelf.chain(0)[0], 1)


def test_a_parent_follows_its_child() -> None:
    shelf = Shelf("host", "nvme")
    admission = create_admission("second-touch", shelf.residency, 1)
    parent, child = shelf.chain(0, 1)
    assert not admission.admit(parent, 1)
    shelf.residency.attach(child, 1, shelf.slot(), 1)
    assert admission.admit(parent, 1)


# What has to be written with a block


def none_coming(row: int) -> bool:
    return False


def test_a_path_begins_where_nvme_ends() -> None:
    shelf = Shelf("host", "nvme")
    head, middle, tail = shelf.chain(0, 1, 2)
    assert missing_path(shelf.residency, tail, none_coming) == [head, middle, tail]
    shelf.residency.attach(head, 1, shelf.slot(), 1)
    assert missing_path(shelf.residency, tail, none_coming) == [middle, tail]
    assert missing_path(shelf.residency, head, none_coming) == []


def test_what_is_being_written_already_is_not_written_again() -> None:
    shelf = Shelf("host", "nvme")
    _, middle, tail = shelf.chain(0, 1, 2)
    assert missing_path(shelf.residency, tail, lambda row: row == middle) == [tail]
    assert missing_path(shelf.residency, middle, lambda row: row == middle) == []


def test_a_broken_chain_is_no_reason_to_refuse_what_continues_it() -> None:
    """Blocks of a windowed layer group are of use without those before them."""
    shelf = Shelf("host", "nvme")
    row = shelf.store(7, parent=6)
    assert missing_path(shelf.residency, row, none_coming) == [row]


def test_a_very_long_chain_goes_head_first() -> None:
    shelf = Shelf("host", "nvme")
    rows = shelf.chain(*range(MAX_PATH_BLOCKS + 5))
    assert missing_path(shelf.residency, rows[-1], none_coming) == rows[:MAX_PATH_BLOCKS]
