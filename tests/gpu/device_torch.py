"""Torch tensors in memory of the emulated device, and the stream that stands for torch's current one.

The CPU computes what kernels of that stream would. So the memory is made readable for it, and each operation on one of
these tensors begins by waiting for all that the stream was given before, as a kernel that is queued there does. What is
not in the stream (a copy that nobody waits for) is not waited for. Memory is unmapped as soon as its tensor ends.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import weakref
from typing import Any

import numpy as np
import torch

from kvstore_client.device import DeviceMemory
from kvstore_connectors.transformers.device_copies import TorchStream
from tests.gpu.device_engine import allocate

_PAGE_BYTES = 2 << 20
_LOOKS_ONLY = frozenset({"data_ptr", "stride", "size", "dim", "element_size", "permute", "__get__", "__len__", "view"})
_libc = ctypes.CDLL(None, use_errno=True)


class OnStream(torch.Tensor):
    """A tensor on the device, and everything that is computed from one."""

    stream: EmulatedStream

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        if function.__name__ not in _LOOKS_ONLY:
            cls.stream.synchronize()
        return super().__torch_function__(function, types, arguments, named or {})


class EmulatedStream:
    """A `TorchStream` without torch's CUDA."""

    def __init__(self, device: DeviceMemory) -> None:
        self._device = device
        with device.current():
            self._stream = device.call("cuStreamCreate", 1)
        OnStream.stream = self

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        count = math.prod(shape)
        nbytes = -(-count * dtype.itemsize // _PAGE_BYTES) * _PAGE_BYTES
        address = allocate(self._device, nbytes)
        if _libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), mmap.PROT_READ | mmap.PROT_WRITE):
            raise OSError(ctypes.get_errno(), "mprotect")
        memory = (ctypes.c_char * nbytes).from_address(address)
        weakref.finalize(memory, self._free, address, nbytes).atexit = False
        return torch.frombuffer(memory, dtype=dtype, count=count).view(shape).as_subclass(OnStream)

    def address(self) -> int:
        return int(self._stream)

    def synchronize(self) -> None:
        with self._device.current():
            self._device.call("cuStreamSynchronize", self._stream)

    def _free(self, address: int, nbytes: int) -> None:
        with self._device.current():
            self._device.call("cuMemUnmap", address, nbytes)
            self._device.call("cuMemAddressFree", address, nbytes)


class QueuedWrites:
    """Writes on the model's stream, as a kernel of it would make them."""

    def __init__(self, device: DeviceMemory, stream: TorchStream) -> None:
        self._device, self._stream = device, stream
        self._registered: list[Any] = []

    def __call__(self, tensor: torch.Tensor, content: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
        """Queue a copy of `content`, which is `registered`, to where a tensor begins."""
        with self._device.current():
            place = self._device.driver.CUdeviceptr(tensor.data_ptr())
            source = content.__array_interface__["data"][0]
            self._device.call("cuMemcpyHtoDAsync", place, source, content.nbytes, self._address())

    def registered(self, nbytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Host memory that copies reach, for good."""
        memory = np.frombuffer(mmap.mmap(-1, nbytes), np.uint8)
        with self._device.current():
            self._device.call("cuMemHostRegister", memory.__array_interface__["data"][0], nbytes, 1)
        self._registered.append(memory)
        return memory

    def synchronize(self) -> None:
        with self._device.current():
            self._device.call("cuStreamSynchronize", self._address())

    def _address(self) -> Any:
        return self._device.driver.CUstream(self._stream.address())
