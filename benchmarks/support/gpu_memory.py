"""Memory of a device and of the host that a question copies between, by the GPU tier's own driver calls.

Owns nothing. Device memory lives until the process of the question ends, host memory as long as its mapping, which
the caller keeps.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections.abc import Sequence

import numpy as np

from kvstore_cuda.copies import CopyRun, Runs
from kvstore_cuda.device import CudaDevice
from kvstore_cuda.driver import DriverError
from support.timing import warm


def pinned(driver: CudaDevice, nbytes: int, *, for_kernels: bool = False) -> tuple[mmap.mmap, int]:
    """Registered memory of this process, and its address."""
    mapping = mmap.mmap(-1, nbytes)
    address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
    driver.register(address, nbytes, for_kernels=for_kernels)
    return mapping, address


def arena(driver: CudaDevice, nbytes: int, *, for_kernels: bool = False) -> tuple[mmap.mmap, int, str]:
    """A memfd with bytes in it, mapped as a client maps an arena: read-only, and registered so. The mapping, its
    address, and why it had to be mapped writable where the device cannot register memory read-only."""
    descriptor = os.memfd_create("arena")
    try:
        os.ftruncate(descriptor, nbytes)
        with mmap.mmap(descriptor, nbytes) as filled:
            np.frombuffer(filled, np.uint64)[:] = np.arange(nbytes // 8, dtype=np.uint64)
        why = ""
        mapping = mmap.mmap(descriptor, nbytes, prot=mmap.PROT_READ)
        address = np.frombuffer(mapping, np.uint8).ctypes.data
        try:
            driver.register(address, nbytes, read_only=True, for_kernels=for_kernels)
        except DriverError as error:
            if error.is_final:
                raise
            why = str(error)
            mapping = mmap.mmap(descriptor, nbytes)
            address = np.frombuffer(mapping, np.uint8).ctypes.data
            driver.register(address, nbytes, for_kernels=for_kernels)
    finally:
        os.close(descriptor)
    return mapping, address, why


def on_device(driver: CudaDevice, nbytes: int) -> int:
    """The address of new device memory."""
    granularity = driver.granularity_bytes()
    rounded = -(-nbytes // granularity) * granularity
    return driver.map(driver.create(rounded), rounded)


def copy_s(
    driver: CudaDevice, batches: Sequence[Runs], *, to_device: bool, rounds: int = 1, warm_s: float = 0.0
) -> float:
    """Seconds until all has ended, from before the first batch is queued: the least of `rounds`, once it has been
    repeated for `warm_s`."""
    stream = driver.stream()

    def copied_s() -> float:
        began_s = time.perf_counter()
        for runs in batches:
            driver.copy(runs, "to device" if to_device else "to host", stream)
        driver.synchronize(stream)
        return time.perf_counter() - began_s

    warm(copied_s, warm_s)
    return min(copied_s() for _ in range(rounds))


def run_of(device: int, host: int, nbytes: int, *, to_device: bool) -> CopyRun:
    return CopyRun(device, host, nbytes) if to_device else CopyRun(host, device, nbytes)
