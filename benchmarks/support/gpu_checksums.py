"""Checksums of device memory by the GPU tier's own kernel: whether they are xxhash's, and how fast."""

from __future__ import annotations

import time
from collections.abc import Sequence
from queue import SimpleQueue

import numpy as np
import xxhash

from kvstore_console.units import human_bytes
from kvstore_cuda.copies import CopyRun, Runs
from kvstore_cuda.device import CudaDevice
from kvstore_cuda.driver import DriverError
from kvstore_tiers.gpu.streams import Checksums, Events
from support.gpu_answers import Answer, Sizes, known
from support.gpu_memory import copy_s, on_device, pinned

BLOCK_BYTES = 1 << 20


def checksums(device: int, sizes: Sizes) -> Answer:
    """Of one block, and of many in one launch. The speed only informs."""
    driver, nbytes = CudaDevice(device).use_in_this_thread(), sizes.copied_bytes
    at = on_device(driver, nbytes)
    mapping, host = pinned(driver, nbytes)
    np.frombuffer(mapping, np.uint64)[:] = np.random.default_rng(1).integers(0, 2**63, nbytes // 8)
    copy_s(driver, [Runs.of([CopyRun(at, host, nbytes)])], to_device=True)
    found: SimpleQueue[tuple[Sequence[int], DriverError | None]] = SimpleQueue()
    kernel = Checksums(driver, Events(driver), lambda _, sums, failure: found.put((sums, failure)))
    said, figures, holds = [], {}, True
    for count in (1, nbytes // BLOCK_BYTES):
        ranges = [(at + block * BLOCK_BYTES, BLOCK_BYTES) for block in range(count)]
        took_s = []
        for _ in range(sizes.rounds):
            began_s = time.perf_counter()
            kernel.start([(0, ranges)])
            sums, failure = found.get()
            took_s.append(time.perf_counter() - began_s)
            if failure is not None:
                raise failure
        wanted = [xxhash.xxh3_64_intdigest(mapping[start - at : start - at + size]) for start, size in ranges]
        holds = holds and list(sums) == wanted
        figures[f"{count} blocks, GB/s"] = count * BLOCK_BYTES / min(took_s) / 1e9
        said.append(
            f"{count} x {human_bytes(BLOCK_BYTES)} {figures[f'{count} blocks, GB/s']:.1f} GB/s, "
            f"{min(took_s) * 1e6:.0f} us"
        )
        known(", ".join(said), figures, holds=None if holds else False)
    verdict = "are xxhash's" if holds else "are NOT xxhash's"
    return Answer(holds, f"checksums by the device {verdict}: {', '.join(said)}", figures)
