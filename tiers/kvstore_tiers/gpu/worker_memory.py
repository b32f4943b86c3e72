"""Memory that a worker has mapped: chunks of the device, and host memory with the thread that registers it.

The module owns the handles, mappings and registrations, and the reasons for missing chunks. Registering takes about 0.1
s a GB by others' figures, so only the bounce buffer, which everything needs, is registered at once; the rest in turn by
the thread, while commands are obeyed. Dropped memory goes first: it stays in use until it is unregistered. Invariants:
a copy finds registered memory only; memory is unregistered when no copy is under way any more that was queued before it
was dropped, and reported as left after that, once; a new chunk is available once it is cleared and the tier has a
descriptor of it; a chunk with blocks that could not be mapped is tried again whenever it is asked for.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvstore_cuda.device import CudaDevice
from kvstore_cuda.driver import DriverError
from kvstore_tiers.gpu import wire
from kvstore_tiers.gpu.streams import Events


class Unregistered(KeyError):
    """An error: copies cannot use a piece of host memory, because it is not registered with the device, or not yet."""


@dataclass(slots=True, eq=False)
class _Region:
    number: int
    mapping: mmap.mmap
    address: int
    is_writable: bool
    is_registered: bool = False


class HostMemory:
    """The host memory (in numbered regions) that a GPU worker has mapped and registered with the device. `say` sends a
    packet to the tier. `broken` is called with an error after which the CUDA context cannot be used.
    """

    def __init__(
        self, driver: CudaDevice, events: Events, say: Callable[[bytes], None], broken: Callable[[DriverError], None]
    ) -> None:
        self._driver = driver
        self._events = events
        self._say = say
        self._broken = broken
        self._regions: dict[int, _Region] = {}
        self._wanted: deque[_Region] = deque()
        self._leaving: deque[_Region] = deque()
        self._changed = threading.Condition()
        threading.Thread(target=self._serve, name="gpu-register", daemon=True).start()

    def add(self, number: int, region: wire.MemoryRegion) -> None:
        """Map the host memory `region` under `number`, and register it with the device soon. If mapping fails, the tier
        is notified and copies use the bounce buffer (the region that the worker always has); for the bounce buffer
        itself OSError is raised. Raises DriverError if the CUDA context is broken.
        """
        if number in self._regions:
            return
        try:
            mapping, is_writable = _map(region)
        except OSError as error:
            if number == wire.BOUNCE_REGION:
                raise
            self._say(wire.pack(wire.REGISTERED, number, text=str(error)))
            return
        found = _Region(number, mapping, np.frombuffer(mapping, dtype=np.uint8).ctypes.data, is_writable)
        self._regions[number] = found
        if number == wire.BOUNCE_REGION:
            self._register(found)
            return
        with self._changed:
            self._wanted.append(found)
            self._changed.notify()

    def drop(self, number: int) -> None:
        """Forget the region `number` of host memory, so that later transfers do not find it. It is unregistered and
        unmapped when the copies under way have ended.
        """
        region = self._regions.pop(number, None)
        if region is None:
            self._say(wire.pack(wire.LEFT, number))
            return
        with self._changed:
            self._leaving.append(region)
            self._changed.notify()

    def address_of(self, number: int, offset: int, nbytes: int) -> int:
        """Return the address of the `nbytes` bytes at `offset` of region `number`. Raises Unregistered, and KeyError
        for bytes outside the region.
        """
        region = self._regions.get(number)
        if region is None or not region.is_registered:
            raise Unregistered(number)
        if offset + nbytes > len(region.mapping):
            raise KeyError("outside its memory")
        return region.address + offset

    def view(self, number: int, offset: int, nbytes: int) -> memoryview:
        """Return the `nbytes` bytes at `offset` of region `number` as a memoryview. Raises Unregistered or KeyError."""
        self.address_of(number, offset, nbytes)
        return memoryview(self._regions[number].mapping)[offset : offset + nbytes]

    def _serve(self) -> None:
        self._driver.use_in_this_thread()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._leaving or self._wanted)
                leaving = self._leaving.popleft() if self._leaving else None
                wanted = self._wanted.popleft() if leaving is None else None
                if leaving is not None and leaving in self._wanted:
                    self._wanted.remove(leaving)
            try:
                if leaving is not None:
                    self._leave(leaving)
                elif wanted is not None:
                    self._register(wanted)
            except DriverError as error:
                self._broken(error)

    def _register(self, region: _Region) -> None:
        try:
            self._driver.register(region.address, len(region.mapping), read_only=not region.is_writable)
        except DriverError as error:
            if error.is_final or region.number == wire.BOUNCE_REGION:
                raise
            self._say(wire.pack(wire.REGISTERED, region.number, text=str(error)))
        else:
            region.is_registered = True
            self._say(wire.pack(wire.REGISTERED, region.number, int(region.is_writable)))

    def _leave(self, region: _Region) -> None:
        if region.is_registered:
            self._events.settle()
            self._driver.unregister(region.address)
        region.mapping.close()
        self._say(wire.pack(wire.LEFT, region.number))


def _map(region: wire.MemoryRegion) -> tuple[mmap.mmap, bool]:
    """Return the mapping, and whether it may be written: sealed arenas may only be read."""
    descriptor, offset, nbytes = region
    try:
        return mmap.mmap(descriptor, nbytes, offset=offset), True
    except PermissionError:
        return mmap.mmap(descriptor, nbytes, prot=mmap.PROT_READ, offset=offset), False


@dataclass(frozen=True, slots=True)
class _Chunk:
    handle: Any
    address: int
    nbytes: int


class WorkerDeviceMemory:
    """The chunks (pieces of device memory) that a GPU worker has made or imported. `say` sends a packet and descriptors
    to the tier. Methods raise DriverError if the CUDA context is broken.
    """

    def __init__(self, driver: CudaDevice, events: Events, say: Callable[..., None]) -> None:
        self._driver = driver
        self._events = events
        self._say = say
        self._chunks: dict[int, _Chunk] = {}
        self._missing: dict[int, str] = {}  # chunks that are not there, and why
        self._unmapped: dict[int, tuple[int, int]] = {}  # those of them that hold blocks: bytes, a descriptor

    def add(self, number: int, nbytes: int, descriptor: int = -1) -> None:
        """Make the chunk `number` of `nbytes` bytes of device memory, or import it from `descriptor`, which the caller
        closes. A known chunk is left unchanged. If the device has no memory, the tier is notified.
        """
        if number in self._chunks:
            return
        try:
            if descriptor < 0:
                self._make(number, nbytes)
            else:
                if number not in self._unmapped:
                    self._unmapped[number] = nbytes, os.dup(descriptor)
                self._import(number)
        except DriverError as error:
            if error.is_final:
                raise
            self._missing[number] = str(error)
            self._say(wire.pack(wire.REFUSED, number, text=str(error)))

    def drop(self, number: int) -> None:
        self._forget_missing(number)
        chunk = self._chunks.pop(number, None)
        if chunk is not None:
            self._events.settle()
            self._unmap(chunk)

    def address_of(self, number: int, offset: int, nbytes: int) -> int:
        """Return the device address of the `nbytes` bytes at `offset` of chunk `number`. Raises KeyError if they do not
        exist.
        """
        if number in self._unmapped:
            try:
                self._import(number)
            except DriverError as error:
                if error.is_final:
                    raise
        chunk = self._chunks[number]
        if offset + nbytes > chunk.nbytes:
            raise KeyError("outside its memory")
        return chunk.address + offset

    def why_missing(self, numbers: Iterable[int]) -> str:
        """Return the reason why the first of the chunks `numbers` that does not exist could not be made; "" if all
        exist or no reason is known.
        """
        return next((self._missing[number] for number in numbers if number in self._missing), "")

    def _make(self, number: int, nbytes: int) -> None:
        chunk = self._mapped(self._driver.create(nbytes), nbytes)
        try:
            self._driver.clear(chunk.address, nbytes)  # a client may import it: whose was it before?
            exported = self._driver.export_descriptor(chunk.handle)
        except DriverError:
            self._unmap(chunk)
            raise
        try:
            self._say(wire.pack(wire.MADE, number), exported)
        finally:
            os.close(exported)
        self._chunks[number] = chunk

    def _mapped(self, handle: Any, nbytes: int) -> _Chunk:
        try:
            return _Chunk(handle, self._driver.map(handle, nbytes), nbytes)
        except DriverError:
            self._driver.release(handle)
            raise

    def _import(self, number: int) -> None:
        nbytes, descriptor = self._unmapped[number]
        self._chunks[number] = self._mapped(self._driver.import_descriptor(descriptor), nbytes)
        self._forget_missing(number)

    def _forget_missing(self, number: int) -> None:
        self._missing.pop(number, None)
        if number in self._unmapped:
            os.close(self._unmapped.pop(number)[1])

    def _unmap(self, chunk: _Chunk) -> None:
        self._driver.unmap(chunk.address, chunk.nbytes)
        self._driver.release(chunk.handle)
