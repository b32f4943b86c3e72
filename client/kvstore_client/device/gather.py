"""Copies of many small runs by a kernel: the driver takes half a microsecond for each run of a batch, however small.

The module owns the kernel, the host memory that holds its runs (sheets), and an event for each sheet. NVRTC compiles
the kernel (extra `cuda`). The caller decides which runs are small. One thread at a time calls `queue`. Invariants: a
sheet is not written again before the kernel that reads it has ended, and no thread waits for that.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvstore_client.device.memory import DeviceError, DeviceMemory
from kvstore_cuda.compiler import Program
from kvstore_cuda.copies import Runs
from kvstore_cuda.device import never_unmap

ALIGNED_BYTES = 16  # of each address and length
THREADS = 256  # of a thread block
BLOCKS = 16  # that run at once: most of the device stays with the steps of the engine
MOST_RUNS = 1024  # of one launch
SHEETS = 64
_RUN = np.dtype([("to", "<u8"), ("source", "<u8"), ("nbytes", "<u8")])
PROGRAM = Program(Path(__file__).parent / "csrc", "gather.cu", (("KV_THREADS", str(THREADS)),))
KERNEL = "kv_copy_runs"
HIGHEST_PRIORITY, LOWEST_PRIORITY = -1000, 1000  # of a stream: the driver takes the next that there is
_NOT_READY, _SAME_POINTERS = 600, 91  # CUresult, CUdevice_attribute
LONGEST_COMPILATION_S = 60.0


class GatherArgument(ctypes.Structure):
    """The C struct that the gather kernel takes: `runs` is the address of `count` records, each with the addresses and
    the length of one copy.
    """

    _fields_ = (("runs", ctypes.c_void_p), ("count", ctypes.c_uint64))


class GatherKernel:
    """A CUDA kernel that copies many pieces of memory in one launch. The device's context has to be current in the
    constructor and in `queue`. Raises CompileError if the kernel cannot be compiled, and DeviceError.
    """

    def __init__(self, device: DeviceMemory) -> None:
        self._device = device
        if not device.attribute(_SAME_POINTERS):
            raise DeviceError("cuDeviceGetAttribute", 801, "this device has host memory at other addresses")
        with contextlib.ExitStack() as undo:
            module = device.load(PROGRAM, LONGEST_COMPILATION_S)
            undo.callback(device.quietly, "cuModuleUnload", module)
            self._function = device.function(module, KERNEL)
            memory = mmap.mmap(-1, SHEETS * MOST_RUNS * _RUN.itemsize)
            self._rows = np.frombuffer(memory, _RUN).reshape(SHEETS, MOST_RUNS)
            self._rows.flags.writeable = True
            address = self._rows.ctypes.data
            device.register(address, len(memory), for_kernels=True)
            undo.callback(device.forget, address, self._rows)
            self._events: list[Any] = []
            for _ in range(SHEETS):
                self._events.append(device.event())
                undo.callback(device.quietly, "cuEventDestroy", self._events[-1])
            ending = undo.pop_all()
        self._next = 0
        weakref.finalize(self, _end, device, ending, self._rows, self._events).atexit = False  # the driver may be gone

    def queue(self, runs: Runs, stream: Any) -> Runs:
        """Queue copies by the kernel on the CUDA stream `stream`, in any order. Return the part of `runs` that was not
        queued, because all memory for descriptions of runs is still in use. Each address and length is a multiple of
        16 bytes. Raises DeviceError.
        """
        for start in range(0, len(runs), MOST_RUNS):
            if not self._has_ended(self._events[self._next]):
                return runs[start:]
            part = runs[start : start + MOST_RUNS]
            sheet, self._next = self._next, (self._next + 1) % SHEETS
            rows = self._rows[sheet, : len(part)]
            rows["to"], rows["source"], rows["nbytes"] = part.columns
            argument, grid = GatherArgument(rows.ctypes.data, len(part)), (min(len(part), BLOCKS), 1, 1)
            self._device.start(self._function, grid, THREADS, argument, stream=stream)
            try:
                self._device.record(self._events[sheet], stream)
            except DeviceError:
                self._device.quietly("cuStreamSynchronize", stream)  # nothing else says when its sheet is free
                raise
        return runs[len(runs) :]

    def _has_ended(self, event: Any) -> bool:
        try:
            self._device.call("cuEventQuery", event)
        except DeviceError as error:
            if error.code != _NOT_READY:
                raise
            return False
        return True


def _end(device: DeviceMemory, ending: contextlib.ExitStack, rows: object, events: Sequence[Any]) -> None:
    """Free the kernel. `rows` stays alive until the device does not know it any more."""
    try:
        with device.current():
            for event in events:
                device.quietly("cuEventSynchronize", event)
            ending.close()
    except DeviceError:
        never_unmap(rows)
