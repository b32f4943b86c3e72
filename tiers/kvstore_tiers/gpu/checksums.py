"""Checksums of device memory, by a kernel: xxh3_64, as this process computes it of host memory.

Owns the kernel, its stream and the host memory that it finds its ranges in. The kernel comes from NVRTC (extra `cuda`).
Never decides what is checked, nor against what.
Invariant: a sheet is not used anew before the kernel that reads it has ended.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Sequence
from pathlib import Path
from queue import SimpleQueue

import numpy as np

from kvstore_cuda.compiler import Program
from kvstore_cuda.driver import DriverError
from kvstore_tiers.gpu.driver import Driver
from kvstore_tiers.gpu.events import Events

THREADS = 128  # of a thread block
MOST_BLOCKS = 64  # that run at once: each has one range, and few leave the device to an engine
MOST_RANGES = 4096  # of one launch
LONGEST_COMPILATION_S = 20.0  # the tier waits for its worker meanwhile
_SHARED_BYTES = THREADS // 4 * 8 * 8  # checksums.cu: [kStretches][kLanes]
_RANGE = np.dtype([("address", "<u8"), ("nbytes", "<u8"), ("sum", "<u8")])
PROGRAM = Program(Path(__file__).parent / "csrc", "checksums.cu", (("KV_THREADS", str(THREADS)),))
KERNEL = "kv_checksums"
Range = tuple[int, int]  # an address of the device, a multiple of 16, and bytes
Summed = Callable[[int, Sequence[int], DriverError | None], None]  # transfer, its sums, what went wrong


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
        try:
            self.address = driver.device_pointer(self.rows.ctypes.data)
        except DriverError:
            driver.unregister(self.rows.ctypes.data)  # before it is unmapped
            raise

    def sums(self, first: int, count: int) -> list[int]:
        return [int(each) for each in self.rows["sum"][first : first + count]]


class Checksums:
    """`summed` is called as `Events` says. Raises CompileError where the kernel cannot be compiled, DriverError."""

    def __init__(self, driver: Driver, events: Events, summed: Summed) -> None:
        self._driver = driver
        self._events = events
        self._summed = summed
        self._kernel = driver.function(driver.load(PROGRAM, LONGEST_COMPILATION_S), KERNEL)
        self._stream = events.stream()
        self._spare: SimpleQueue[Sheet] = SimpleQueue()

    def start(self, batch: Sequence[tuple[int, Sequence[Range]]]) -> None:
        """Queue the checksums of some transfers' ranges, MOST_RANGES at most, as one launch."""
        try:
            sheet = Sheet(self._driver) if self._spare.empty() else self._spare.get()
        except DriverError as error:
            for transfer, _ in batch:
                self._summed(transfer, (), error)
            return

        def settled(failure: DriverError | None) -> None:
            at = 0
            for transfer, ranges in batch:
                self._summed(transfer, sheet.sums(at, len(ranges)), failure)
                at += len(ranges)
            self._spare.put(sheet)

        flat = [each for _, ranges in batch for each in ranges]
        self._events.queue(self._stream, lambda: self._launch(sheet, flat), settled)

    def _launch(self, sheet: Sheet, ranges: Sequence[Range]) -> None:
        sheet.rows[: len(ranges)] = [(address, nbytes, 0) for address, nbytes in ranges]
        argument = Argument(sheet.address, len(ranges))
        blocks = min(len(ranges), MOST_BLOCKS)
        self._driver.launch(self._kernel, blocks, THREADS, argument, shared_bytes=_SHARED_BYTES, stream=self._stream)
