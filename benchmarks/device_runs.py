"""What does the CPU do for each piece that a client copies between the daemon's memory and an engine's paged pool?

A block of 16 tokens of a model of 8 billion parameters is 64 pieces of 32 KiB: K and V of 32 layers. A copy engine
needs 0.65 us for each at 50 GB/s, so a thread that takes longer to build, merge and queue them is what limits the copy.
Measured: the CPU time of that thread, by the client's own code (`DevicePool`, `CopyStream`), with a driver whose
functions return at once. What the driver itself takes for a run only hardware can say.

Baseline: the bytes of a piece at 50 GB/s. Expected: some 30 NumPy calls for all layers, then a call of the driver for
each batch, 5 to 10 us: a load, which has a batch for each layer, is over the baseline below some 16 blocks (half a
millisecond in all), and far below it where there are many. One Python object for each run took 2.4 us a piece, always.
"""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from support.gpu_copies import PIECE_BYTES
from support.report import AT_MOST, Row, main
from support.timing import median

from kvstore_client.device import DevicePool, PoolPart
from kvstore_client.device.streams import CopyStream
from kvstore_cuda.copies import BATCH_VERSION, CopyQueue, Numbers
from kvstore_cuda.device import CudaDevice

LAYERS, PLANES = 32, 2
BUS_BYTES_S = 50e9
BUS_US = PIECE_BYTES / BUS_BYTES_S * 1e6
SLOT_BYTES = 4096 + LAYERS * PLANES * PIECE_BYTES
MANY_BLOCKS, LIMIT = 64, 0.5  # from so many on the CPU may take so much of the time on the bus


class IdleDriver:
    """As much of the library `cuda-bindings` as a stream of copies calls. A batch is counted, and that is all."""

    CUmemcpySrcAccessOrder = type("Orders", (), {"CU_MEMCPY_SRC_ACCESS_ORDER_STREAM": 1})

    def __init__(self) -> None:
        self.runs = 0  # of the last batch
        numbers = [ctypes.c_void_p] * 3 + [ctypes.c_size_t] + [ctypes.c_void_p] * 2 + [ctypes.c_size_t, ctypes.c_void_p]
        self._batch = ctypes.CFUNCTYPE(ctypes.c_int, *numbers)(self._count)

    def _count(self, *arguments: Any) -> int:
        self.runs = arguments[3]
        return 0

    def expect(self, runs: int) -> None:
        """Raises RuntimeError where the last batch had not so many."""
        if self.runs != runs:
            raise RuntimeError(f"{self.runs} copies were queued instead of {runs}")

    def cuDriverGetVersion(self) -> tuple[int, int]:  # noqa: N802
        return 0, BATCH_VERSION

    def cuGetProcAddress(self, *_: object) -> tuple[int, int | None, int]:  # noqa: N802
        return 0, ctypes.cast(self._batch, ctypes.c_void_p).value, 0

    class CUmemcpyAttributes:
        srcAccessOrder = 0  # noqa: N815

        def getPtr(self) -> int:  # noqa: N802
            return 0


class IdleDevice(CudaDevice):
    """What a stream is made of."""

    def __init__(self) -> None:
        self.driver: Any = IdleDriver()
        self._copies = CopyQueue(self.driver)

    def call(self, *_: object) -> int:
        return 1


def measure(quick: bool) -> list[Row]:
    rounds = 20 if quick else 200
    rows = []
    for blocks in (4, 16, 64, 512):
        for name, to_device in (("load", True), ("store", False)):
            queue = _copies(blocks, to_device=to_device)
            us = median([_cpu_s(queue) for _ in range(rounds)]) * 1e6 / (blocks * LAYERS * PLANES)
            target = LIMIT if blocks >= MANY_BLOCKS else None
            rows.append(Row(f"{name}_of_{blocks}_blocks", us, "us", BUS_US, "a piece on the bus", AT_MOST, target))
    return rows


def _copies(blocks: int, *, to_device: bool) -> Callable[[], None]:
    """Build, merge and queue the copies of so many blocks, whose pages are no neighbours: into pages layer by layer, or
    out of them, all layers at once."""
    pool, pages, slots = _places(blocks)
    device: Any = IdleDevice()
    stream = CopyStream(device, lambda runs, *_: runs)

    def load() -> None:
        for runs in pool.to_pages(pages, slots):
            stream.queue(runs, "to device")
            device.driver.expect(blocks * PLANES)

    def store() -> None:
        stream.queue(pool.from_pages_at_once(pages, slots), "to host")
        device.driver.expect(blocks * LAYERS * PLANES)

    return load if to_device else store


def _places(blocks: int) -> tuple[DevicePool, Numbers, Numbers]:
    """A pool in which K and V of each layer are arrays of their own; pages; and slots in no order of theirs."""
    arrays = [[(2 * layer + plane + 1) << 32 for plane in range(PLANES)] for layer in range(LAYERS)]
    pool = DevicePool([[PoolPart(at, PIECE_BYTES, PIECE_BYTES) for at in each] for each in arrays], 2 * blocks)
    slots = np.random.default_rng(1).permutation(blocks).astype(np.uint64) * np.uint64(SLOT_BYTES)
    return pool, np.arange(0, 2 * blocks, 2, np.uint64), slots + np.uint64(1 << 40)


def _cpu_s(action: Callable[[], None]) -> float:
    began_s = time.thread_time()
    action()
    return time.thread_time() - began_s


if __name__ == "__main__":
    sys.exit(main(measure, __doc__))
