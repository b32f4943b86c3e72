"""Slot images that the worker reads from files by itself: the header page to host memory, the payload to the device.

GPUDirect Storage, by the library kvikio (extra `gds`), reads past host memory if the machine can do that. The library
is loaded when a `DirectStorage` is made, by the worker alone. On other machines its registration has failed silently,
so read bytes are verified on the device before anybody may read them. The module owns the threads that read, the stream
of their copies, and files that are open in the library. It checks only that a read is complete. Invariants: each load
is reported once, when no part of it is under way any more; its descriptor is closed then; a file of the library is the
one of its descriptor, even if its name is another file's by now.
"""

from __future__ import annotations

import errno
import os
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue
from threading import Thread
from types import ModuleType
from typing import Any

from kvstore_cuda.copies import CopyRun, Runs
from kvstore_cuda.device import CudaDevice
from kvstore_cuda.driver import DriverError
from kvstore_proto.arena import HEADER_BYTES
from kvstore_proto.version import pip_install
from kvstore_tiers.gpu.streams import Events
from kvstore_tiers.image import aligned_up

MOST_FILES = 64  # open at once
# Read by the library when it is loaded. COMPAT_MODE: it copies through host memory by itself unless it must not, and
# says nothing; we do that better, so the environment has no say. GDS_THRESHOLD: from so many bytes on cuFile is asked.
_REQUIRED = {"KVIKIO_COMPAT_MODE": "OFF"}
_DEFAULTS = {"KVIKIO_GDS_THRESHOLD": "0", "KVIKIO_NTHREADS": "4"}


class DirectStorageFailed(OSError):
    """An error: the library for direct storage (reads from files straight to the device) is missing or cannot do what
    was asked. The message says what to do. It has no errno.
    """


class _DeviceBytes:
    """Device memory in the form that the library takes."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,), "typestr": "|u1", "data": (address, False), "strides": None, "version": 3,
        }  # fmt: skip


class DirectStorage:
    """A reader of files to device memory without a copy in host memory, by GPUDirect Storage. The thread that makes it
    must have the device's context. Raises DirectStorageFailed if the machine cannot do this.
    """

    def __init__(self) -> None:
        self._library = _load()
        self._lock = threading.Lock()
        self._files: OrderedDict[tuple[int, int], Any] = OrderedDict()  # by device and inode, the last used at the end

    def read(self, descriptor: int, offset: int, address: int, nbytes: int) -> int:
        """Read `nbytes` bytes at `offset` of the file `descriptor` to the device `address`, and return how many bytes
        were read. Offset, address and size are whole pages. Any thread with the device's context may call it. Raises
        DirectStorageFailed; then nothing of the read is under way any more.
        """
        try:
            file = self._file(descriptor)  # another thread may forget it meanwhile
            # One task: of several, those after one that failed would still write.
            return int(file.pread(_DeviceBytes(address, nbytes), nbytes, offset, task_size=nbytes).get())
        except Exception as error:  # of the library's own, and of C++
            raise DirectStorageFailed(f"direct storage: {type(error).__name__}: {error}") from None

    def _file(self, descriptor: int) -> Any:
        """Return the library's file of a descriptor, which is kept, since registering a file takes long beside a read.
        An inode is no other file's while it is open here.
        """
        status = os.fstat(descriptor)
        with self._lock:
            found = self._files.pop((status.st_dev, status.st_ino), None)
            if found is None:
                self._forget()
                found = self._library.CuFile(f"/proc/self/fd/{descriptor}", "r")
            self._files[status.st_dev, status.st_ino] = found
            return found

    def _forget(self) -> None:
        """Forget files that were deleted, and the one that was used least lately if there are many. The library closes
        a file that nothing refers to any more.
        """
        for key, file in list(self._files.items()):
            if not os.fstat(file.fileno()).st_nlink:
                del self._files[key]
        while len(self._files) >= MOST_FILES:
            self._files.popitem(last=False)


def _load() -> ModuleType:
    os.environ.update(_DEFAULTS | os.environ | _REQUIRED)
    try:
        import kvikio
        import kvikio.cufile_driver
    except Exception as error:  # a library's start may raise anything
        if isinstance(error, ImportError) and (error.name or "").partition(".")[0] == "kvikio":
            raise DirectStorageFailed(f"the library kvikio is missing: {pip_install('gds')}") from None
        reason = f"{type(error).__name__}: {error}"
        raise DirectStorageFailed(f"the library kvikio cannot be loaded: {reason}") from None
    try:
        kvikio.cufile_driver.driver_open()  # before a file is opened: without cuFile that waits for ever
    except Exception as error:
        raise DirectStorageFailed(f"cuFile does not start, gdscheck says why: {error}") from None
    library: ModuleType = kvikio
    return library


READERS = 4  # chosen, not measured: each has a whole block under way
Ended = Callable[[int, OSError | None], None]  # transfer, what went wrong; with an errno where the file cannot be read


@dataclass(frozen=True, slots=True)
class FileRead:
    """An order to the GPU worker to read a slot image from a file at `offset`: the header page goes to the host memory
    `host`, the payload to the device address `device`. Unless `is_direct`, the payload passes through the rest of
    `host`, which is at `host_address`. `transfer` is the order's number.
    """

    transfer: int
    descriptor: int
    offset: int
    payload_bytes: int
    host: memoryview
    host_address: int
    device: int
    is_direct: bool


class FileReads:
    """A runner of the reads of slot images from files in a GPU worker, with threads of its own. `direct` is None if
    there is no direct storage. `ended(transfer, error)` is called once for each read, on one of these threads.
    """

    def __init__(self, driver: CudaDevice, events: Events, direct: DirectStorage | None, ended: Ended) -> None:
        self._driver = driver
        self._events = events
        self._stream = events.stream()
        self._direct = direct
        self._ended = ended
        self._queue: SimpleQueue[FileRead] = SimpleQueue()
        self._threads: list[Thread] = []

    def start(self, read: FileRead) -> None:
        """Begin the read that `read` describes, and return at once. The descriptor in it is closed when the read
        ends.
        """
        if not self._threads:
            self._threads = [Thread(target=self._serve, name=f"gpu-file-{at}", daemon=True) for at in range(READERS)]
            for thread in self._threads:
                thread.start()
        self._queue.put(read)

    def _serve(self) -> None:
        self._driver.use_in_this_thread()
        while True:
            read = self._queue.get()
            try:
                self._read(read)
            except OSError as error:
                self._end(read, error)

    def _read(self, read: FileRead) -> None:
        payload_pages = aligned_up(read.payload_bytes)
        if read.is_direct:
            if self._direct is None:
                raise OSError("this worker has no direct storage")
            _read_whole(read.descriptor, read.host[:HEADER_BYTES], read.offset)
            device, at = read.device, read.offset + HEADER_BYTES
            got = self._direct.read(read.descriptor, at, device, payload_pages)
            if got != payload_pages:
                raise OSError(f"direct storage read {got} of {payload_pages} bytes")
            self._end(read, None)
            return
        _read_whole(read.descriptor, read.host[: HEADER_BYTES + payload_pages], read.offset)
        run = Runs.of([CopyRun(read.device, read.host_address + HEADER_BYTES, read.payload_bytes)])

        def settled(failure: DriverError | None) -> None:
            self._end(read, failure)

        stream = self._stream
        self._events.queue(stream, lambda: self._driver.copy(run, "to device", stream), settled)

    def _end(self, read: FileRead, failure: OSError | None) -> None:
        os.close(read.descriptor)
        self._ended(read.transfer, failure)


def _read_whole(descriptor: int, into: memoryview, offset: int) -> None:
    """Read into all of `into` by one call: the kernel reads that much at once. Raises OSError."""
    got = os.preadv(descriptor, [into], offset)
    if got != len(into):
        raise OSError(errno.EIO, f"{got} of {len(into)} bytes read")
