"""Arenas that are lent to tiers of device memory: when they are, and that their memory stays until that has ended."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from types import SimpleNamespace

import pytest

from kvstore_tiers.host import HostTier

MIB = 1 << 20
HALF = MIB // 2
OWNER, OTHER = "01" * 16, "02" * 16
PATIENCE_S = 10.0


class Device:
    """Has memory shared with it, and lets go of it when it is told to."""

    def __init__(self) -> None:
        self.has: dict[int, int] = {}  # bytes, by number
        self.leaves: list[Callable[[], None]] = []

    def share(self, descriptor: int, address: int, nbytes: int) -> int:
        assert os.fstat(descriptor).st_size == nbytes and address
        number = len(self.has) + len(self.leaves) + 1
        self.has[number] = nbytes
        return number

    def unshare(self, number: int, ended: Callable[[], None]) -> None:
        del self.has[number]
        self.leaves.append(ended)

    def let_go(self) -> None:
        while self.leaves:
            self.leaves.pop(0)()


@pytest.fixture
def device() -> Device:
    return Device()


@pytest.fixture
def tier(device: Device) -> Iterator[HostTier]:
    with closing(HostTier(2 * MIB, arena_bytes=MIB)) as tier:
        tier.lend_to([device])
        yield tier


def test_an_arena_is_lent_when_all_of_it_is_in_use(tier: HostTier, device: Device) -> None:
    slots = [tier.allocate(HALF, OWNER)]
    assert not device.has, "to register it would touch memory ahead of need"
    slots.append(tier.allocate(HALF, OWNER))
    assert list(device.has.values()) == [MIB]
    for slot in slots:
        assert slot is not None
        tier.free(slot)
    assert tier.allocate(HALF, OWNER) and tier.allocate(HALF, OWNER)
    assert list(device.has.values()) == [MIB], "once"


def test_an_arena_is_lent_when_it_is_prefaulted(tier: HostTier, device: Device) -> None:
    assert tier.allocate(HALF, OWNER)
    tier.prefault_slice(HALF)
    assert not device.has
    tier.prefault_slice(HALF)
    assert list(device.has.values()) == [MIB]


def test_arenas_that_are_there_already_are_lent() -> None:
    device = Device()
    with closing(HostTier(2 * MIB, arena_bytes=MIB)) as tier:
        assert tier.allocate(MIB, OWNER)
        tier.lend_to([device, device])
        assert list(device.has.values()) == [MIB, MIB]


def test_memory_is_given_back_when_the_device_has_let_go_of_it(tier: HostTier, device: Device) -> None:
    slot = tier.allocate(MIB, OWNER)
    assert slot is not None
    tier.slot_segment(slot)
    tier.view(slot)[:] = 1
    arena = tier.arena(slot.container)
    tier.free(slot)
    give_back = tier.take_empty()
    assert give_back is not None and tier.used_bytes == 0 and not device.has
    thread = threading.Thread(target=give_back)
    thread.start()
    thread.join(0.2)
    assert thread.is_alive() and arena.held_bytes == MIB, "a device could write there still"
    device.let_go()
    thread.join(PATIENCE_S)
    assert not thread.is_alive() and arena.fd < 0


def test_a_charge_does_not_wait_for_the_device(tier: HostTier, device: Device) -> None:
    slot = tier.allocate(MIB, OWNER)
    assert slot is not None
    arena = tier.arena(slot.container)
    tier.free(slot)
    assert tier.charge(2 * MIB, "staging")
    assert arena.fd >= 0
    device.let_go()
    assert arena.fd < 0


@pytest.mark.parametrize("slot_bytes", [MIB, MIB // 4], ids=["whole", "in part"])
def test_an_heir_takes_no_memory_that_the_device_has(device: Device, slot_bytes: int) -> None:
    with closing(HostTier(MIB, arena_bytes=MIB)) as tier:
        tier.lend_to([device])
        slot = tier.allocate(MIB, OWNER)
        assert slot is not None
        tier.view(slot)[:] = 1
        donor = tier.arena(slot.container)
        tier.free(slot)
        heir = tier.allocate(slot_bytes, OTHER)
        assert heir is not None and donor.held_bytes == MIB and not device.has
        device.let_go()
        assert (donor.held_bytes if donor.fd >= 0 else 0) == MIB - slot_bytes
        for _ in range(MIB // slot_bytes - 1):
            assert tier.allocate(slot_bytes, OTHER)
        assert donor.fd < 0 and list(device.has.values()) == ([] if slot_bytes == MIB else [MIB])
        tier.prefault_slice(MIB)
        assert list(device.has.values()) == [MIB], "nothing of it is the donor's any more"


def test_what_is_closed_first_gives_its_memory_back_when_the_device_has_let_go(device: Device) -> None:
    tier = HostTier(MIB, arena_bytes=MIB)
    tier.lend_to([device, device])
    slot = tier.allocate(MIB, OWNER)
    assert slot is not None
    tier.view(slot)[:] = 1
    arena = tier.arena(slot.container)
    tier.close()
    device.leaves.pop()()
    assert arena.held_bytes == MIB, "the other device has it"
    device.let_go()
    assert arena.fd < 0


def test_memory_that_the_system_does_not_take_back_leaves_no_descriptor(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last process that maps it takes it along."""
    with closing(HostTier(MIB, arena_bytes=MIB)) as tier:
        tier.lend_to([device])
        slot = tier.allocate(MIB, OWNER)
        assert slot is not None
        donor = tier.arena(slot.container)
        tier.free(slot)
        assert tier.allocate(MIB // 4, OTHER)
        monkeypatch.setattr("kvstore_tiers.arena_memory._libc", SimpleNamespace(fallocate=lambda *_: 1))
        device.let_go()
        assert donor.fd < 0
        assert tier.allocate(MIB // 4, OTHER)
