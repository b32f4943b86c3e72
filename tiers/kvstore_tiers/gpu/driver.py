"""The CUDA driver, as much of it as the tier's worker needs, by the library `cuda-bindings`.

Owns nothing that outlives a call but the device's primary context: handles are the caller's. Only the worker process
makes a `Driver`: the daemon holds no context. The library finds libcuda.so.1 by LD_LIBRARY_PATH, then in the system.
"""

from __future__ import annotations

import contextlib
import ctypes
from typing import Any

from kvstore_cuda.compiler import Program, load_program
from kvstore_cuda.copies import CopyQueue, Runs, Way
from kvstore_cuda.driver import DriverError, call, cuda_driver, device_identity, launch

_READ_ONLY_HOST_REGISTER_SUPPORTED = 113
_HANDLE_IS_DESCRIPTOR_SUPPORTED = 103
_DIRECT_TO_MAPPED_MEMORY_SUPPORTED = 110  # as GPUDirect calls it: RDMA with CUDA VMM
_MAJOR, _MINOR = 75, 76
_REGISTER_PORTABLE, _REGISTER_FOR_KERNELS, _REGISTER_READ_ONLY = 1, 2, 8
_NON_BLOCKING, _NO_TIMING_BLOCKING_SYNC = 1, 3


class NoDriver(OSError):
    """There is no driver, no library for it or no such device; the message says what to do."""


class Unsettled(DriverError):
    """Work of the device may be under way, and nothing says when it has ended."""

    def __init__(self, error: DriverError) -> None:
        super().__init__(str(error), error.code, "nothing says what is under way")

    @property
    def is_final(self) -> bool:
        return True


class Driver:
    """The primary context of device `index`, current in the thread that makes this. Raises NoDriver, DriverError."""

    def __init__(self, index: int) -> None:
        try:
            self._cuda = cuda_driver()
        except OSError as error:
            raise NoDriver(str(error)) from None
        try:
            self._call("cuInit", 0)
            count = self._call("cuDeviceGetCount")
        except DriverError as error:
            raise NoDriver(f"the CUDA driver does not start ({error}): see nvidia-smi and kvctl doctor") from None
        if not 0 <= index < count:
            raise NoDriver(f"there is no CUDA device {index}: this machine has {count}")
        self._index = index
        self._device = self._call("cuDeviceGet", index)
        self._context = self._call("cuDevicePrimaryCtxRetain", self._device)
        self.use_in_this_thread()
        if not self._attribute(_HANDLE_IS_DESCRIPTOR_SUPPORTED):
            raise NoDriver(f"CUDA device {index} cannot export memory as a file descriptor")
        self._takes_direct = bool(self._attribute(_DIRECT_TO_MAPPED_MEMORY_SUPPORTED))
        self._copies = CopyQueue(self._cuda)
        self._registers_read_only = bool(self._attribute(_READ_ONLY_HOST_REGISTER_SUPPORTED))

    def use_in_this_thread(self) -> None:
        self._call("cuCtxSetCurrent", self._context)

    @property
    def name(self) -> str:
        raw: bytes = self._call("cuDeviceGetName", 96, self._device)
        return raw.split(b"\0")[0].decode(errors="replace")

    @property
    def identity(self) -> int:
        return device_identity(self._cuda, self._device)

    def memory_bytes(self) -> tuple[int, int]:
        """Free and total bytes of the device."""
        free, total = self._call("cuMemGetInfo")
        return int(free), int(total)

    # Device memory

    def granularity_bytes(self) -> int:
        option = self._cuda.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
        return int(self._call("cuMemGetAllocationGranularity", self._properties(), option))

    def create(self, nbytes: int) -> Any:
        """A handle of new device memory, which can be exported."""
        return self._call("cuMemCreate", nbytes, self._properties(), 0)

    def export_descriptor(self, handle: Any) -> int:
        """A new file descriptor that keeps the memory; the caller closes it."""
        return int(self._call("cuMemExportToShareableHandle", handle, self._by_descriptor, 0))

    def import_descriptor(self, descriptor: int) -> Any:
        """A handle of memory that some process exported; the descriptor stays the caller's."""
        return self._call("cuMemImportFromShareableHandle", descriptor, self._by_descriptor)

    def map(self, handle: Any, nbytes: int, *, read_only: bool = False) -> int:
        """Map memory and give this device the right to use it; its address. Nothing is mapped where it raises."""
        cuda = self._cuda
        access = cuda.CUmemAccessDesc()
        access.location = self._properties().location
        rights = cuda.CUmemAccess_flags
        access.flags = (
            rights.CU_MEM_ACCESS_FLAGS_PROT_READ if read_only else rights.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        )  # fmt: skip
        with contextlib.ExitStack() as undo:
            address = self._call("cuMemAddressReserve", nbytes, 0, cuda.CUdeviceptr(0), 0)
            undo.callback(self._call, "cuMemAddressFree", address, nbytes)
            self._call("cuMemMap", address, nbytes, 0, handle, 0)
            undo.callback(self._call, "cuMemUnmap", address, nbytes)
            self._call("cuMemSetAccess", address, nbytes, [access], 1)
            undo.pop_all()
        return int(address)

    def unmap(self, address: int, nbytes: int) -> None:
        self._call("cuMemUnmap", self._cuda.CUdeviceptr(address), nbytes)
        self._call("cuMemAddressFree", self._cuda.CUdeviceptr(address), nbytes)

    def release(self, handle: Any) -> None:
        self._call("cuMemRelease", handle)

    # Host memory

    def register(self, address: int, nbytes: int, *, read_only: bool = False, for_kernels: bool = False) -> None:
        """Let the device copy from and to host memory. `read_only`: memory that this process may only read.
        `for_kernels`: kernels use it too, at `device_pointer`."""
        if read_only and not self._registers_read_only:
            raise DriverError("cuMemHostRegister", 801, "this device cannot register memory read-only")
        flags = _REGISTER_PORTABLE | (_REGISTER_READ_ONLY if read_only else 0)
        flags |= _REGISTER_FOR_KERNELS if for_kernels else 0
        self._call("cuMemHostRegister", address, nbytes, flags)

    def unregister(self, address: int) -> None:
        self._call("cuMemHostUnregister", address)

    def device_pointer(self, address: int) -> int:
        """Where kernels find host memory that is registered for them."""
        return int(self._call("cuMemHostGetDevicePointer", address, 0))

    def clear(self, address: int, nbytes: int) -> None:
        """Fill device memory with zeros, and wait until that is done."""
        stream = self.stream()
        try:
            self._call("cuMemsetD8Async", self._cuda.CUdeviceptr(address), 0, nbytes, stream)
            self.synchronize(stream)
        except DriverError as error:
            raise ended_after(self, error, stream) from None
        finally:
            self._call("cuStreamDestroy", stream)

    # Kernels

    @property
    def version(self) -> int:
        """Of CUDA that the driver has: 13000 for 13.0."""
        return int(self._call("cuDriverGetVersion"))

    @property
    def architecture(self) -> str:
        """What kernels are compiled for, such as "sm_90"."""
        return f"sm_{self._attribute(_MAJOR)}{self._attribute(_MINOR)}"

    def load(self, program: Program, longest_s: float) -> Any:
        """See `load_program`."""
        return load_program(self._call, program, self.architecture, longest_s=longest_s)

    def function(self, module: Any, kernel: str) -> Any:
        return self._call("cuModuleGetFunction", module, kernel.encode())

    def launch(
        self, function: Any, blocks: int, threads: int, argument: ctypes.Structure, *, shared_bytes: int, stream: Any
    ) -> None:
        """Queue a kernel; `argument` is copied before this returns."""
        launch(self._call, function, (blocks, 1, 1), threads, argument, shared_bytes=shared_bytes, stream=stream)

    # Copies

    def stream(self) -> Any:
        return self._call("cuStreamCreate", _NON_BLOCKING)

    def synchronize(self, stream: Any) -> None:
        self._call("cuStreamSynchronize", stream)

    def event(self) -> Any:
        return self._call("cuEventCreate", _NO_TIMING_BLOCKING_SYNC)

    def record(self, event: Any, stream: Any) -> None:
        self._call("cuEventRecord", event, stream)

    def wait(self, event: Any) -> None:
        """Until what was queued before `record` has run. Raises DriverError when that failed."""
        self._call("cuEventSynchronize", event)

    def copy(self, runs: Runs, way: Way, stream: Any) -> None:
        """Queue copies, in no order among them: one call for all where the driver has batches. On the device no run may
        overlap with where it comes from."""
        self._copies.add(runs, way, stream)

    def close(self) -> None:
        self._call("cuDevicePrimaryCtxRelease", self._device)

    @property
    def _by_descriptor(self) -> Any:
        return self._cuda.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR

    def _properties(self) -> Any:
        cuda = self._cuda
        wanted = cuda.CUmemAllocationProp()
        wanted.type = cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        wanted.requestedHandleTypes = self._by_descriptor
        wanted.location.type = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        wanted.location.id = self._index
        wanted.allocFlags.gpuDirectRDMACapable = int(self._takes_direct)  # without it, no direct storage
        return wanted

    def _attribute(self, number: int) -> int:
        return int(self._call("cuDeviceGetAttribute", self._cuda.CUdevice_attribute(number), self._device))

    def _call(self, name: str, *arguments: Any) -> Any:
        return call(self._cuda, name, *arguments)


def ended_after(driver: Driver, error: DriverError, stream: Any) -> DriverError:
    """What to report of a call that failed, once what is queued on the stream has ended: its memory is used anew then.
    Unsettled where that cannot be waited for."""
    try:
        driver.synchronize(stream)
    except DriverError as worse:
        return Unsettled(worse)
    return error
