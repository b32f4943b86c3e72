"""Checksums of device memory, by a kernel: xxh3_64, as this process computes it of host memory.

Owns the kernel and the host memory that it finds its ranges in. It needs NVRTC (extra `cuda`), or what that compiled
before. Never decides what is checked.
Invariant: a sheet is not used anew before the kernel that reads it has ended.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np

from kvstore_proto.cuda_compiler import Program, compile_program
from kvstore_tiers.gpu.driver import Driver

THREADS = 128  # of a thread block
MOST_BLOCKS = 64  # that run at once: each has one range, and few leave the device to an engine
MOST_RANGES = 4096  # of one launch
_SHARED_BYTES = THREADS // 4 * 8 * 8  # checksums.cu: [kStretches][kLanes]
_RANGE = np.dtype([("address", "<u8"), ("nbytes", "<u8"), ("sum", "<u8")])
PROGRAM = Program(Path(__file__).parent / "csrc", "checksums.cu", (("KV_THREADS", str(THREADS)),))
KERNEL = "kv_checksums"


class Argument(ctypes.Structure):
    """`ranges`: the address of `count` records of _RANGE, as the device reaches it."""

    _fields_ = (("ranges", ctypes.c_void_p), ("count", ctypes.c_uint64))


class Sheet:
    """Ranges of one launch in registered host memory, and their sums after it."""

    def __init__(self, driver: Driver) -> None:
        nbytes = MOST_RANGES * _RANGE.itemsize
        self.rows = np.frombuffer(mmap.mmap(-1, nbytes), dtype=_RANGE)
        self.rows.flags.writeable = True
        driver.register(self.rows.ctypes.data, nbytes, for_kernels=True)
        self.address = driver.device_pointer(self.rows.ctypes.data)

    def sums(self, count: int) -> list[int]:
        return [int(each) for each in self.rows["sum"][:count]]


class Checksums:
    """The kernel, ready to run. Raises CompileError where it cannot be compiled, DriverError."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        module = driver.load(compile_program(PROGRAM, driver.architecture))
        self._kernel = driver.function(module, KERNEL)
        self._spare: SimpleQueue[Sheet] = SimpleQueue()

    def queue(self, ranges: Sequence[tuple[int, int]], stream: Any) -> Sheet:
        """Queue the checksums of ranges (address, a multiple of 16, and bytes), at most MOST_RANGES. The sheet has them
        when the stream has run, and is the caller's until `give_back`. Raises DriverError."""
        sheet = Sheet(self._driver) if self._spare.empty() else self._spare.get()
        sheet.rows[: len(ranges)] = [(address, nbytes, 0) for address, nbytes in ranges]
        argument = Argument(sheet.address, len(ranges))
        blocks = min(len(ranges), MOST_BLOCKS)
        self._driver.launch(self._kernel, blocks, THREADS, argument, shared_bytes=_SHARED_BYTES, stream=stream)
        return sheet

    def give_back(self, sheet: Sheet) -> None:
        self._spare.put(sheet)
