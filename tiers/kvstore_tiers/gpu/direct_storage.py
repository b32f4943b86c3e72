"""GPUDirect Storage by the library kvikio (extra `gds`): bytes of a file to device memory, past host memory where the
machine can do that.

All that knows the library; it is loaded when a `DirectStorage` is made, by the worker alone. Owns files that are open
in the library. Never decides what is read, nor whether it is right: registration has failed without a word elsewhere,
so what arrives is verified on the device before anybody may read it.
Invariant: a file is the one of its descriptor, even if its name is another file's by now.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from types import ModuleType
from typing import Any

MOST_FILES = 64  # open at once
# Read by the library when it is loaded. COMPAT_MODE: it copies through host memory by itself unless it must not, and
# says nothing; we do that better, so the environment has no say. GDS_THRESHOLD: from so many bytes on cuFile is asked.
_REQUIRED = {"KVIKIO_COMPAT_MODE": "OFF"}
_DEFAULTS = {"KVIKIO_GDS_THRESHOLD": "0", "KVIKIO_NTHREADS": "4"}


class DirectStorageFailed(OSError):
    """The library is missing, or cannot do it; the message says what to do. Without an errno."""


class _DeviceBytes:
    """Device memory in the form that the library takes."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,), "typestr": "|u1", "data": (address, False), "strides": None, "version": 3,
        }  # fmt: skip


class DirectStorage:
    """Of the device whose context is current in the thread that makes it. Raises DirectStorageFailed."""

    def __init__(self) -> None:
        self._library = _load()
        self._lock = threading.Lock()
        self._files: OrderedDict[tuple[int, int], Any] = OrderedDict()  # by device and inode, the last used at the end

    def read(self, descriptor: int, offset: int, address: int, nbytes: int) -> int:
        """Read from a file to device memory; how many bytes. Offset, address and size are whole pages. From any thread
        in which the device's context is current. Raises DirectStorageFailed; nothing is under way any more then."""
        try:
            file = self._file(descriptor)  # another thread may forget it meanwhile
            # One task: of several, those after one that failed would still write.
            return int(file.pread(_DeviceBytes(address, nbytes), nbytes, offset, task_size=nbytes).get())
        except Exception as error:  # of the library's own, and of C++
            raise DirectStorageFailed(f"direct storage: {type(error).__name__}: {error}") from None

    def _file(self, descriptor: int) -> Any:
        """Registering a file takes long beside a read, so that it is kept. An inode is no other file's while it is open
        here."""
        status = os.fstat(descriptor)
        with self._lock:
            found = self._files.pop((status.st_dev, status.st_ino), None)
            if found is None:
                self._forget()
                found = self._library.CuFile(f"/proc/self/fd/{descriptor}", "r")
            self._files[status.st_dev, status.st_ino] = found
            return found

    def _forget(self) -> None:
        """Files that were deleted, and the one that was used least lately where there are many. The library closes a
        file that nothing refers to any more."""
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
            raise DirectStorageFailed("the library kvikio is missing: pip install 'kvstored[gds]'") from None
        reason = f"{type(error).__name__}: {error}"
        raise DirectStorageFailed(f"the library kvikio cannot be loaded: {reason}") from None
    try:
        kvikio.cufile_driver.driver_open()  # before a file is opened: without cuFile that waits for ever
    except Exception as error:
        raise DirectStorageFailed(f"cuFile does not start, gdscheck says why: {error}") from None
    library: ModuleType = kvikio
    return library
