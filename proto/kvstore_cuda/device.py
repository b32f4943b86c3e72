"""A CUDA device, for all that use one: the GPU tier's worker, a client that reads device memory, the engine's kernels.

Owns a share of the device's primary context, the one that torch and CuPy use too; handles of memory, streams, events
and modules are the caller's. Never decides what is copied or launched.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from functools import cached_property
from types import ModuleType
from typing import Any, Self

from kvstore_cuda.compiler import LONGEST_S, Program, load_program
from kvstore_cuda.copies import CopyQueue, Runs, Way
from kvstore_cuda.driver import LIBRARY_MISSING, DriverError, NoDriver, call, cuda_driver

NON_BLOCKING = 1  # CUstream_flags
NO_TIMING_BLOCKING_SYNC = 3  # CUevent_flags: a thread that waits for the event sleeps
PORTABLE, FOR_KERNELS, READ_ONLY = 1, 2, 8  # CU_MEMHOSTREGISTER_*
_MAJOR, _MINOR, _DESCRIPTORS, _DIRECT_STORAGE, _READ_ONLY_HOST = 75, 76, 103, 110, 113  # CUdevice_attribute
_never_unmapped: list[object] = []  # host memory that could not be unregistered


class CudaDevice:
    """CUDA device `index`, as the driver counts in this process. `identity` is a number of 64 bits, not 0, that no
    other device has: the same in each process, and after a restart of the machine. `missing` says what to install where
    there is no library. Raises NoDriver, DriverError. No context is made current: see `use_in_this_thread`,
    `current`."""

    def __init__(self, index: int, missing: str = LIBRARY_MISSING) -> None:
        self.index = index
        self.driver = cuda_driver(missing)
        try:
            self.call("cuInit", 0)
            count = self.call("cuDeviceGetCount")
        except DriverError as error:
            raise NoDriver(f"the CUDA driver does not start ({error}): see nvidia-smi and kvctl doctor") from None
        if not 0 <= index < count:
            raise NoDriver(f"there is no CUDA device {index}: this machine has {count}")
        self.handle = self.call("cuDeviceGet", index)
        self.identity = int.from_bytes(bytes(self.call("cuDeviceGetUuid", self.handle).bytes)[:8], "little") or 1
        self._copies = CopyQueue(self.driver)
        self.context = self.call("cuDevicePrimaryCtxRetain", self.handle)

    def call(self, name: str, *arguments: Any) -> Any:
        """Return what a function of the driver answers beside its code: nothing, one thing or a tuple. Raises
        DriverError."""
        return call(self.driver, name, *arguments)

    def quietly(self, name: str, *arguments: Any) -> None:
        """Make a call whose failure changes nothing."""
        quietly(self.driver, name, *arguments)

    def use_in_this_thread(self) -> Self:
        """Make the context that of this thread, for good."""
        self.call("cuCtxSetCurrent", self.context)
        return self

    def current(self) -> contextlib.AbstractContextManager[None]:
        """Make the context that of this thread meanwhile. No capture of a CUDA graph forbids it a call: what is called
        here is no part of any graph."""
        return current(self.driver, self.context)

    def attribute(self, number: int) -> int:
        """Return a CUdevice_attribute of the device."""
        return int(self.call("cuDeviceGetAttribute", self.driver.CUdevice_attribute(number), self.handle))

    @property
    def name(self) -> str:
        raw: bytes = self.call("cuDeviceGetName", 96, self.handle)
        return raw.split(b"\0")[0].decode(errors="replace")

    @property
    def version(self) -> int:
        """The CUDA of the driver: 13000 for 13.0."""
        return int(self.call("cuDriverGetVersion"))

    @property
    def capability(self) -> tuple[int, int]:
        """The compute capability: (9, 0) for an H100."""
        return self.attribute(_MAJOR), self.attribute(_MINOR)

    @property
    def architecture(self) -> str:
        """The target that kernels are compiled for, such as "sm_90"."""
        return "sm_{}{}".format(*self.capability)

    def memory_bytes(self) -> tuple[int, int]:
        """Return free and total bytes of the device."""
        free, total = self.call("cuMemGetInfo")
        return int(free), int(total)

    def close(self) -> None:
        """Give the share of the context back."""
        self.call("cuDevicePrimaryCtxRelease", self.handle)

    # Device memory by descriptor

    def require_descriptors(self) -> None:
        """Raise NoDriver where memory of the device cannot be exported."""
        if not self.attribute(_DESCRIPTORS):
            raise NoDriver(f"CUDA device {self.index} cannot export memory as a file descriptor")

    def granularity_bytes(self) -> int:
        """Return the size that memory of the device should be a multiple of."""
        option = self.driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
        return int(self.call("cuMemGetAllocationGranularity", self._properties, option))

    def create(self, nbytes: int) -> Any:
        """Return a handle of new device memory, which can be exported."""
        return self.call("cuMemCreate", nbytes, self._properties, 0)

    def export_descriptor(self, handle: Any) -> int:
        """Return a new file descriptor that keeps the memory; the caller closes it."""
        return int(self.call("cuMemExportToShareableHandle", handle, self._by_descriptor, 0))

    def import_descriptor(self, descriptor: int) -> Any:
        """Return a handle of memory that some process exported; the descriptor stays the caller's."""
        return self.call("cuMemImportFromShareableHandle", descriptor, self._by_descriptor)

    def map(self, handle: Any, nbytes: int, *, read_only: bool = False) -> int:
        """Map memory, give this device the right to use it, and return its address. Nothing is mapped where it
        raises."""
        cuda, rights = self.driver, self.driver.CUmemAccess_flags
        access = cuda.CUmemAccessDesc()
        access.location.type = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        access.location.id = self.index
        access.flags = (
            rights.CU_MEM_ACCESS_FLAGS_PROT_READ if read_only else rights.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        )  # fmt: skip
        with contextlib.ExitStack() as undo:
            address = self.call("cuMemAddressReserve", nbytes, 0, cuda.CUdeviceptr(0), 0)
            undo.callback(self.quietly, "cuMemAddressFree", address, nbytes)
            self.call("cuMemMap", address, nbytes, 0, handle, 0)
            undo.callback(self.quietly, "cuMemUnmap", address, nbytes)
            self.call("cuMemSetAccess", address, nbytes, [access], 1)
            undo.pop_all()
        return int(address)

    def unmap(self, address: int, nbytes: int) -> None:
        """End a mapping. Where the first of its calls fails, the second is not made."""
        self.call("cuMemUnmap", self.driver.CUdeviceptr(address), nbytes)
        self.call("cuMemAddressFree", self.driver.CUdeviceptr(address), nbytes)

    def release(self, handle: Any) -> None:
        """Let go of memory, which is there as long as a mapping or a descriptor of it is."""
        self.call("cuMemRelease", handle)

    def clear(self, address: int, nbytes: int) -> None:
        """Fill device memory with zeros, and wait until that is done."""
        stream = self.stream()
        try:
            self.call("cuMemsetD8Async", self.driver.CUdeviceptr(address), 0, nbytes, stream)
            self.synchronize(stream)
        except DriverError as error:
            raise self.ended_after(error, stream) from None
        finally:
            self.call("cuStreamDestroy", stream)

    @property
    def _by_descriptor(self) -> Any:
        return self.driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR

    @cached_property
    def _properties(self) -> Any:
        """The properties of memory that can be exported, and that direct storage may write to where the device has that
        (GPUDirect calls it RDMA with CUDA VMM)."""
        cuda = self.driver
        wanted = cuda.CUmemAllocationProp()
        wanted.type = cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        wanted.requestedHandleTypes = self._by_descriptor
        wanted.location.type = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        wanted.location.id = self.index
        wanted.allocFlags.gpuDirectRDMACapable = int(bool(self.attribute(_DIRECT_STORAGE)))
        return wanted

    # Host memory

    @cached_property
    def registers_read_only(self) -> bool:
        """Return whether memory that this process may only read can be registered."""
        return bool(self.attribute(_READ_ONLY_HOST))

    def register(self, address: int, nbytes: int, *, read_only: bool = False, for_kernels: bool = False) -> None:
        """Let the device copy from and to host memory. `read_only`: memory that this process may only read.
        `for_kernels`: kernels use it too, at `device_pointer`."""
        if read_only and not self.registers_read_only:
            raise DriverError("cuMemHostRegister", 801, "this device cannot register memory read-only")
        flags = PORTABLE | (READ_ONLY if read_only else 0) | (FOR_KERNELS if for_kernels else 0)
        self.call("cuMemHostRegister", address, nbytes, flags)

    def unregister(self, address: int) -> None:
        """End the registration of host memory; none of its copies may be under way."""
        self.call("cuMemHostUnregister", address)

    def forget(self, address: int, memory: object) -> None:
        """Unregister host memory that `memory` owns, in this context. Where that fails it is kept for good."""
        forget(self.driver, self.context, address, memory)

    def device_pointer(self, address: int) -> int:
        """Return where kernels find host memory that is registered for them."""
        return int(self.call("cuMemHostGetDevicePointer", address, 0))

    # Kernels

    def load(self, program: Program, longest_s: float = LONGEST_S) -> Any:
        """Return `program` as a module of the current context, compiled for this device. Raises as `load_program`."""
        return load_program(self.call, program, self.architecture, longest_s=longest_s)

    def function(self, module: Any, kernel: str) -> Any:
        """Return a kernel of a module."""
        return self.call("cuModuleGetFunction", module, kernel.encode())

    def start(
        self, function: Any, grid: tuple[int, int, int], threads: int, argument: ctypes.Structure,
        *, shared_bytes: int = 0, stream: Any,
    ) -> None:  # fmt: skip
        """Queue a kernel that has one argument, which is copied before this returns."""
        parameters = (ctypes.c_void_p * 1)(ctypes.addressof(argument))
        size = (*grid, threads, 1, 1)
        self.call("cuLaunchKernel", function, *size, shared_bytes, stream, ctypes.addressof(parameters), 0)

    # Streams, events, copies

    def stream(self, priority: int = 0) -> Any:
        """Return a new stream that waits for no other. Its kernels come before those of streams of a higher number; the
        driver takes the next `priority` that there is."""
        if priority:
            return self.call("cuStreamCreateWithPriority", NON_BLOCKING, priority)
        return self.call("cuStreamCreate", NON_BLOCKING)

    def synchronize(self, stream: Any = None) -> None:
        """Wait until what is queued on a stream has run; None: on any of the current context. Raises DriverError where
        it failed."""
        self.call("cuCtxSynchronize") if stream is None else self.call("cuStreamSynchronize", stream)

    def event(self) -> Any:
        """Return a new event without a time; a thread that waits for it sleeps."""
        return self.call("cuEventCreate", NO_TIMING_BLOCKING_SYNC)

    def record(self, event: Any, stream: Any) -> None:
        """Let `event` pass when what is queued on `stream` by now has run."""
        self.call("cuEventRecord", event, stream)

    def wait(self, event: Any) -> None:
        """Wait until `event` has passed. Raises DriverError when what it stands behind failed."""
        self.call("cuEventSynchronize", event)

    def copy(self, runs: Runs, way: Way, stream: Any) -> None:
        """Queue copies, in no order among them: one call for all where the driver has batches. On the device no run may
        overlap with where it comes from."""
        self._copies.add(runs, way, stream)

    def ended_after(self, error: DriverError, stream: Any) -> DriverError:
        """Wait for what is queued on the stream, whose memory is used anew then, and return what to report of a call
        that failed: `error`, or Unsettled where that cannot be waited for."""
        try:
            self.synchronize(stream)
        except DriverError as worse:
            return Unsettled(worse)
        return error


class Unsettled(DriverError):
    """Work of the device may be under way, and nothing says when it has ended."""

    def __init__(self, error: DriverError) -> None:
        super().__init__(str(error), error.code, "nothing says what is under way")

    @property
    def is_final(self) -> bool:
        return True


# For finalizers, which must not refer to the device whose end they are


def quietly(driver: ModuleType, name: str, *arguments: Any) -> None:
    """Make a call of the driver whose failure changes nothing."""
    with contextlib.suppress(DriverError):
        call(driver, name, *arguments)


@contextlib.contextmanager
def current(driver: ModuleType, context: Any) -> Iterator[None]:
    """Make `context` that of this thread meanwhile: see `CudaDevice.current`."""
    relaxed = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    before, mode = call(driver, "cuCtxGetCurrent"), call(driver, "cuThreadExchangeStreamCaptureMode", relaxed)
    try:
        call(driver, "cuCtxSetCurrent", context)
        yield
    finally:
        quietly(driver, "cuThreadExchangeStreamCaptureMode", mode)
        quietly(driver, "cuCtxSetCurrent", before)


def forget(driver: ModuleType, context: Any, address: int, memory: object) -> None:
    """Unregister host memory in `context`: see `CudaDevice.forget`."""
    try:
        with current(driver, context):
            call(driver, "cuMemHostUnregister", address)
    except DriverError:
        never_unmap(memory)


def never_unmap(memory: object) -> None:
    """Keep host memory for good: the driver may know it, and other memory at its address could not be registered."""
    _never_unmapped.append(memory)
