"""The part of an engine that copies meet: a paged pool on the device, a stream that reads and
writes its pages, events.
"""

from __future__ import annotations

import mmap
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvstore_client import Session
from kvstore_client.device import CopyResources, DeviceMemory, DevicePool, DeviceTransfers, LinkBudget
from tests.reference.conversations import LAYERS, payloads_of, tokens_of

PAGES = 48
POOL_BYTES = 2 << 20  # with blocks of `model()`; a multiple with larger ones


@dataclass
class DeviceArray:
    """The attributes that torch and CuPy show of an array."""

    __cuda_array_interface__: dict[str, Any]


class EmulatedEngine:
    def __init__(self, session: Session) -> None:
        self.session, self.device, self.model = session, session.device, session.fingerprint
        self.layer_bytes = self.model.payload_bytes() // LAYERS
        pool_bytes = -(-PAGES * self.model.payload_bytes() // POOL_BYTES) * POOL_BYTES
        self.address = allocate(self.device, pool_bytes)
        halves = [self._array(layer, half) for layer in range(LAYERS) for half in range(2)]
        self.pool = DevicePool.from_tensors([(halves[2 * layer], halves[2 * layer + 1]) for layer in range(LAYERS)])
        self.transfers = DeviceTransfers(self.device, self.pool)
        self.host = np.frombuffer(mmap.mmap(-1, pool_bytes), np.uint8)
        self.layout = self.host[: PAGES * LAYERS * self.layer_bytes].reshape(LAYERS, 2, PAGES, -1)
        self._random, self._events = random.Random(1), list[Any]()
        self.host_address: int = self.host.__array_interface__["data"][0]
        with self.device.current():
            self.stream = self.device.call("cuStreamCreate", 1)
            self.device.call("cuMemHostRegister", self.host_address, pool_bytes, 1)

    def _array(self, layer: int, half: int) -> DeviceArray:
        """K or V of a layer: [page, byte], K and V of all pages of a layer one after the other."""
        address = self.address + (2 * layer + half) * PAGES * self.layer_bytes // 2
        shape = (PAGES, self.layer_bytes // 4)
        return DeviceArray({"shape": shape, "typestr": "<f2", "data": (address, False), "strides": None, "version": 3})

    def obey(self, command: str, *numbers: int) -> dict[str, Any]:
        if command == "register":
            return {"settled": self.transfers.registered.settle(30.0)}
        if command == "registered":
            return {"pieces": self._registered()}
        if command == "crossover":
            return dict(self.transfers.resources.crossover.settled())
        if command == "load-captured":
            return self._captured(*numbers)
        if command == "store-beside-a-load":
            return self._store_beside_a_load(*numbers)
        number, blocks = numbers
        pages = self._random.sample(range(PAGES), blocks)
        return self._load(number, pages) if command == "load" else self._store(number, pages, command)

    def _load(self, number: int, pages: list[int]) -> dict[str, Any]:
        """Use the pages for something else before, and read each layer as soon as it has come."""
        self.host[:] = 0x5A
        with self.device.current():
            for _ in range(8):  # takes longer than the load
                for layer in range(LAYERS):
                    self._write(layer)
            used = self._mark()
        with self.session.get(tokens_of(number, len(pages))) as lease:
            pages = pages[: lease.blocks]
            with self.transfers.load(lease, pages, after=used) as load:
                for layer in range(LAYERS):
                    load.wait(layer, int(self.stream))
                    self._read(layer)
                with self.device.current():
                    self.device.call("cuStreamSynchronize", self.stream)
                valid = load.finish()
                load.wait(0, int(self.stream))  # nothing is left to wait for, and no event is there any more
            on_device = sum(bool(lease.device_address(block)) for block in range(lease.blocks))
        expected = payloads_of(number, len(pages), self.model)
        right = all(bool((self._page(page) == each).all()) for page, each in zip(pages, expected, strict=True))
        return {
            "blocks": len(pages), "on_device": on_device, "right": right, "valid": valid,
            "registered": self._registered(),
        }  # fmt: skip

    def _captured(self, number: int, blocks: int) -> dict[str, Any]:
        """Begin copies anew and load while a stream is captured as torch does it: no thread may spoil the graph."""
        with self.device.current():
            stream = self.device.call("cuStreamCreate", 1)
            modes = self.device.driver.CUstreamCaptureMode
            self.device.call("cuStreamBeginCapture", stream, modes.CU_STREAM_CAPTURE_MODE_GLOBAL)
        self.transfers.close()
        self.transfers = DeviceTransfers(self.device, self.pool)
        self.transfers.resources.crossover.settled()
        assert self.transfers.registered.settle(30.0)
        found = self._load(number, self._random.sample(range(PAGES), blocks))
        with self.device.current():
            self.device.call("cuStreamEndCapture", stream)
        return found

    def _registered(self) -> int:
        return sum(part.is_made for part in self.transfers.registered._parts.values())

    def _store(self, number: int, pages: list[int], command: str) -> dict[str, Any]:
        """Write each layer on the engine's stream, an event behind it. "store-at-once" shows the last one alone;
        "store-decoding": the engine decodes meanwhile."""
        self.transfers.resources.decoding(command == "store-decoding")
        for page, payload in zip(pages, payloads_of(number, len(pages), self.model), strict=True):
            self.layout[:, :, page] = payload.reshape(LAYERS, 2, -1)
        events: list[int] = []
        with self.device.current():
            for layer in range(LAYERS):
                self._write(layer)
                events.append(self._mark())
        payloads = [
            self.transfers.payload_of(page, events[-1:] if command == "store-at-once" else events) for page in pages
        ]
        receipt = self.session.put(
            tokens_of(number, len(pages)), payloads=payloads, payload_bytes=self.model.payload_bytes(), wait="settled"
        )
        return {"stored": receipt.visible_blocks}

    def _store_beside_a_load(self, number: int, blocks: int, loaded: int) -> dict[str, Any]:
        """Store while the engine decodes and the rate allows nothing; load another conversation meanwhile, all of it;
        then decode ends. Both use the same stream and buffer."""
        waits = threading.Event()

        def until_told(changed: threading.Condition, timeout_s: float) -> None:
            waits.set()
            changed.wait()

        budget = LinkBudget(1, clock=lambda: 0.0, wait=until_told)
        means = CopyResources(self.device, self.pool.block_bytes, budget=budget)
        self.transfers = DeviceTransfers(self.device, self.pool, resources=means)
        pages = self._random.sample(range(PAGES), 2 * blocks)
        means.decoding(True)
        budget.wait("stores", 1 << 30)
        with ThreadPoolExecutor(1) as executor:
            storing = executor.submit(self._store, number, pages[:blocks], "store-decoding")
            assert waits.wait(30)
            with self.session.get(tokens_of(loaded, blocks)) as lease:
                whole = self.transfers.load(lease, pages[blocks : blocks + lease.blocks]).finish()
            waited = not storing.done()
            means.decoding(False)
            found = storing.result()
        for layer in range(LAYERS):
            self._read(layer)
        with self.device.current():
            self.device.call("cuStreamSynchronize", self.stream)
        expected = payloads_of(loaded, lease.blocks, self.model)
        right = all(bool((self._page(page) == each).all()) for page, each in zip(pages[blocks:], expected, strict=True))
        means.close()
        return found | {"waited": waited, "loaded": lease.blocks, "right": right and whole}

    def _page(self, page: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        return self.layout[:, :, page].reshape(-1)

    def _read(self, layer: int) -> None:
        """All pages of a layer, into host memory, on the engine's stream."""
        offset = layer * PAGES * self.layer_bytes
        with self.device.current():
            place = self.device.driver.CUdeviceptr(self.address + offset)
            self.device.call(
                "cuMemcpyDtoHAsync", self.host_address + offset, place, PAGES * self.layer_bytes, self.stream
            )  # fmt: skip

    def _write(self, layer: int) -> None:
        """The other way. The context is current."""
        offset = layer * PAGES * self.layer_bytes
        place = self.device.driver.CUdeviceptr(self.address + offset)
        self.device.call("cuMemcpyHtoDAsync", place, self.host_address + offset, PAGES * self.layer_bytes, self.stream)

    def _mark(self) -> int:
        """An event behind what is queued on the engine's stream. The context is current."""
        event = self.device.call("cuEventCreate", 2)
        self._events.append(event)
        self.device.call("cuEventRecord", event, self.stream)
        return int(event)


def allocate(device: DeviceMemory, nbytes: int) -> int:
    """New device memory, to read and write."""
    cuda = device.driver
    wanted = cuda.CUmemAllocationProp()
    wanted.type = cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    wanted.requestedHandleTypes = cuda.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    wanted.location.type = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    wanted.location.id = device.index
    access = cuda.CUmemAccessDesc()
    access.location = wanted.location
    access.flags = cuda.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    with device.current():
        handle = device.call("cuMemCreate", nbytes, wanted, 0)
        address = device.call("cuMemAddressReserve", nbytes, 0, cuda.CUdeviceptr(0), 0)
        device.call("cuMemMap", address, nbytes, 0, handle, 0)
        device.call("cuMemSetAccess", address, nbytes, [access], 1)
    return int(address)
