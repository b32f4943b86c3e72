"""Copies of an engine's pool where the device fails, or where two threads want the buffer. No driver takes part: what
stands for the device is memory of this process.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from kvstore_client.device import DeviceError, DevicePool, DeviceTransfers, LayerLoad, LinkBudget, PoolPart
from kvstore_client.device.stores import Stores
from kvstore_client.errors import KVStoreError
from kvstore_client.lease import Lease
from kvstore_cuda.copies import Runs
from tests.reference.played_device import PlayedDevice


class Device(PlayedDevice):
    """A device whose context can be used by the thread that made it, and by no other."""

    def __init__(self) -> None:
        super().__init__()
        self._owner = threading.get_ident()

    @contextmanager
    def current(self) -> Iterator[None]:
        if threading.get_ident() != self._owner:
            raise DeviceError("cuCtxSetCurrent", 700, "CUDA_ERROR_ILLEGAL_ADDRESS")
        yield

    def call(self, name: str, *arguments: Any) -> object:
        return object()


class Stream:
    """Copies at once."""

    def queue(self, runs: Runs, way: str) -> None:
        for run in runs.rows():
            ctypes.memmove(run.to, run.source, run.nbytes)

    def synchronize(self) -> None:
        pass


class Means:
    """The resources of copies with nothing that is registered. The next user of the buffer comes as soon as it may."""

    def __init__(self, device: Device) -> None:
        self.device, self.stream, self.budget = device, Stream(), LinkBudget()
        self.buffer = np.zeros(4096, np.uint8)
        self.buffer_address: int = self.buffer.__array_interface__["data"][0]
        self.registered = SimpleNamespace(take=lambda *_: None)
        self.stores = Stores(cast(Any, self.stream), cast(Any, self.registered), self.buffer)

    @property
    @contextmanager
    def using(self) -> Iterator[None]:
        yield
        self.stores.settle()
        self.buffer[:] = 0xA5

    def check_open(self) -> None:
        pass


def _transfers() -> tuple[DeviceTransfers, np.ndarray[Any, np.dtype[np.uint8]]]:
    memory = np.random.default_rng(1).integers(0, 256, (2, 3, 64), dtype=np.uint8)  # layer, page, byte
    begin = memory.__array_interface__["data"][0]
    pool = DevicePool([[PoolPart(begin + layer * 192, 64, 64)] for layer in range(2)], 3, memory=memory)
    device = Device()
    return DeviceTransfers(cast(Any, device), pool, resources=cast(Any, Means(device))), memory


def test_a_load_that_cannot_begin_keeps_nobody_waiting_and_is_not_believed() -> None:
    transfers, _ = _transfers()
    load = LayerLoad(transfers, Lease(), [], 0)
    with pytest.raises(DeviceError, match="cuCtxSetCurrent"):
        load.wait(1, 0)
    with pytest.raises(DeviceError, match="cuCtxSetCurrent"):
        load.finish()


def test_the_buffer_is_no_one_elses_before_its_bytes_are_in_the_slot() -> None:
    transfers, memory = _transfers()
    slot = np.zeros(128, np.uint8)
    transfers.payload_of(2)(slot)
    assert np.array_equal(slot.reshape(2, 64), memory[:, 2])


def test_memory_is_kept_as_long_as_a_copy_of_its_pool_may_come() -> None:
    transfers, memory = _transfers()
    payload, known = transfers.payload_of(1), weakref.ref(memory)
    del transfers, memory
    assert known() is not None
    del payload
    assert known() is None


def test_a_buffer_that_holds_no_block_is_refused() -> None:
    transfers, _ = _transfers()
    large = DevicePool([[PoolPart(4096, 8192, 8192)]], 1)
    with pytest.raises(KVStoreError, match="holds no block of 8192"):
        DeviceTransfers(transfers.device, large, resources=transfers.resources)
