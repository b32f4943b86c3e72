"""numpy arrays over memory that another object owns.

The caller guarantees that the memory outlives the array: neither numpy nor ctypes holds on to it.
"""

import ctypes as ct
import math
from typing import TypeVar

import numpy as np
import numpy.typing as npt

Scalar = TypeVar("Scalar", bound=np.generic)


def array_at(address: int, dtype: type[Scalar], *shape: int) -> npt.NDArray[Scalar]:
    """Return a writable array of `shape` and `dtype` over the memory at `address`, which the caller keeps alive."""
    size_bytes = math.prod(shape) * np.dtype(dtype).itemsize
    raw = memoryview((ct.c_uint8 * size_bytes).from_address(address)).cast("B")
    return np.frombuffer(raw, dtype).reshape(shape)


def pointer_at(address: int) -> int:
    """Return the pointer that is stored at the memory address `address`. Raises ValueError if the stored pointer is
    null.
    """
    value = ct.c_void_p.from_address(address).value
    if value is None:
        raise ValueError(f"null pointer at {address:#x}")
    return value
