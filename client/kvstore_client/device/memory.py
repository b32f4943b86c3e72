"""Device memory of the daemon's GPU tier, imported for reading in place by an engine that computes on that device.

The module owns the mappings: each is read-only, and ends when nothing refers to its `DeviceChunk` any more. It knows,
by weak references, the arenas in host memory that sessions of the device have mapped, for copies from them. It copies a
payload only if asked for one in host memory. Invariants: a mapping is never writable; a place outside its chunk is
never read, since that would break the engine's context; the caller's context is current again after each call; no call
spoils a CUDA graph that the engine captures on another stream meanwhile; host memory is not unmapped as long as the
driver may know it: other memory at its address could not be registered.

The library is `cuda-bindings`: pip install '.[gpu]'.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import numpy as np

from kvstore_client.errors import invalid
from kvstore_client.memory import Bytes
from kvstore_cuda.copies import CopyRun, Runs
from kvstore_cuda.device import CudaDevice, forget, quietly
from kvstore_cuda.driver import DriverError as DeviceError
from kvstore_proto.arena import HEADER_BYTES


class Follower(Protocol):
    """A receiver of reports about mapped arenas (shared host memory of the daemon). `mapped` gets the array over each
    arena, and `given_up` gets the array again when its session has ended. Neither method waits.
    """

    def mapped(self, memory: Bytes) -> None: ...
    def given_up(self, memory: Bytes) -> None: ...


class HostMappings:
    """The register of the arenas (shared host memory of the daemon) that the sessions of one device have mapped. It may
    be used from any thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: weakref.WeakValueDictionary[int, Bytes] = weakref.WeakValueDictionary()  # by address
        self._followers: list[Follower] = []

    def add(self, memory: Bytes) -> None:
        """Add `memory`, an arena that a session has mapped or goes on using, and report it to each follower."""
        with self._lock:
            self._known[_address(memory)] = memory
            for follower in self._followers:
                follower.mapped(memory)

    def drop(self, memory: Bytes) -> None:
        """Remove `memory`, an arena whose session has ended, and report that to each follower."""
        with self._lock:
            self._known.pop(_address(memory), None)
            for follower in self._followers:
                follower.given_up(memory)

    def follow(self, follower: Follower) -> None:
        """Call `follower.mapped` with every arena that is known now, and with each later one, until `leave`."""
        with self._lock:
            self._followers.append(follower)
            for memory in list(self._known.values()):
                follower.mapped(memory)

    def leave(self, follower: Follower) -> None:
        """Stop reporting arenas to `follower`. A second call does nothing."""
        with self._lock:
            self._followers = [each for each in self._followers if each is not follower]


def _address(memory: Bytes) -> int:
    return int(memory.__array_interface__["data"][0])


_BUFFER_BYTES = 64 * HEADER_BYTES  # host memory that the device copies to

__all__ = ["DeviceChunk", "DeviceError", "DeviceMemory"]


@dataclass(frozen=True, eq=False)
class DeviceChunk:
    """A piece of the daemon's device memory, mapped read-only in this process: `nbytes` bytes at `address` on the
    device `memory`. It stays mapped as long as something refers to this object.
    """

    address: int
    nbytes: int
    memory: DeviceMemory

    @property
    def device(self) -> int:
        return self.memory.index

    def read(self, offset: int, nbytes: int) -> Bytes:
        """Return a read-only copy in host memory of `nbytes` bytes from `offset` in this chunk. Raises ValueError if
        they are outside the chunk, and DeviceError.
        """
        if offset < 0 or nbytes < 0 or offset + nbytes > self.nbytes:
            raise ValueError(f"bytes {offset}..{offset + nbytes} are outside a chunk of {self.nbytes}")
        (copy,) = self.memory.read([(self.address + offset, nbytes)])
        return copy


class DeviceMemory(CudaDevice):
    """A CUDA device from which leased blocks may be read in place. `index` is its number in this process; `identity`
    names it to every process. Raises KVStoreError if there is no such device, no driver or no library for it.
    """

    def __init__(self, index: int) -> None:
        self._lock = threading.Lock()  # of the buffer
        self.mappings = HostMappings()
        try:
            super().__init__(index)
            with contextlib.ExitStack() as undo:
                undo.callback(quietly, self.driver, "cuDevicePrimaryCtxRelease", self.handle)
                with self.current():
                    self._stream = self.stream()
                    undo.callback(quietly, self.driver, "cuStreamDestroy", self._stream)
                    buffer = mmap.mmap(-1, _BUFFER_BYTES)
                    self._address = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
                    self.register(self._address, _BUFFER_BYTES)
                undo.callback(forget, self.driver, self.context, self._address, buffer)
                ending = undo.pop_all()
        except OSError as error:  # NoDriver is one
            raise invalid(f"CUDA device {index} cannot be used: {error}") from None
        weakref.finalize(self, ending.close).atexit = False  # the driver may be gone already then

    def import_chunk(self, descriptor: int, nbytes: int) -> DeviceChunk:
        """Map `nbytes` bytes of the daemon's device memory read-only, and return the chunk. The daemon sent
        `descriptor`, which the caller closes afterwards. Raises DeviceError.
        """
        with self.current(), contextlib.ExitStack() as undo:
            handle = self.import_descriptor(descriptor)
            undo.callback(self.quietly, "cuMemRelease", handle)
            address = self.map(handle, nbytes, read_only=True)
            undo.callback(self._unmap, address, nbytes)
            ending = undo.pop_all()
        chunk = DeviceChunk(address, nbytes, self)
        weakref.finalize(chunk, self._end, ending).atexit = False
        return chunk

    def read(self, places: Sequence[tuple[int, int]]) -> list[Bytes]:
        """Return read-only host copies of pieces of device memory, in order. Each of `places` is an address and a
        number of bytes. Raises DeviceError.
        """
        copies = [np.empty(nbytes, np.uint8) for _, nbytes in places]
        with self._lock, self.current():
            parts: list[tuple[Bytes, int]] = []  # of what fits into the buffer: destination, and address on the device
            used = 0
            for (address, nbytes), copy in zip(places, copies, strict=True):
                for start in range(0, nbytes, _BUFFER_BYTES):
                    part = copy[start : start + _BUFFER_BYTES]
                    if used + part.nbytes > _BUFFER_BYTES:
                        self._fill(parts)
                        used = 0
                    parts.append((part, address + start))
                    used += part.nbytes
            self._fill(parts)
        for copy in copies:
            copy.flags.writeable = False
        return copies

    def _fill(self, parts: list[tuple[Bytes, int]]) -> None:
        """Fill the arrays of `parts` from their addresses by way of the buffer, and empty the list."""
        places = list(accumulate((part.nbytes for part, _ in parts), initial=self._address))
        runs = Runs.of(CopyRun(at, source, part.nbytes) for at, (part, source) in zip(places, parts, strict=False))
        self.copy(runs, "to host", self._stream)
        self.synchronize(self._stream)
        for at, (part, _) in zip(places, parts, strict=False):
            ctypes.memmove(part.ctypes.data, at, part.nbytes)
        parts.clear()

    def _unmap(self, address: int, nbytes: int) -> None:
        with contextlib.suppress(DeviceError):
            self.unmap(address, nbytes)

    def _end(self, ending: contextlib.ExitStack) -> None:
        with contextlib.suppress(DeviceError), self.current(), ending:
            pass
