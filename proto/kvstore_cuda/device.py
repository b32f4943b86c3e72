"""A CUDA device, for the GPU tier's worker, for a client that reads device memory, and for the engine's kernels.

The module owns a share of the device's primary context, which torch and CuPy use too. Handles of memory, streams,
events and modules belong to the caller. It never decides what is copied or launched.
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
    """A CUDA device, for memory, copies and kernels. It uses the device's primary context, which torch and CuPy use
    too. `index` is the device's number in this process. `identity` is a number of 64 bits, not 0, that names the device
    to every process, also after a restart of the machine. `missing` is the error message if the CUDA library is
    missing. The constructor makes no context current: see `use_in_this_thread` and `current`. Raises NoDriver,
    DriverError.
    """

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
        """Call the driver's function `name` with `arguments`, and return its results without the status code: None, one
        value or a tuple. Raises DriverError if the code reports a failure.
        """
        return call(self.driver, name, *arguments)

    def quietly(self, name: str, *arguments: Any) -> None:
        """Call the driver's function `name` with `arguments`, and ignore a failure."""
        quietly(self.driver, name, *arguments)

    def use_in_this_thread(self) -> Self:
        """Make the device's context current in this thread for good, and return the device."""
        self.call("cuCtxSetCurrent", self.context)
        return self

    def current(self) -> contextlib.AbstractContextManager[None]:
        """Return a context manager that makes the device's context current in this thread. Calls inside it work also
        during the capture of a CUDA graph, and do not become part of that graph.
        """
        return current(self.driver, self.context)

    def attribute(self, number: int) -> int:
        """Return the value of the device's attribute `number`, a CUdevice_attribute."""
        return int(self.call("cuDeviceGetAttribute", self.driver.CUdevice_attribute(number), self.handle))

    @property
    def name(self) -> str:
        raw: bytes = self.call("cuDeviceGetName", 96, self.handle)
        return raw.split(b"\0")[0].decode(errors="replace")

    @property
    def version(self) -> int:
        """The CUDA version of the driver as a number: 13000 for 13.0."""
        return int(self.call("cuDriverGetVersion"))

    @property
    def capability(self) -> tuple[int, int]:
        """The device's compute capability as major and minor number: (9, 0) for an H100."""
        return self.attribute(_MAJOR), self.attribute(_MINOR)

    @property
    def architecture(self) -> str:
        """The name of the architecture for which kernels are compiled, such as "sm_90"."""
        return "sm_{}{}".format(*self.capability)

    def memory_bytes(self) -> tuple[int, int]:
        """Return the free and the total bytes of device memory. The context must be current."""
        free, total = self.call("cuMemGetInfo")
        return int(free), int(total)

    def close(self) -> None:
        """Release this object's share of the device's context. The device may not be used afterwards."""
        self.call("cuDevicePrimaryCtxRelease", self.handle)

    # Device memory by descriptor

    def require_descriptors(self) -> None:
        """Raise NoDriver if the device cannot export its memory to other processes as a file descriptor."""
        if not self.attribute(_DESCRIPTORS):
            raise NoDriver(f"CUDA device {self.index} cannot export memory as a file descriptor")

    def granularity_bytes(self) -> int:
        """Return the granularity of exportable device memory in bytes. Sizes passed to `create` should be multiples of
        it.
        """
        option = self.driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
        return int(self.call("cuMemGetAllocationGranularity", self._properties, option))

    def create(self, nbytes: int) -> Any:
        """Allocate `nbytes` bytes of device memory that can be exported, and return its handle."""
        return self.call("cuMemCreate", nbytes, self._properties, 0)

    def export_descriptor(self, handle: Any) -> int:
        """Return a new file descriptor of the device memory of `handle`, to pass to another process. The memory lives
        at least as long as the descriptor, which the caller closes.
        """
        return int(self.call("cuMemExportToShareableHandle", handle, self._by_descriptor, 0))

    def import_descriptor(self, descriptor: int) -> Any:
        """Return a handle of the device memory that another process exported as the file descriptor `descriptor`. The
        caller keeps and closes the descriptor.
        """
        return self.call("cuMemImportFromShareableHandle", descriptor, self._by_descriptor)

    def map(self, handle: Any, nbytes: int, *, read_only: bool = False) -> int:
        """Map `nbytes` bytes of the memory of `handle` into this process's device addresses, and return the address.
        With `read_only` the device may not write there. If it raises, nothing is mapped.
        """
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
        """End the mapping of `nbytes` bytes of device memory at `address`. Raises DriverError; if unmapping fails, the
        range of addresses stays reserved.
        """
        self.call("cuMemUnmap", self.driver.CUdeviceptr(address), nbytes)
        self.call("cuMemAddressFree", self.driver.CUdeviceptr(address), nbytes)

    def release(self, handle: Any) -> None:
        """Release the `handle` of device memory. The memory stays until its last mapping and descriptor are gone."""
        self.call("cuMemRelease", handle)

    def clear(self, address: int, nbytes: int) -> None:
        """Fill `nbytes` bytes of device memory at `address` with zeros, and wait for the end."""
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
        """The properties of memory that can be exported. Direct storage may write to it if the device supports that
        (GPUDirect calls it RDMA with CUDA VMM).
        """
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
        """Return whether host memory that this process may only read can be registered with the device."""
        return bool(self.attribute(_READ_ONLY_HOST))

    def register(self, address: int, nbytes: int, *, read_only: bool = False, for_kernels: bool = False) -> None:
        """Register `nbytes` bytes of host memory at `address`, so that the device copies from and to it directly.
        `read_only` is for memory that this process may only read. With `for_kernels`, kernels may use it too, at
        `device_pointer`.
        """
        if read_only and not self.registers_read_only:
            raise DriverError("cuMemHostRegister", 801, "this device cannot register memory read-only")
        flags = PORTABLE | (READ_ONLY if read_only else 0) | (FOR_KERNELS if for_kernels else 0)
        self.call("cuMemHostRegister", address, nbytes, flags)

    def unregister(self, address: int) -> None:
        """End the registration of the host memory at `address`. No copy from or to it may be under way."""
        self.call("cuMemHostUnregister", address)

    def forget(self, address: int, memory: object) -> None:
        """Unregister the host memory at `address`, which the object `memory` owns. If that fails, keep `memory` until
        the process ends, because the driver may still use the address.
        """
        forget(self.driver, self.context, address, memory)

    def device_pointer(self, address: int) -> int:
        """Return the address by which kernels reach the host memory at `address`, which was registered with
        `for_kernels`.
        """
        return int(self.call("cuMemHostGetDevicePointer", address, 0))

    # Kernels

    def load(self, program: Program, longest_s: float = LONGEST_S) -> Any:
        """Compile `program` for this device, or read it from the cache, and return it as a module of the current
        context. Compiling may take `longest_s` seconds. Raises the errors of `load_program`.
        """
        return load_program(self.call, program, self.architecture, longest_s=longest_s)

    def function(self, module: Any, kernel: str) -> Any:
        """Return the function named `kernel` of the loaded `module`, for `start`."""
        return self.call("cuModuleGetFunction", module, kernel.encode())

    def start(
        self, function: Any, grid: tuple[int, int, int], threads: int, argument: ctypes.Structure,
        *, shared_bytes: int = 0, stream: Any,
    ) -> None:  # fmt: skip
        """Queue the kernel `function` on the CUDA stream `stream`, with `grid` thread blocks of `threads` threads. Its
        only argument, `argument`, is copied before this returns. `shared_bytes` is the dynamic shared memory of a
        thread block.
        """
        parameters = (ctypes.c_void_p * 1)(ctypes.addressof(argument))
        size = (*grid, threads, 1, 1)
        self.call("cuLaunchKernel", function, *size, shared_bytes, stream, ctypes.addressof(parameters), 0)

    # Streams, events, copies

    def stream(self, priority: int = 0) -> Any:
        """Return a new CUDA stream that does not wait for other streams. Kernels of a stream with a lower `priority`
        number start first; the driver rounds the number to one that it supports.
        """
        if priority:
            return self.call("cuStreamCreateWithPriority", NON_BLOCKING, priority)
        return self.call("cuStreamCreate", NON_BLOCKING)

    def synchronize(self, stream: Any = None) -> None:
        """Wait until the work queued on `stream` has run, or the work on all streams of the current context if it is
        None. Raises DriverError if that work failed.
        """
        self.call("cuCtxSynchronize") if stream is None else self.call("cuStreamSynchronize", stream)

    def event(self) -> Any:
        """Return a new CUDA event without timing. A thread that waits for it sleeps instead of spinning."""
        return self.call("cuEventCreate", NO_TIMING_BLOCKING_SYNC)

    def record(self, event: Any, stream: Any) -> None:
        """Record `event` on the CUDA stream `stream`. The event passes when all work queued on the stream so far has
        run.
        """
        self.call("cuEventRecord", event, stream)

    def wait(self, event: Any) -> None:
        """Wait until `event` has passed. Raises DriverError if the work before it failed."""
        self.call("cuEventSynchronize", event)

    def copy(self, runs: Runs, way: Way, stream: Any) -> None:
        """Queue the copies of `runs` on the CUDA stream `stream`; they may run in any order. `way` is their direction:
        "to device", "to host" or "on device". On the device, no copy's destination may overlap its source.
        """
        self._copies.add(runs, way, stream)

    def ended_after(self, error: DriverError, stream: Any) -> DriverError:
        """Wait for the work queued on `stream` after a call failed with `error`, so that its memory can be reused.
        Return the error to report: `error`, or Unsettled if waiting fails too.
        """
        try:
            self.synchronize(stream)
        except DriverError as worse:
            return Unsettled(worse)
        return error


class Unsettled(DriverError):
    """The error of a device whose work may still be running, while nothing can show when it ends. The memory that it
    uses must not be reused.
    """

    def __init__(self, error: DriverError) -> None:
        super().__init__(str(error), error.code, "nothing says what is under way")

    @property
    def is_final(self) -> bool:
        return True


# For finalizers, which must not refer to the device whose end they are


def quietly(driver: ModuleType, name: str, *arguments: Any) -> None:
    """Call the function `name` of the CUDA driver with `arguments`, and ignore a failure. `driver` is the driver's
    module.
    """
    with contextlib.suppress(DriverError):
        call(driver, name, *arguments)


@contextlib.contextmanager
def current(driver: ModuleType, context: Any) -> Iterator[None]:
    """Make `context` current in this thread inside the `with` block, and restore the context before it afterwards.
    Calls inside it do not become part of a CUDA graph that is being captured.
    """
    relaxed = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    before, mode = call(driver, "cuCtxGetCurrent"), call(driver, "cuThreadExchangeStreamCaptureMode", relaxed)
    try:
        call(driver, "cuCtxSetCurrent", context)
        yield
    finally:
        quietly(driver, "cuThreadExchangeStreamCaptureMode", mode)
        quietly(driver, "cuCtxSetCurrent", before)


def forget(driver: ModuleType, context: Any, address: int, memory: object) -> None:
    """Unregister the host memory at `address`, which the object `memory` owns, in `context`. If that fails, keep
    `memory` for the life of the process.
    """
    try:
        with current(driver, context):
            call(driver, "cuMemHostUnregister", address)
    except DriverError:
        never_unmap(memory)


def never_unmap(memory: object) -> None:
    """Keep `memory`, an owner of host memory, for the life of the process. The CUDA driver may still know its address,
    and other memory there could not be registered.
    """
    _never_unmapped.append(memory)
