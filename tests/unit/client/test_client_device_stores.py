"""Payloads from pages of a pool: the device is waited for once for all that are begun, and no byte is taken early."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvstore_client.device import (
    CopyResources,
    DeviceError,
    DevicePool,
    DeviceTransfers,
    LinkBudget,
    PoolPart,
    RegisteredMemory,
)
from kvstore_client.payload import PayloadWriter
from kvstore_cuda import driver as cuda_driver
from kvstore_proto.arena import HEADER_BYTES
from tests.reference.played_device import PlayedDevice

PAGES, LAYERS, MIB = 6, 2, 1 << 20
HOST_ADDRESSES = 91  # whether the device has host memory at the same ones: without them no kernel copies


class Device(PlayedDevice):
    """A driver whose copies happen when their stream is waited for; its memory is host memory."""

    index = 0
    CUdeviceptr = CUdevice_attribute = CUevent = int

    def __init__(self) -> None:
        super().__init__(self)
        self.queued: list[tuple[int, int, int]] = []
        self.most_queued_bytes = 0
        self.priorities: list[int] = []  # of streams, in order
        self.waits = 0
        self.fails = self.refuses = self.knows_nothing = False
        self.streams = self.failures_to_be_current = 0
        self.is_waited_for, self.may_end = threading.Event(), threading.Event()
        self.may_end.set()
        self.registered: set[int] = set()
        self.mapped: Callable[[], Any] | None = None  # what must be there whenever memory is unregistered

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        if self.failures_to_be_current:
            self.failures_to_be_current -= 1
            raise cuda_driver.DriverError("cuCtxGetCurrent", 801, "CUDA_ERROR_NOT_SUPPORTED")
        yield

    def call(self, name: str, *arguments: Any) -> Any:
        return cuda_driver.call(self, name, *arguments)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        return lambda *_: (0, 0)

    def cuMemcpyDtoHAsync(self, to: int, source: int, nbytes: int, _: int) -> tuple[int]:  # noqa: N802
        self.queued.append((to, source, nbytes))
        self.most_queued_bytes = max(self.most_queued_bytes, sum(run[2] for run in self.queued))
        return (0,)

    cuMemcpyHtoDAsync = cuMemcpyDtoHAsync  # noqa: N815

    def cuStreamSynchronize(self, _: int) -> tuple[int]:  # noqa: N802
        self.waits += 1
        self.is_waited_for.set()
        assert self.may_end.wait(20)
        queued, self.queued = self.queued, []
        if self.fails:
            return (700,)
        for run in queued:
            ctypes.memmove(*run)
        return (0,)

    def cuStreamCreateWithPriority(self, _: int, priority: int) -> tuple[int, int]:  # noqa: N802
        self.priorities.append(priority)
        self.streams += 1
        return 0, self.streams

    def cuStreamDestroy(self, _: int) -> tuple[int]:  # noqa: N802
        self.streams -= 1
        return (0,)

    def cuMemHostRegister(self, address: int, *_: int) -> tuple[int]:  # noqa: N802
        if not self.refuses:
            self.registered.add(address)
        return (2 if self.refuses else 0,)

    def cuMemHostUnregister(self, address: int) -> tuple[int]:  # noqa: N802
        if self.mapped is not None and self.mapped() is not None:
            self.registered.discard(address)
        return (0,)

    def cuDeviceGetAttribute(self, number: int, _: int) -> tuple[int, int]:  # noqa: N802
        return (1 if self.knows_nothing else 0), number != HOST_ADDRESSES

    def cuGetErrorName(self, _: int) -> tuple[int, bytes]:  # noqa: N802
        return 0, b"CUDA_ERROR_ILLEGAL_ADDRESS"


class Engine:
    """A pool whose pages have random bytes, and staging memory with a slot for each."""

    def __init__(self, block_bytes: int, budget: LinkBudget | None = None) -> None:
        self.block_bytes, self.slot_bytes = block_bytes, HEADER_BYTES + block_bytes
        self.pages = np.random.default_rng(1).integers(0, 256, (LAYERS, PAGES, block_bytes // LAYERS), dtype=np.uint8)
        first, layer_bytes = self.pages.__array_interface__["data"][0], block_bytes // LAYERS
        parts = [[PoolPart(first + at * PAGES * layer_bytes, layer_bytes, layer_bytes)] for at in range(LAYERS)]
        self.device = Device()
        anything: Any = self.device
        self.pool = DevicePool(parts, PAGES)
        self.means = CopyResources(anything, block_bytes, budget=budget)
        self.transfers = DeviceTransfers(anything, self.pool, resources=self.means)
        self.staging = np.zeros(PAGES * self.slot_bytes, np.uint8)

    def put(self) -> int:
        """All pages, as one put; how often the device was waited for."""
        before = self.device.waits
        with PayloadWriter(self.block_bytes) as writer:
            for page in range(PAGES):
                writer.write(self.staging, page * self.slot_bytes, self.transfers.payload_of(page))
        return self.device.waits - before

    @property
    def stored(self) -> np.ndarray:
        slots = self.staging.reshape(PAGES, self.slot_bytes)[:, HEADER_BYTES:]
        return slots.reshape(PAGES, LAYERS, -1).transpose(1, 0, 2)


@pytest.fixture
def engine() -> Iterator[Engine]:
    made = Engine(64 << 10)
    yield made
    made.means.close()


@pytest.mark.parametrize("failures", [1, 2])
def test_no_copy_is_left_for_a_slot_that_was_given_back(engine: Engine, failures: int) -> None:
    """A copy that was begun for a put that failed must not write into the slots of the next one."""
    finish = engine.transfers.payload_of(0)(engine.staging[HEADER_BYTES : engine.slot_bytes])
    assert finish is not None
    engine.device.failures_to_be_current = failures
    with pytest.raises(cuda_driver.DriverError, match="cuCtxGetCurrent"):
        finish()
    assert not engine.device.queued and not engine.transfers.resources.stores._under_way
    assert engine.put() == 1
    assert np.array_equal(engine.stored, engine.pages)


def test_many_blocks_are_waited_for_once_by_way_of_the_buffer_and_without(engine: Engine) -> None:
    assert engine.put() == 1
    assert np.array_equal(engine.stored, engine.pages)
    assert engine.transfers.registered.settle(30.0)
    engine.staging[:] = 0
    assert engine.put() == 1
    assert np.array_equal(engine.stored, engine.pages)
    (part,) = engine.transfers.registered._parts.values()
    assert part.is_made and part.users == 0


def test_blocks_that_the_buffer_has_no_room_for_wait_for_those_before_them() -> None:
    engine = Engine(3 * MIB)  # of a buffer of 8 MiB
    engine.device.refuses = True
    assert engine.put() == PAGES // 2
    assert np.array_equal(engine.stored, engine.pages)
    engine.means.close()


@pytest.mark.parametrize("is_registered", [False, True])
def test_a_failure_is_raised_for_each_block_that_was_under_way(engine: Engine, is_registered: bool) -> None:
    if is_registered:
        engine.put()
        assert engine.transfers.registered.settle(30.0)
    fills = [engine.transfers.payload_of(page) for page in range(3)]
    finishes = [fill(engine.staging[HEADER_BYTES : HEADER_BYTES + engine.block_bytes]) for fill in fills]
    engine.device.fails = True
    for finish in finishes:
        assert finish is not None
        with pytest.raises(DeviceError, match="ILLEGAL_ADDRESS"):
            finish()
    assert all(part.users == 0 for part in engine.transfers.registered._parts.values())
    engine.device.fails = False


def test_a_load_waits_for_what_is_being_stored(engine: Engine) -> None:
    """Loads and stores share the buffer."""
    slot = engine.staging[HEADER_BYTES : HEADER_BYTES + engine.block_bytes]
    finish = engine.transfers.payload_of(2)(slot)
    lease: Any = SimpleNamespace(valid=True)
    assert engine.transfers.load(lease, []).finish()
    assert np.array_equal(slot.reshape(LAYERS, -1), engine.pages[:, 2])
    assert finish is not None
    waits = engine.device.waits
    finish()
    assert engine.device.waits == waits


class Owner:
    """An owner of an event."""


def test_the_event_of_a_load_that_was_dropped_is_kept_until_its_copies_have_ended(engine: Engine) -> None:
    owner, lease = Owner(), SimpleNamespace(valid=True)
    known = weakref.ref(owner)
    engine.device.may_end.clear()
    load = engine.transfers.load(lease, [], after=1, keep=owner)  # type: ignore[arg-type]
    assert engine.device.is_waited_for.wait(20)
    thread = load._thread
    del load, owner
    gc.collect()
    was_kept = known() is not None
    engine.device.may_end.set()
    thread.join()
    gc.collect()
    assert was_kept and known() is None


def test_means_that_nobody_closed_unregister_their_buffer_before_it_is_unmapped() -> None:
    device = Device()
    anything: Any = device
    means = CopyResources(anything)
    assert means.buffer_address in device.registered and device.streams == 1
    device.mapped = weakref.ref(means.buffer)
    del means
    gc.collect()
    assert (device.registered, device.streams) == (set(), 0)
    assert device.mapped() is None


def test_what_means_that_nobody_closed_have_registered_ends_with_them() -> None:
    device = Device()
    device.mapped = lambda: device
    anything: Any = device
    means = CopyResources(anything)
    staging = np.zeros(MIB, np.uint8)
    means.registered.want(staging)
    assert means.registered.settle(30.0) and staging.ctypes.data in device.registered
    thread, known = means.registered._thread, weakref.ref(means.registered)
    del means
    gc.collect()
    thread.join(20)
    assert not thread.is_alive() and not device.registered
    gc.collect()
    assert known() is None, "the mappings refer to it no more"


def test_means_leave_what_was_given_to_them_registered() -> None:
    device = Device()
    device.mapped = lambda: device
    anything: Any = device
    registered = RegisteredMemory(anything)
    staging = np.zeros(MIB, np.uint8)
    registered.want(staging)
    means = CopyResources(anything, registered=registered)
    assert registered.settle(30.0)
    del means
    gc.collect()
    assert device.registered == {staging.ctypes.data}
    registered.close()
    assert not device.registered


def test_means_that_could_not_be_made_leave_nothing_registered() -> None:
    device = Device()
    device.knows_nothing = True
    device.mapped = lambda: device
    anything: Any = device
    with pytest.raises(DeviceError):
        CopyResources(anything)
    gc.collect()
    assert (device.registered, device.streams) == (set(), 0)
