"""Lease arrays show K and V of a block, without a copy, to other libraries: NumPy, torch, JAX, CuPy.

The module owns how the memory of a lease, or of a slot that a put fills, is passed on: by DLPack, by `__array__` for
host memory, and by `__cuda_array_interface__` for a device. NumPy makes each DLPack capsule and frees it in C, even at
the end of the interpreter; this module only sets the fields for which NumPy has no value: bfloat16, fp8, a CUDA device.
It copies only when asked to, and never reads device memory. Invariants: an array is made only while its lease is valid.
From then on it defers the release of the lease until the last library has dropped it, so no array shows the bytes of
another block. The read-only mapping protects a block from writers, because torch knows no read-only memory.
"""

from __future__ import annotations

import ctypes
from functools import cache
from importlib import import_module
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from kvstore_proto.kv_layout import Numbers
from kvstore_proto.number_types import NumberType

Kind = str  # "k", "v", "bytes", or the name of a part of the group
_HOST, _CUDA = 1, 2  # DLPack's numbers of devices
_HAS_VERSIONS: Final = np.lib.NumpyVersion(np.__version__) >= "2.1.0"


class _Tensor(ctypes.Structure):
    """The C struct DLTensor of DLPack."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("type_code", ctypes.c_uint8),
    )


class _Managed(ctypes.Structure):
    """The C struct DLManagedTensorVersioned of DLPack. The older DLManagedTensor begins with the tensor."""

    _fields_ = (
        ("version", ctypes.c_uint32 * 2),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    )


_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


class ArraySource(Protocol):
    """An owner of the memory that an array shows: a lease, or a slot that a put fills."""

    def hold(self) -> object:
        """Return an object. As long as a caller refers to it, the lease or slot stays valid. Raises BufferError if the
        lease or slot has ended already.
        """
        ...


class _Export:
    """Memory in a form that NumPy takes; the array over it is its only owner."""

    __slots__ = ("__array_interface__", "_kept")

    def __init__(self, array: LeaseArray, *, is_read_only: bool) -> None:
        numbers = array.numbers
        self.__array_interface__ = {
            "version": 3,
            "typestr": numbers.type.typestr,
            "shape": numbers.shape,
            "strides": numbers.strides,
            "data": (array.address, is_read_only),
        }
        self._kept = array, array.lease.hold()


class LeaseArray:
    """An array over the numbers of one stored block, without a copy. Pass it to `numpy.asarray`, or to `from_dlpack` of
    NumPy, torch and JAX; for a block on a device, to `cupy.from_dlpack` and `cupy.asarray`.

    `dtype` is a name that NumPy or torch knows ("float16", "bfloat16", "float8_e4m3fn"); `strides` are bytes; `lease`
    owns the memory. Each array that a library makes of it defers the release of the lease until that array is freed.
    Once the lease has ended, a new array raises BufferError. torch can write to the array, and a write to a read-only
    mapping ends your process: clone the tensor first.
    """

    __slots__ = ("_held", "_memory", "address", "device", "lease", "numbers", "readonly")

    def __init__(
        self,
        numbers: Numbers,
        address: int,
        memory: object,
        lease: ArraySource,
        *,
        readonly: bool,
        device: int | None = None,
    ) -> None:
        """Describe the numbers of one payload. `address` is the address of the payload; `memory` keeps it mapped.
        `device` is a CUDA device, None for host memory."""
        self.numbers, self.address, self.device = numbers, address + numbers.offset, device
        self.lease, self.readonly = lease, readonly
        self._memory = memory
        self._held: object = None

    @property
    def dtype(self) -> str:
        return self.numbers.type.name

    @property
    def shape(self) -> tuple[int, ...]:
        return self.numbers.shape

    @property
    def strides(self) -> tuple[int, ...]:
        return self.numbers.strides

    def __dlpack_device__(self) -> tuple[int, int]:
        return (_HOST, 0) if self.device is None else (_CUDA, self.device)

    def __dlpack__(
        self,
        *,
        stream: object = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        """Return a DLPack capsule, versioned if `max_version` allows it. `stream` is ignored: a block is complete
        before it is leased. Raises BufferError once the lease has ended, and for a copy of an array on a device or to
        another device."""
        here = self.__dlpack_device__()
        if (dl_device is not None and tuple(dl_device) != here) or (copy and self.device is not None):
            raise BufferError(f"{self!r} is not copied by itself: take it where it is, and copy it by your library")
        is_versioned = _HAS_VERSIONS and max_version is not None and max_version[0] >= 1
        source = np.asarray(_Export(self, is_read_only=self.readonly and is_versioned))
        if is_versioned:
            capsule = source.__dlpack__(max_version=(1, 0), copy=copy)
            tensor = _Managed.from_address(_pointer(capsule, b"dltensor_versioned")).tensor
        else:
            capsule = (source.copy() if copy else source).__dlpack__()
            tensor = _Tensor.from_address(_pointer(capsule, b"dltensor"))
        tensor.type_code = self.numbers.type.dlpack
        tensor.device_type, tensor.device_id = here
        return capsule

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> npt.NDArray[Any]:
        """Return a NumPy array over the same memory. Numbers of a type that NumPy does not know become unsigned
        integers of their size, or numbers of `ml_dtypes` if it is installed. Raises TypeError for an array on a device.
        """
        if self.device is not None:
            raise TypeError(f"{self!r} is not in host memory: lease.payload(block) has a copy there")
        shown = np.asarray(_Export(self, is_read_only=self.readonly)).view(_numpy_type(self.numbers.type))
        return shown if dtype is None and not copy else np.array(shown, dtype=dtype, copy=copy)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """Return the description of an array on a device. After this call the object defers the release of the lease
        until it is freed. The description says that the array is writable, because torch insists on it, and names no
        stream, because a block is complete before it is leased. Raises AttributeError for an array in host memory."""
        if self.device is None:
            raise AttributeError("an array in host memory has no __cuda_array_interface__")
        self._held = self.lease.hold()
        return {
            "version": 3,
            "typestr": self.numbers.type.typestr,
            "shape": self.shape,
            "strides": self.strides,
            "data": (self.address, False),
            "stream": None,
        }

    def __repr__(self) -> str:
        where = "host memory" if self.device is None else f"CUDA device {self.device}"
        how = ", read-only" if self.readonly else ""
        return f"LeaseArray({self.dtype}{list(self.shape)} in {where}{how}, of {self.lease!r})"


@cache
def _numpy_type(number: NumberType) -> np.dtype[Any]:
    plain: np.dtype[Any] = np.dtype(number.typestr)
    if plain.name == number.name:
        return plain
    try:
        named: np.dtype[Any] = np.dtype(getattr(import_module("ml_dtypes"), number.name))
    except ImportError:
        return plain
    return named
