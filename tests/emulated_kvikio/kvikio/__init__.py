"""The part of the library kvikio that the GPU's worker calls, over POSIX reads and the (emulated) CUDA driver, for
tests that put `tests/emulated_kvikio` on the path of a worker.

What is read is what the file has, unless the file that EMULATED_KVIKIO_ORDERS names says otherwise, in one word:
`spoil` (a bit is wrong), `short` (a page less comes), `refuse` (files cannot be registered), `fail` (reads raise),
`kill` (the process dies in the middle of a read), `slow` (a read takes two seconds). A read is cut into tasks, as the
library does; each appends a line to the file of EMULATED_KVIKIO_READS. EMULATED_KVIKIO_START says how the library
cannot be loaded: `raise` or `kill`.
"""

from __future__ import annotations

import mmap
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
from cuda.bindings import driver

PAGE_BYTES = 4096
TASK_BYTES = 1 << 20  # unless a read says otherwise


_START = os.environ.get("EMULATED_KVIKIO_START")
if _START == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
if _START == "raise" or os.environ["KVIKIO_COMPAT_MODE"] != "OFF":
    raise RuntimeError("kvikio does not start")


def ordered() -> str:
    path = os.environ.get("EMULATED_KVIKIO_ORDERS")
    return Path(path).read_text().strip() if path else ""


def _call(name: str, *arguments: Any) -> Any:
    code, *answers = getattr(driver, name)(*arguments)
    if code != 0:
        raise RuntimeError(f"{name}: {code}")
    return answers[0] if answers else None


class IOFuture:
    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes

    def get(self) -> int:
        return self._nbytes


class CuFile:
    def __init__(self, file: str, flags: str = "r") -> None:
        assert flags == "r", "the slab is not ours to write"
        if ordered() == "refuse":
            raise RuntimeError("cuFile error: GPUDirect Storage not supported on current file")
        self._descriptor = os.open(file, os.O_RDONLY)

    def fileno(self) -> int:
        return self._descriptor

    def pread(self, buf: Any, size: int, file_offset: int, task_size: int | None = None) -> IOFuture:
        order, target = ordered(), buf.__cuda_array_interface__
        if order == "fail":
            raise RuntimeError("cuFile error: internal error")
        assert target["typestr"] == "|u1" and target["shape"] == (size,) and file_offset % PAGE_BYTES == 0
        if order == "short":
            size -= PAGE_BYTES
        task_bytes = task_size or TASK_BYTES
        tasks = [(at, min(task_bytes, size - at)) for at in range(0, size, task_bytes)]
        address = target["data"][0]
        return IOFuture(sum(self._task(order, address + at, nbytes, file_offset + at) for at, nbytes in tasks))

    def _task(self, order: str, address: int, size: int, file_offset: int) -> int:
        host = mmap.mmap(-1, size)
        got = os.preadv(self._descriptor, [host], file_offset)
        if order == "spoil":
            host[got // 2] ^= 1
        if order == "slow":
            time.sleep(2)
        if order == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if "EMULATED_KVIKIO_READS" in os.environ:
            with open(os.environ["EMULATED_KVIKIO_READS"], "a") as reads:
                reads.write(f"{got}\n")
        self._copy(address, host, got)
        return got

    def _copy(self, address: int, host: mmap.mmap, nbytes: int) -> None:
        """Synchronous, as the library's reads are."""
        source = np.frombuffer(host, np.uint8).ctypes.data
        _call("cuMemHostRegister", source, len(host), 0)
        stream = _call("cuStreamCreate", 1)
        _call("cuMemcpyHtoDAsync", driver.CUdeviceptr(address), source, nbytes, stream)
        _call("cuStreamSynchronize", stream)
        _call("cuStreamDestroy", stream)
        _call("cuMemHostUnregister", source)

    def __del__(self) -> None:
        if hasattr(self, "_descriptor"):
            os.close(self._descriptor)
