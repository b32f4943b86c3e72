"""The largest run that is copied by the kernel rather than in a batch: measured, for each way, when copies begin.

The kernel is compiled and measured by a thread; until it has ended, and if that fails, every copy is in a batch.
KVSTORED_GATHER_BYTES in the environment sets the size instead; 0 turns the kernel off. The module owns the thread, the
kernel and the memory for measuring. A measurement of a device counts for the process.
"""

from __future__ import annotations

import contextlib
import logging
import math
import mmap
import os
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

from kvstore_client.device.gather import ALIGNED_BYTES, HIGHEST_PRIORITY, GatherKernel
from kvstore_client.device.memory import DeviceMemory
from kvstore_cuda.copies import CopyRun, Runs, Way

VARIABLE = "KVSTORED_GATHER_BYTES"
LEAST_RUNS = 8  # fewer are not worth a launch
WAYS: tuple[Way, ...] = ("to device", "to host", "on device")
_SIZES = tuple(1024 << power for power in range(2, 8))  # 4 to 128 KiB
MOVED_BYTES = 4 << 20
_TURNS, _PAUSE_S = 5, 0.01
_GAIN = 0.9  # of the batch's time the kernel may take
_log = logging.getLogger(__name__)
_measuring = threading.Lock()
_measured: dict[int, dict[Way, int]] = {}  # by device


class CopyCrossover:
    """A chooser between two ways to copy pieces of memory on a device: one CUDA kernel that copies many small pieces at
    once, and the driver's batched copies. A thread compiles the kernel and measures the piece size from which the
    driver is faster. Until the measurement is done, and after `close`, no piece is copied by the kernel.
    """

    def __init__(self, device: DeviceMemory) -> None:
        self._device = device
        self._found: tuple[GatherKernel, Mapping[Way, int]] | None = None
        self._is_closed = False
        self._lock = threading.Lock()  # of both
        self._thread = threading.Thread(target=self._run, name="kvstore-gather", daemon=True)
        self._thread.start()

    def queue_small(self, runs: Runs, way: Way, stream: Any) -> Runs:
        """Queue on the CUDA stream `stream` those pieces of `runs` that the kernel copies faster than the driver, and
        return the other pieces. `way` is the direction of the copies. Raises DeviceError.
        """
        found = self._found
        if found is None:
            return runs
        kernel, limits = found
        is_small = runs.nbytes <= limits[way]
        if np.count_nonzero(is_small) >= LEAST_RUNS:
            is_small &= ~(runs.columns % ALIGNED_BYTES).any(axis=0)
        if np.count_nonzero(is_small) < LEAST_RUNS:
            return runs
        return Runs.joined([kernel.queue(runs[is_small], stream), runs[~is_small]])

    def settled(self) -> Mapping[Way, int]:
        """Wait until the kernel is measured, and return, for each direction of copies, the largest size in bytes of a
        piece that the kernel copies. The mapping is empty if there is no kernel.
        """
        self._thread.join()
        return {} if self._found is None else self._found[1]

    def close(self) -> None:
        """Stop using the kernel. It waits neither for copies nor for the thread, which may be compiling. A second call
        does nothing.
        """
        with self._lock:
            self._is_closed, self._found = True, None

    def _run(self) -> None:
        wanted = os.environ.get(VARIABLE, "")
        if wanted and not wanted.isdecimal():
            _log.warning("%s must be a number of bytes, got %r: it counts as 0", VARIABLE, wanted)
        if wanted and not (wanted.isdecimal() and int(wanted)):
            return
        try:
            with self._device.current():
                kernel = GatherKernel(self._device)
                limits = {way: int(wanted) for way in WAYS} if wanted else _limits(self._device, kernel)
            with self._lock:
                self._found = None if self._is_closed else (kernel, limits)
            _log.info("a kernel copies runs of at most this many bytes: %s", limits)
        except Exception as error:  # no kernel is no harm
            _log.info("small runs are copied in batches: %s", error)


def _limits(device: DeviceMemory, kernel: GatherKernel) -> dict[Way, int]:
    with _measuring:
        if device.index not in _measured:
            with _Scratch(device) as scratch:
                _measured[device.index] = {way: scratch.largest(kernel, way) for way in WAYS}
        return _measured[device.index]


class _Scratch:
    """Memory on the device and on the host, and a stream, for measuring."""

    def __init__(self, device: DeviceMemory) -> None:
        self._device = device
        with contextlib.ExitStack() as undo:
            self._stream = device.stream(HIGHEST_PRIORITY)  # as that of the copies
            undo.callback(device.quietly, "cuStreamDestroy", self._stream)
            self._pool = device.call("cuMemAlloc", 2 * MOVED_BYTES)
            undo.callback(device.quietly, "cuMemFree", self._pool)
            self._packed = device.call("cuMemAlloc", MOVED_BYTES)
            undo.callback(device.quietly, "cuMemFree", self._packed)
            self._host = np.frombuffer(mmap.mmap(-1, MOVED_BYTES), np.uint8)
            device.register(self._host.ctypes.data, MOVED_BYTES, for_kernels=True)
            undo.callback(device.forget, self._host.ctypes.data, self._host)
            undo.callback(device.quietly, "cuStreamSynchronize", self._stream)  # comes first
            self._ending = undo.pop_all()

    def __enter__(self) -> _Scratch:
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.close()

    def largest(self, kernel: GatherKernel, way: Way) -> int:
        """Return the largest size at which, as at all smaller ones, the kernel is clearly faster; 0: none."""
        found = 0
        for nbytes in _SIZES:
            runs = self._runs(nbytes, way)
            by_kernel_s = by_batch_s = math.inf
            for _ in range(_TURNS):  # the least of each: what an engine runs meanwhile only adds to it
                by_kernel_s = min(by_kernel_s, self._seconds(partial(kernel.queue, runs, self._stream)))
                by_batch_s = min(by_batch_s, self._seconds(partial(self._device.copy, runs, way, self._stream)))
                time.sleep(_PAUSE_S)
            if by_kernel_s > _GAIN * by_batch_s:
                break
            found = nbytes
        return found

    def _runs(self, nbytes: int, way: Way) -> Runs:
        """Return runs between packed memory and pages with gaps between them, so that no two runs are neighbours."""
        packed = self._packed if way == "on device" else self._host.ctypes.data
        runs = []
        for number in range(MOVED_BYTES // nbytes):
            page, at = int(self._pool) + 2 * number * nbytes, int(packed) + number * nbytes
            runs.append(CopyRun(at, page, nbytes) if way == "to host" else CopyRun(page, at, nbytes))
        return Runs.of(runs)

    def _seconds(self, queue: Callable[[], object]) -> float:
        """Return the seconds from the call until the copies have ended."""
        begin = time.perf_counter()
        queue()
        self._device.synchronize(self._stream)
        return time.perf_counter() - begin
