"""What a client copies with: its kernel for small runs, from an arena that is registered read-only and back."""

from __future__ import annotations

import random

import numpy as np

from kvstore_client.device import DeviceMemory
from kvstore_client.device.crossover import WAYS, Crossover
from kvstore_client.device.gather import GatherKernel
from kvstore_cuda.copies import CopyRun, Runs
from kvstore_cuda.device import CudaDevice
from kvstore_cuda.nvrtc import CompileError
from support.gpu_answers import Answer, Sizes
from support.gpu_memory import arena, on_device, pinned

RUN_BYTES = 4 << 10
MOST_BYTES = 64 << 20


def client_gather(device: int, sizes: Sizes) -> Answer:
    """Holds where the kernel moves the right bytes: what it reads, on hardware, only the host may read."""
    nbytes = min(sizes.copied_bytes, MOST_BYTES)
    driver, memory = CudaDevice(device).use_in_this_thread(), DeviceMemory(device)
    pool = on_device(driver, 2 * nbytes)
    filled, source, why = arena(driver, nbytes, for_kernels=True)
    stored, staging = pinned(driver, nbytes, for_kernels=True)
    pages = random.Random(0).sample(range(2 * nbytes // RUN_BYTES), nbytes // RUN_BYTES)
    places = [(pool + page * RUN_BYTES, number * RUN_BYTES) for number, page in enumerate(pages)]
    try:
        with memory.current():
            kernel, stream = GatherKernel(memory), memory.call("cuStreamCreate", 1)
            kernel.queue(Runs.of(CopyRun(page, source + at, RUN_BYTES) for page, at in places), stream)
            kernel.queue(Runs.of(CopyRun(staging + at, page, RUN_BYTES) for page, at in places), stream)
            memory.call("cuStreamSynchronize", stream)
    except CompileError as error:
        return Answer(None, f"there is no kernel: {error}")
    is_right = np.array_equal(np.frombuffer(stored, np.uint8), np.frombuffer(filled, np.uint8))
    limits = Crossover(memory).settled()
    figures = {f"{way}, KiB at most": limits.get(way, 0) / 1024 for way in WAYS}
    said = ", ".join(f"{way} {limits.get(way, 0) >> 10} KiB" for way in WAYS)
    note = f"; the arena is registered writable, since {why}" if why else ""
    right = "moves the right bytes" if is_right else "moves WRONG bytes"
    return Answer(is_right, f"the kernel {right}; runs that it copies, at most: {said}{note}", figures)
