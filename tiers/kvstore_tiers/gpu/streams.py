"""Work that a worker queues on streams of its device, copies and checksums, and the thread that waits for its end.

The module owns the streams, the events, the kernel of checksums (xxh3_64, as this process computes it of host memory)
and the host memory of its ranges. NVRTC compiles the kernel (extra `cuda`). The module does not decide what is copied
or checked, nor which copies go together: the caller hands over all that it knows at a time.

After merging, the runs are large. A payload is one run (64 tokens of an 8B model: 8 MiB, of a model of 135M parameters:
1.4), or a whole slot is; only header pages, one a block, are 4 KiB. At 4 GB/s a page takes 1 us, beside 28 us and more
of its payload: a gather kernel, which is faster below some 28 KiB, would win 4 % at most, and compete with an engine's.
Invariants: each piece of work is settled once, after it has ended on the device or when it will not run; a sheet is not
reused before the kernel that reads it has ended.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, get_args

import numpy as np

from kvstore_cuda.compiler import Program
from kvstore_cuda.copies import CopyRun, Runs, Way
from kvstore_cuda.device import CudaDevice
from kvstore_cuda.driver import DriverError

Settled = Callable[[DriverError | None], None]  # with what went wrong


class Events:
    """A thread that waits until work on the device's streams has ended, and then calls a function `settled`. If the
    work could not be queued, the caller's thread calls it.
    """

    def __init__(self, driver: CudaDevice) -> None:
        self._driver = driver
        self._streams: list[Any] = []
        self._under_way: SimpleQueue[tuple[Any, Any, Settled] | None] = SimpleQueue()  # event, its stream
        self._spare: SimpleQueue[Any] = SimpleQueue()
        self._waiter = threading.Thread(target=self._wait, name="gpu-events", daemon=True)
        self._waiter.start()

    def stream(self) -> Any:
        """Return a new CUDA stream of the device, which `settle` will wait for."""
        self._streams.append(self._driver.stream())
        return self._streams[-1]

    def queue(self, stream: Any, work: Callable[[], None], settled: Settled) -> None:
        """Call `work`, which queues operations on `stream`. When the operations have ended, `settled` is called once,
        with None or the driver's error.
        """
        try:
            work()
            event = self._spare_event()
            try:
                self._driver.record(event, stream)
            except DriverError:
                self._spare.put(event)
                raise
        except DriverError as error:
            settled(self._driver.ended_after(error, stream))
        else:
            self._under_way.put((event, stream, settled))

    def _spare_event(self) -> Any:
        """Return an event, for any thread: another thread may take the last spare one."""
        try:
            return self._spare.get_nowait()
        except Empty:
            return self._driver.event()

    def settle(self) -> None:
        """Wait until no work is under way on any stream."""
        for stream in self._streams:
            self._driver.synchronize(stream)

    def close(self) -> None:
        self._under_way.put(None)
        self._waiter.join()

    def _wait(self) -> None:
        self._driver.use_in_this_thread()
        while (item := self._under_way.get()) is not None:
            event, stream, settled = item
            failure: DriverError | None = None
            try:
                self._driver.wait(event)
                self._spare.put(event)
            except DriverError as error:
                failure = self._driver.ended_after(error, stream)
            settled(failure)


Ended = Callable[[int, DriverError | None], None]  # transfer, what went wrong


class StreamCopies:
    """A maker of copies between host and device memory, which are queued on one stream for each direction.
    `ended(transfer, error)` is called for each transfer when its copies have ended.
    """

    def __init__(self, driver: CudaDevice, events: Events, ended: Ended) -> None:
        self._driver = driver
        self._events = events
        self._ended = ended
        self._streams: dict[Way, Any] = {way: events.stream() for way in get_args(Way)}

    def start(self, transfers: Sequence[int], groups: Iterable[Sequence[CopyRun]], way: Way) -> None:
        """Queue the copies of several `transfers` in the direction `way` as one batch. Neighbouring copies in one of
        `groups` may be merged, because all copies of a group are within one registration of host memory, or between two
        chunks.
        """
        stream = self._streams[way]
        runs = Runs.joined([Runs.of(group).merged() for group in groups])

        def settled(failure: DriverError | None) -> None:
            for transfer in transfers:
                self._ended(transfer, failure)

        self._events.queue(stream, lambda: self._driver.copy(runs, way, stream), settled)


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


class ChecksumArgument(ctypes.Structure):
    """The argument structure of the CUDA kernel for checksums: the device address of `count` records, each with an
    address, a number of bytes and a checksum.
    """

    _fields_ = (("ranges", ctypes.c_void_p), ("count", ctypes.c_uint64))


class Sheet:
    """A table in host memory for one launch of the checksum kernel: the ranges of device memory to sum and, afterwards,
    their checksums.
    """

    def __init__(self, driver: CudaDevice) -> None:
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
    """A calculator of checksums of ranges of device memory, by a CUDA kernel. `summed(transfer, sums, error)` is called
    when the checksums of a transfer are ready. Raises CompileError if the kernel cannot be compiled, and DriverError.
    """

    def __init__(self, driver: CudaDevice, events: Events, summed: Summed) -> None:
        self._driver = driver
        self._events = events
        self._summed = summed
        self._kernel = driver.function(driver.load(PROGRAM, LONGEST_COMPILATION_S), KERNEL)
        self._stream = events.stream()
        self._spare: SimpleQueue[Sheet] = SimpleQueue()

    def start(self, batch: Sequence[tuple[int, Sequence[Range]]]) -> None:
        """Queue the checksums of several transfers as one launch. `batch` has pairs of a transfer's number and its
        ranges, at most MOST_RANGES ranges in all.
        """
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
        argument = ChecksumArgument(sheet.address, len(ranges))
        blocks = min(len(ranges), MOST_BLOCKS)
        grid, stream = (blocks, 1, 1), self._stream
        self._driver.start(self._kernel, grid, THREADS, argument, shared_bytes=_SHARED_BYTES, stream=stream)
