"""Memory of a device and of the host that a question copies between, by the GPU tier's own driver calls.

Owns nothing. Device memory lives until the process of the question ends, host memory as long as its mapping, which
the caller keeps.
"""

from __future__ import annotations

import ctypes
import importlib.util
import mmap
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from multiprocessing.reduction import DupFd
from pathlib import Path

import numpy as np

from kvstore_console.units import human_bytes
from kvstore_cuda.copies import CopyRun, Runs
from kvstore_cuda.device import CudaDevice
from kvstore_cuda.driver import DriverError
from support.gpu_answers import Answer, Sizes
from support.report import warm

SAME_S, LONGEST_S, LOOK_S = 1.0, 10.0, 0.05
_NAMES = ("libcufile.so.0", "libcufile.so")
_WHEELS = ("cu13/lib", "cufile/lib")  # below nvidia/: of CUDA 13, of CUDA 12
_FS_STATISTICS = Path("/proc/driver/nvidia-fs/stats")


def settled_bytes(
    driver: CudaDevice, expected: int | None = None, *, clock: Callable[[], float] = time.monotonic,
    pause: Callable[[float], None] = time.sleep,
) -> int:  # fmt: skip
    """Return the free bytes: with `expected` as soon as they are at least that, without it once they have not changed
    for `SAME_S`; after `LONGEST_S` at the latest."""
    began_s = same_since_s = clock()
    free, _ = driver.memory_bytes()
    while expected is None or free < expected:
        now_s = clock()
        if now_s - began_s >= LONGEST_S or (expected is None and now_s - same_since_s >= SAME_S):
            break
        pause(LOOK_S)
        before, (free, _) = free, driver.memory_bytes()
        if free != before:
            same_since_s = clock()
    return free


def registers_read_only(device: int, sizes: Sizes) -> Answer:
    """Return whether an arena that a client maps read-only can be registered, and copied from."""
    driver, nbytes = CudaDevice(device).use_in_this_thread(), sizes.copied_bytes
    mapping, address, why = arena(driver, nbytes)
    if why:
        return Answer(False, f"a memfd that is mapped read-only CANNOT be registered: {why}")
    at = on_device(driver, nbytes)
    copy_s(driver, [Runs.of([CopyRun(at, address, nbytes)])], to_device=True)
    back, to = pinned(driver, nbytes)
    copy_s(driver, [Runs.of([CopyRun(to, at, nbytes)])], to_device=False)
    return Answer(back[:] == mapping[:], "a memfd that is mapped read-only is registered, and copied from")


def read_only_access_holds(device: int, sizes: Sizes) -> Answer:
    """Return whether an importer that maps device memory read-only cannot write to it."""
    driver, nbytes = CudaDevice(device).use_in_this_thread(), sizes.copied_bytes
    at = driver.map(driver.create(nbytes), nbytes, read_only=True)
    _, source = pinned(driver, nbytes)
    try:
        copy_s(driver, [Runs.of([CopyRun(at, source, nbytes)])], to_device=True)
    except DriverError as error:
        return Answer(True, f"a write to device memory that is mapped read-only fails: {error}")
    return Answer(False, "a write to device memory that is mapped read-only WENT THROUGH")


def _make_and_wait(device: int, nbytes: int, pipe: Connection) -> None:
    driver = CudaDevice(device).use_in_this_thread()
    handle = driver.create(nbytes)
    at = driver.map(handle, nbytes)
    mapping, source = pinned(driver, nbytes)
    mapping[:] = b"survives" * (nbytes // 8)
    copy_s(driver, [Runs.of([CopyRun(at, source, nbytes)])], to_device=True)
    pipe.send(DupFd(driver.export_descriptor(handle)))
    signal.pause()


def memory_outlives_its_maker(device: int, sizes: Sizes) -> Answer:
    """Return whether memory lives while a process without a context holds its descriptor, over the kill -9 of its
    maker.
    """
    nbytes = sizes.copied_bytes
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    maker = spawn.Process(target=_make_and_wait, args=(device, nbytes, theirs))
    maker.start()
    descriptor = ours.recv().detach()
    maker.kill()
    maker.join()
    driver = CudaDevice(device).use_in_this_thread()
    held, _ = driver.memory_bytes()
    at = driver.map(driver.import_descriptor(descriptor), nbytes, read_only=True)
    back, to = pinned(driver, nbytes)
    copy_s(driver, [Runs.of([CopyRun(to, at, nbytes)])], to_device=False)
    is_there = back[:] == b"survives" * (nbytes // 8)
    return Answer(is_there, f"device memory outlives the kill -9 of its maker ({human_bytes(held)} free meanwhile)")


class _CufileError(ctypes.Structure):
    _fields_ = (("code", ctypes.c_int), ("driver_code", ctypes.c_int))


def has_direct_storage(device: int, sizes: Sizes) -> Answer:
    """Return whether NVMe and the device can exchange bytes without host memory. It only informs."""
    CudaDevice(device).use_in_this_thread()
    module = "nvidia-fs is loaded" if _FS_STATISTICS.exists() else "nvidia-fs is not loaded"
    for name in candidates():
        try:
            library = ctypes.CDLL(name)
        except OSError:
            continue
        library.cuFileDriverOpen.restype = _CufileError
        code = library.cuFileDriverOpen().code
        opened = "opens" if code == 0 else f"does not open (error {code})"
        return Answer(True, f"GPUDirect Storage: {name} {opened}; {module}", {"there": float(code == 0)})
    says = f"GPUDirect Storage: no {_NAMES[0]}, of the system or of the wheel nvidia-cufile; {module}"
    return Answer(True, says, {"there": 0.0})


def candidates() -> Iterator[str]:
    """Names and paths of the library, in the order in which they are tried: the loader knows no wheels."""
    yield from _NAMES
    found = importlib.util.find_spec("nvidia")
    for place in (found.submodule_search_locations or ()) if found else ():
        yield from (str(Path(place) / wheel / _NAMES[0]) for wheel in _WHEELS)


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
