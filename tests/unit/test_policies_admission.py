"""Admission: what may enter a tier."""

from kvstored.lifecycle import Cause
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
