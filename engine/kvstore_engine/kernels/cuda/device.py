"""Launches the kernels on a CUDA device, and lets its L2 cache keep a prefix that the sequences of a batch share.

The module owns the loaded modules. It owns no memory of the device. Kernels may be launched from several threads at
once: a step's thread, and the threads that store; everything else is for one thread.
"""

from __future__ import annotations

import contextlib
import ctypes as ct
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore_cuda.device import CudaDevice
from kvstore_cuda.driver import DriverError
from kvstore_cuda.nvrtc import EXTRA, CompileError
from kvstore_engine.kernels.cuda.program import STREAM_OF_DEFAULT, THREADS, CudaError, KernelProgram, Launcher

_FREE_SHARED_BYTES = 48 << 10  # what a kernel may have without asking
_MULTIPROCESSORS, _SHARED_OPT_IN = 16, 97  # CUdevice_attribute
_MOST_KEPT, _MOST_WINDOW = 108, 109  # of the L2 cache
_KEPT_LIMIT, _WINDOW = 6, 1  # CUlimit, CUlaunchAttributeID
_NORMAL, _PERSISTING = 0, 2  # CUaccessProperty
_DYNAMIC_SHARED_SIZE = 8  # CUfunction_attribute
_OLDEST = (7, 5)  # that NVRTC 13 compiles for
_THREAD_LOCAL = 1  # CUstreamCaptureMode
_LAUNCHES, _TURNS = 4, 3  # of what is timed: in a graph, and how often that is replayed


@dataclass(frozen=True, slots=True)
class CacheWindow:
    """A range of `nbytes` of device memory at `address` that the device may keep in its L2 cache."""

    address: int
    nbytes: int

    @classmethod
    def of_blocks(
        cls, plane: int, block_bytes: int, blocks: npt.NDArray[np.int32], most_bytes: int
    ) -> CacheWindow | None:
        """Return the memory of the longest run of consecutive numbers among `blocks`, int32 [n], cut to `most_bytes`
        bytes. `plane` is the address of the plane with these blocks of `block_bytes` bytes. Return None if not even one
        block fits.
        """
        most = most_bytes // block_bytes if block_bytes > 0 else 0
        if most < 1 or not len(blocks):
            return None
        starts = np.concatenate(([0], np.flatnonzero(np.diff(blocks) != 1) + 1))
        lengths = np.diff(np.append(starts, len(blocks)))
        at = int(lengths.argmax())
        return cls(plane + int(blocks[starts[at]]) * block_bytes, min(int(lengths[at]), most) * block_bytes)


class Device(CudaDevice, Launcher):
    """The CUDA device number `index`, as a launcher of kernels. Raises CudaError if the device cannot be used; the
    message says what to do.
    """

    def __init__(self, index: int = 0) -> None:
        try:
            super().__init__(index, f"the CUDA kernels need the library cuda-bindings: {EXTRA}")
        except OSError as error:
            raise CudaError(str(error)) from None
        if self.capability < _OLDEST:
            of = "{}.{}".format(*self.capability)
            super().close()
            raise CudaError(f"CUDA device {index} is of compute capability {of}: 7.5 is needed")
        self._multiprocessors = self.attribute(_MULTIPROCESSORS)
        self._shared_bytes = self.attribute(_SHARED_OPT_IN)
        self._kept_bytes = 0
        self._loading = threading.Lock()  # of what follows
        self._modules: dict[KernelProgram, Any] = {}
        self._functions: dict[tuple[KernelProgram, str], Any] = {}

    def call(self, name: str, *arguments: Any) -> Any:
        """Call the CUDA driver's function `name`, and return its result. Raises CudaError."""
        try:
            return super().call(name, *arguments)
        except DriverError as error:
            raise CudaError(str(error)) from None

    @property
    def multiprocessors(self) -> int:
        return self._multiprocessors

    def launch(
        self, program: KernelProgram, kernel: str, grid: tuple[int, int, int], argument: ct.Structure,
        *, shared_bytes: int = 0, stream: int = STREAM_OF_DEFAULT,
    ) -> None:  # fmt: skip
        function = self._functions.get((program, kernel))
        if function is None:
            with self._loading:
                function = self._load(program, kernel, shared_bytes)
        self.use_in_this_thread()
        of = self.driver.CUstream(stream)
        self.start(function, grid, THREADS, argument, shared_bytes=shared_bytes, stream=of)

    @property
    def window_bytes(self) -> int:
        """The largest range of memory that the device can keep in its L2 cache on request, in bytes; 0 if none."""
        return self.attribute(_MOST_WINDOW) if self.attribute(_MOST_KEPT) else 0

    def set_aside_cache(self, nbytes: int) -> int:
        """Reserve up to `nbytes` bytes of the L2 cache for windows (ranges of memory that stay in the cache), and
        return how many bytes the device gives. With `nbytes` 0 the reservation ends."""
        self.use_in_this_thread()
        limit = self.driver.CUlimit(_KEPT_LIMIT)
        if self.window_bytes:
            self.call("cuCtxSetLimit", limit, min(nbytes, self.attribute(_MOST_KEPT)))
            self._kept_bytes = int(self.call("cuCtxGetLimit", limit))
            if not nbytes:
                self.call("cuCtxResetPersistingL2Cache")
        return self._kept_bytes

    def keep_in_cache(self, window: CacheWindow | None, *, stream: int) -> None:
        """Set the range of memory `window` that later launches on `stream` keep in the L2 cache; None keeps no range
        any more. `stream` must not be the default stream. Raises CudaError."""
        cuda = self.driver
        policy, value = cuda.CUaccessPolicyWindow(), cuda.CUstreamAttrValue()
        policy.hitProp, policy.missProp = map(cuda.CUaccessProperty, (_NORMAL, _NORMAL))
        if window is not None:
            policy.base_ptr, policy.num_bytes = window.address, window.nbytes
            policy.hitRatio = min(1.0, self._kept_bytes / window.nbytes)
            policy.hitProp = cuda.CUaccessProperty(_PERSISTING)
        value.accessPolicyWindow = policy
        self.use_in_this_thread()
        self.call("cuStreamSetAttribute", cuda.CUstream(stream), cuda.CUstreamAttrID(_WINDOW), value)

    def seconds(self, queue: Callable[[int], object]) -> float:
        """Return the time in seconds that the device takes for the work that one call `queue(stream)` launches: the
        fastest of several measured replays. Raises CudaError.
        """
        cuda = self.driver
        self.synchronize()  # what is read was written on other streams
        with contextlib.ExitStack() as undo:
            stream = self.stream()
            undo.callback(self.call, "cuStreamDestroy", stream)
            queue(int(stream))  # loads the kernels
            self.call("cuStreamBeginCapture", stream, cuda.CUstreamCaptureMode(_THREAD_LOCAL))
            for _ in range(_LAUNCHES):
                queue(int(stream))
            graph = self.call("cuGraphInstantiate", self.call("cuStreamEndCapture", stream), 0)
            undo.callback(self.call, "cuGraphExecDestroy", graph)
            events = [self.call("cuEventCreate", 0) for _ in range(2)]
            for event in events:
                undo.callback(self.call, "cuEventDestroy", event)
            took_ms = []
            for _ in range(_TURNS):
                self.record(events[0], stream)
                self.call("cuGraphLaunch", graph, stream)
                self.record(events[1], stream)
                self.wait(events[1])
                took_ms.append(float(self.call("cuEventElapsedTime", *events)))
        return min(took_ms) / 1e3 / _LAUNCHES

    def synchronize(self, stream: Any = None) -> None:
        self.use_in_this_thread()
        super().synchronize(stream)

    def close(self) -> None:
        self.use_in_this_thread()
        for module in self._modules.values():
            self.call("cuModuleUnload", module)
        self._modules.clear()
        self._functions.clear()
        super().close()

    def _load(self, program: KernelProgram, kernel: str, shared_bytes: int) -> Any:
        if shared_bytes > self._shared_bytes:
            raise CudaError(
                f"{kernel} needs {shared_bytes} bytes of shared memory; the device has {self._shared_bytes}"
            )
        self.use_in_this_thread()
        if program not in self._modules:
            try:
                self._modules[program] = self.load(program)
            except CompileError as error:
                raise CudaError(str(error)) from None
        function = self.function(self._modules[program], kernel)
        if shared_bytes > _FREE_SHARED_BYTES:
            attribute = self.driver.CUfunction_attribute(_DYNAMIC_SHARED_SIZE)
            self.call("cuFuncSetAttribute", function, attribute, shared_bytes)
        self._functions[program, kernel] = function
        return function
