"""What the GPU tier's design takes for granted of the driver: rights, registration, and whose death ends memory.

Each question may break its context: it is asked in a process of its own.
"""

from __future__ import annotations

import multiprocessing
import signal
from multiprocessing.connection import Connection
from multiprocessing.reduction import DupFd

from kvstore_console.units import human_bytes
from kvstore_cuda.copies import CopyRun, Runs
from kvstore_cuda.device import CudaDevice
from kvstore_cuda.driver import DriverError
from support.gpu_answers import Answer, Sizes
from support.gpu_memory import arena, copy_s, on_device, pinned


def registers_read_only(device: int, sizes: Sizes) -> Answer:
    """Whether an arena that a client maps read-only can be registered, and copied from."""
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
    """Whether an importer that maps device memory read-only cannot write to it."""
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
    """Whether memory lives while a process without a context holds its descriptor, over the kill -9 of its maker."""
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
