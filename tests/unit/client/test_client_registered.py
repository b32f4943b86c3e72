"""Host memory is registered from when it is mapped, before anything is copied, and no longer than it is of use."""

from __future__ import annotations

import contextlib
import mmap
import os
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvstore_client.arenas import Arenas
from kvstore_client.device.memory import DeviceError, HostMappings
from kvstore_client.device.registered import EARLY_S, IDLE_S, RegisteredMemory
from kvstore_client.handshake import GrantedArena
from kvstore_client.memory import Bytes
from tests.reference.played_device import PlayedDevice

ARENA_BYTES = 1 << 20


class Device(PlayedDevice):
    """Notes what is registered, by address; and a clock."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 100.0
        self.registered: set[int] = set()
        self.fails = False
        self.failing: list[str] = []  # the next calls of these names, and "current"

    def clock(self) -> float:
        return self.now

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        self._may_fail("current")
        yield

    def _may_fail(self, name: str) -> None:
        if name in self.failing:
            self.failing.remove(name)
            raise DeviceError(name, 801, "CUDA_ERROR_NOT_SUPPORTED")

    def call(self, name: str, *arguments: Any) -> int:
        self._may_fail(name)
        if name == "cuMemHostRegister":
            if self.fails:
                raise DeviceError(name, 2, "CUDA_ERROR_OUT_OF_MEMORY")
            self.registered.add(arguments[0])
        if name == "cuMemHostUnregister":
            self.registered.discard(arguments[0])
        return 1


@pytest.fixture
def device() -> Device:
    return Device()


@pytest.fixture
def memory(device: Device) -> Iterator[RegisteredMemory]:
    anything: Any = device
    made = RegisteredMemory(anything, clock=device.clock)
    yield made
    made.close()
    assert not device.registered


def mapping() -> Bytes:
    return np.frombuffer(mmap.mmap(-1, ARENA_BYTES), np.uint8)


def address(of: Bytes) -> int:
    return int(of.__array_interface__["data"][0])


def settled(memory: RegisteredMemory) -> None:
    """Wait until what is over has ended, too: the thread looks for that before it registers something."""
    memory.want(mapping())
    assert memory.settle(30.0)


def test_what_is_mapped_before_and_after_is_registered_unasked(device: Device, memory: RegisteredMemory) -> None:
    mappings, before, after, gone = HostMappings(), mapping(), mapping(), mapping()
    mappings.add(before)
    mappings.add(gone)
    del gone
    mappings.follow(memory)
    mappings.add(after)
    assert memory.settle(30.0)
    assert device.registered == {address(before), address(after)}
    mappings.leave(memory)
    mappings.add(mapping())
    assert memory.settle(30.0)
    assert device.registered == {address(before), address(after)}


def test_what_was_not_used_yet_is_kept_while_an_engine_starts(device: Device, memory: RegisteredMemory) -> None:
    early, used = mapping(), mapping()
    memory.mapped(early)
    memory.mapped(used)
    assert memory.settle(30.0)
    taken = memory.take(used, 0, 4096)
    assert taken is not None
    memory.give_back(taken)
    device.now += IDLE_S
    settled(memory)
    assert address(early) in device.registered and address(used) not in device.registered
    device.now += EARLY_S
    settled(memory)
    assert address(early) not in device.registered


def test_what_a_session_leaves_behind_ends_once_no_copy_uses_it(device: Device, memory: RegisteredMemory) -> None:
    mappings, left, carried = HostMappings(), mapping(), mapping()
    mappings.follow(memory)
    for each in (left, carried):
        mappings.add(each)
    assert memory.settle(30.0)
    taken = memory.take(left, 0, 4096)
    assert taken is not None
    for each in (left, carried):
        mappings.drop(each)
    mappings.add(carried)  # by the session after it
    settled(memory)
    assert {address(left), address(carried)} <= device.registered
    memory.give_back(taken)
    settled(memory)
    assert address(left) not in device.registered and address(carried) in device.registered


def test_what_cannot_be_registered_is_tried_again_after_a_while(device: Device, memory: RegisteredMemory) -> None:
    wanted = mapping()
    device.fails = True
    memory.mapped(wanted)
    assert memory.settle(30.0)
    device.fails = False
    device.now += IDLE_S
    settled(memory)
    assert memory.take(wanted, 0, 4096) is None
    assert memory.settle(30.0)
    assert memory.take(wanted, 0, 4096) is not None


class Daemon:
    def request_arena(self, arena_id: int, timeout_s: float, *, writable: bool = False) -> GrantedArena:
        descriptor = os.memfd_create("arena")
        os.ftruncate(descriptor, ARENA_BYTES)
        return GrantedArena(arena_id, ARENA_BYTES, descriptor)


@pytest.mark.parametrize("has_device", [True, False])
def test_a_session_with_a_device_maps_all_arenas_when_it_connects(has_device: bool) -> None:
    mappings = HostMappings()
    arenas = Arenas(Daemon(), [1, 2, 3], None, mappings if has_device else None)
    with contextlib.ExitStack() as descriptors:
        opened = list(arenas.map_announced(descriptors, 1.0, ARENA_BYTES))
    assert len(opened) == 1, "the pages of one are wanted"
    assert sorted(arenas.mapped) == ([1, 2, 3] if has_device else [1])
    known: list[Bytes] = []
    follower = SimpleNamespace(mapped=known.append, given_up=known.remove)
    mappings.follow(follower)
    assert len(known) == 3 * has_device


@pytest.mark.parametrize("call", ["current", "cuMemHostUnregister"])
def test_memory_that_cannot_be_unregistered_is_kept_and_tried_again(
    device: Device, memory: RegisteredMemory, call: str
) -> None:
    own = mapping()
    memory.want(own)
    assert memory.settle(30.0)
    at, gone = address(own), weakref.ref(own)
    device.failing.append(call)
    device.now += IDLE_S
    settled(memory)
    assert at in device.registered and not device.failing
    del own
    assert gone() is not None, "unmapping it would leave the device with memory of something else"
    settled(memory)
    assert at not in device.registered and gone() is None
