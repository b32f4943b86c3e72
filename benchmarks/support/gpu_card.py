"""A CUDA device as the kernels' questions want it: memory that is filled and read, and times without launch gaps.

Owns the memory, until the process ends. Times are of CUDA graphs that hold a call many times: neither Python's
nor the driver's launches are in them.
"""

from __future__ import annotations

import ctypes
import mmap
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore_engine.kernels.cuda import Device
from kvstore_proto.cuda_copies import Run
from kvstore_proto.cuda_driver import call
from kvstore_tiers.gpu.driver import Driver
from support.gpu_kernels import Array, Card

REPEATS, ROUNDS = 20, 5
COPIED_BYTES = 512 << 20


class CudaCard(Card):
    """Device `index`. Raises NoDriver, DriverError, CudaError."""

    def __init__(self, index: int) -> None:
        from cuda.bindings import driver

        self._cuda = driver
        self._driver = Driver(index)
        self._stream = self._driver.stream()
        self.launcher = Device(index)
        self.stream = int(self._stream)

    def place(self, array: Array) -> int:
        return self.repeated(array, array.nbytes)

    def repeated(self, array: Array, nbytes: int) -> int:
        address = self._memory(nbytes)
        mapping, host = self._pinned(array.nbytes)
        mapping[: array.nbytes] = array.tobytes()
        starts = range(0, nbytes, array.nbytes)
        runs = [Run(address + start, host, min(array.nbytes, nbytes - start)) for start in starts]
        self._driver.copy(runs, to_device=True, stream=self._stream)
        self._driver.synchronize(self._stream)
        self._driver.unregister(host)
        return address

    def read(self, address: int, like: Array) -> Array:
        mapping, host = self._pinned(like.nbytes)
        self._driver.copy([Run(host, address, like.nbytes)], to_device=False, stream=self._stream)
        self._driver.synchronize(self._stream)
        self._driver.unregister(host)
        copied: npt.NDArray[np.generic] = np.frombuffer(mapping[: like.nbytes], like.dtype).reshape(like.shape)
        return copied

    def seconds(self, queue: Callable[[], object]) -> float:
        queue()  # compiles, and warms up
        self._driver.synchronize(self._stream)
        self._call("cuStreamBeginCapture", self._stream, self._cuda.CUstreamCaptureMode(0))
        for _ in range(REPEATS):
            queue()
        graph = self._call("cuGraphInstantiate", self._call("cuStreamEndCapture", self._stream), 0)
        took = []
        for _ in range(ROUNDS):
            began_s = time.perf_counter()
            self._call("cuGraphLaunch", graph, self._stream)
            self._driver.synchronize(self._stream)
            took.append(time.perf_counter() - began_s)
        self._call("cuGraphExecDestroy", graph)
        return min(took) / REPEATS

    def copied_bytes_s(self) -> float:
        source, target = self._memory(COPIED_BYTES), self._memory(COPIED_BYTES)
        ends = self._cuda.CUdeviceptr(target), self._cuda.CUdeviceptr(source)
        took_s = self.seconds(lambda: self._call("cuMemcpyDtoDAsync", *ends, COPIED_BYTES, self._stream))
        return 2 * COPIED_BYTES / took_s

    def _memory(self, nbytes: int) -> int:
        granularity = self._driver.granularity_bytes()
        rounded = -(-max(nbytes, 1) // granularity) * granularity
        return self._driver.map(self._driver.create(rounded), rounded)

    def _pinned(self, nbytes: int) -> tuple[mmap.mmap, int]:
        rounded = -(-max(nbytes, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
        mapping = mmap.mmap(-1, rounded)
        host = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
        self._driver.register(host, rounded)
        return mapping, host

    def _call(self, name: str, *arguments: Any) -> Any:
        return call(self._cuda, name, *arguments)
