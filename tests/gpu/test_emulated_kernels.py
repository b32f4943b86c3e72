"""The emulated CUDA driver runs kernels: of real cubins, later, on the device's memory, with the device's rights."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from pathlib import Path

import pytest
import xxhash

from kvstore_tiers.gpu.streams import _SHARED_BYTES, KERNEL, PROGRAM, THREADS, ChecksumArgument
from tests.cuda_shim.build import shim_library
from tests.gpu.emulated import compiled
from tests.gpu.test_emulated_driver import (
    CHUNK,
    ILLEGAL,
    INVALID,
    NOT_READY,
    READ,
    READ_WRITE,
    Driver,
    Memory,
    path,
    u64,
)
from tests.reference.nvrtc import need_nvrtc

__all__ = ["path"]  # the fixture
MAPPED, INVALID_IMAGE, INVALID_HANDLE, NOT_FOUND = 2, 200, 400, 500


class Kernel:
    """`kv_checksums`, and one range: a page of device memory that is full of "k"."""

    def __init__(self, driver: Driver, rights: int = READ_WRITE) -> None:
        self.driver = driver
        self.module, self.function = ctypes.c_void_p(), ctypes.c_void_p()
        driver.must("cuModuleLoadData", ctypes.byref(self.module), cubin())
        driver.must("cuModuleGetFunction", ctypes.byref(self.function), self.module, KERNEL.encode())
        self.handle = driver.create()[1]
        self.chunk = driver.map(self.handle, rights)
        self.page = Memory(b"k").register(driver)
        if rights == READ_WRITE:
            assert driver.to_device(self.chunk, self.page) == 0 and driver.wait() == 0
        self.rows = Memory().register(driver, MAPPED)
        self.rows.mapping[:16] = self.chunk.value.to_bytes(8, "little") + (4096).to_bytes(8, "little")

    @property
    def found(self) -> int:
        return int.from_bytes(self.rows.mapping[16:24], "little")

    def launch(self, ranges: int | None = None, shared_bytes: int = _SHARED_BYTES) -> int:
        at = ctypes.c_uint64()
        self.driver.must("cuMemHostGetDevicePointer_v2", ctypes.byref(at), self.rows.pointer, 0)
        argument = ChecksumArgument(ranges or at.value, 1)
        parameters = (ctypes.c_void_p * 1)(ctypes.addressof(argument))
        return self.driver.call(
            "cuLaunchKernel", self.function, 1, 1, 1, THREADS, 1, 1, shared_bytes, self.driver.stream,
            ctypes.byref(parameters), None,
        )  # fmt: skip


def cubin() -> bytes:
    need_nvrtc()
    return compiled(PROGRAM)


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EMULATED_CUDA_KERNELS", f"/nowhere.so:{shim_library(PROGRAM)}")


def test_a_kernel_runs_on_device_memory(path: Path) -> None:
    kernel = Kernel(Driver(path))
    assert kernel.launch() == 0 and kernel.driver.wait() == 0
    assert kernel.found == xxhash.xxh3_64_intdigest(b"k" * 4096)


def test_a_kernel_runs_later_and_in_the_order_of_its_stream(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EMULATED_CUDA_FAULTS", "run:2=hang")  # the first was the copy that filled the page
    kernel, event = Kernel(Driver(path)), ctypes.c_void_p()
    kernel.driver.must("cuEventCreate", ctypes.byref(event), 2)
    assert kernel.launch() == 0
    kernel.driver.must("cuEventRecord", event, kernel.driver.stream)
    assert kernel.driver.call("cuEventQuery", event) == NOT_READY and kernel.found == 0


def test_what_is_no_cubin_and_what_it_does_not_hold_is_refused(path: Path) -> None:
    driver, module, function = Driver(path), ctypes.c_void_p(), ctypes.c_void_p()
    assert driver.call("cuModuleLoadData", ctypes.byref(module), b"not one" * 100) == INVALID_IMAGE
    driver.must("cuModuleLoadData", ctypes.byref(module), cubin())
    assert driver.call("cuModuleGetFunction", ctypes.byref(function), module, b"kv_others") == NOT_FOUND


def test_a_kernel_that_no_library_has_is_not_found(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EMULATED_CUDA_KERNELS")
    driver, module, function = Driver(path), ctypes.c_void_p(), ctypes.c_void_p()
    driver.must("cuModuleLoadData", ctypes.byref(module), cubin())
    assert driver.call("cuModuleGetFunction", ctypes.byref(function), module, KERNEL.encode()) == NOT_FOUND


def test_memory_that_was_unmapped_breaks_the_context(path: Path) -> None:
    kernel = Kernel(Driver(path))
    kernel.driver.must("cuMemUnmap", kernel.chunk, ctypes.c_size_t(CHUNK))
    assert kernel.launch() == 0 and kernel.driver.wait() == ILLEGAL
    assert kernel.driver.create()[0] == ILLEGAL, "for good"


def test_memory_without_the_right_to_write_breaks_the_context(path: Path) -> None:
    kernel = Kernel(Driver(path), rights=READ)
    assert kernel.launch() == 0 and kernel.driver.wait() == 0, "it may read there"
    writable = kernel.driver.map(kernel.handle)
    kernel.driver.must("cuMemsetD8Async", writable, 0, ctypes.c_size_t(4096), kernel.driver.stream)
    assert kernel.launch(ranges=writable.value) == 0 and kernel.driver.wait() == 0, "an empty range, and its sum"
    assert kernel.launch(ranges=kernel.chunk.value) == 0 and kernel.driver.wait() == ILLEGAL


def test_what_a_queued_kernel_may_read_is_not_poisoned(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EMULATED_CUDA_DELAY_US", "20000")
    kernel = Kernel(Driver(path))
    new = Memory(b"n").register(kernel.driver)
    assert kernel.launch() == 0 and kernel.driver.to_device(kernel.chunk, new) == 0
    assert kernel.driver.wait() == 0 and kernel.found == xxhash.xxh3_64_intdigest(b"k" * 4096)


def test_host_memory_that_is_not_registered_breaks_the_context(path: Path) -> None:
    kernel, rows = Kernel(Driver(path)), Memory()
    rows.mapping[:] = kernel.rows.mapping[:]
    rows.register(kernel.driver)
    assert kernel.launch(ranges=rows.pointer.value) == 0 and kernel.driver.wait() == 0
    kernel.driver.must("cuMemHostUnregister", rows.pointer)
    assert kernel.launch(ranges=rows.pointer.value) == 0 and kernel.driver.wait() == ILLEGAL


def test_the_cpu_has_no_rights_after_a_kernel_either(path: Path) -> None:
    need_nvrtc()
    program = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
import ctypes, pathlib
from tests.gpu.test_emulated_driver import Driver
from tests.gpu.test_emulated_kernels import Kernel
kernel = Kernel(Driver(pathlib.Path({str(path)!r})))
assert kernel.launch() == 0 and kernel.driver.wait() == 0 and kernel.found
print("ran", flush=True)
ctypes.string_at(kernel.chunk.value, 1)
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True)
    assert (ended.returncode, ended.stdout) == (-11, b"ran\n"), ended.stderr


def test_launches_that_a_device_refuses(path: Path) -> None:
    kernel = Kernel(Driver(path))
    assert kernel.launch(shared_bytes=(48 << 10) + 1) == INVALID
    kernel.driver.must("cuFuncSetAttribute", kernel.function, 8, 64 << 10)
    assert kernel.launch(shared_bytes=(48 << 10) + 1) == 0 and kernel.driver.wait() == 0
    pointer = u64(0)
    unmapped = Memory().register(kernel.driver)
    assert kernel.driver.call("cuMemHostGetDevicePointer_v2", ctypes.byref(pointer), unmapped.pointer, 0) == INVALID
    kernel.driver.must("cuModuleUnload", kernel.module)
    assert kernel.launch() == INVALID_HANDLE
