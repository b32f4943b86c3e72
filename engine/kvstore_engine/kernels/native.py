"""The compiled kernels, through ctypes. ctypes releases the GIL for the length of each call."""

import ctypes as ct
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from kvstore_engine.kernels.base import Bytes, Int32Array, Kernels


class NativeKernels(Kernels):
    """paged_attention.cpp and block_copy.cpp, as built by `build.build_kernels`."""

    name = "cpp"

    def __init__(self, library: Path) -> None:
        """Load `library`. Raises OSError if it cannot be loaded."""
        self._library = ct.CDLL(str(library), mode=ct.RTLD_LOCAL)
        self._copy = self._library.kv_copy_blocks
        self._copy.restype = None
        self._copy.argtypes = [ct.c_void_p] * 3 + [ct.c_int64] * 4 + [ct.c_int32] * 2

    @property
    def attention_address(self) -> int:
        address = ct.cast(self._library.kv_paged_attention, ct.c_void_p).value
        assert address is not None
        return address

    def copy_blocks(
        self,
        planes: Bytes,
        payloads: Sequence[Bytes],
        tables: Int32Array,
        *,
        into_pool: bool,
        threads: int = 1,
    ) -> None:
        plane_count, _, block_bytes = planes.shape
        stride = planes.strides[0]
        plane_addresses = planes.ctypes.data + stride * np.arange(plane_count, dtype=np.int64)
        payload_addresses = np.array([payload.ctypes.data for payload in payloads], np.int64)
        tables = np.ascontiguousarray(tables, np.int32)
        self._copy(
            plane_addresses.ctypes.data,
            payload_addresses.ctypes.data,
            tables.ctypes.data,
            plane_count,
            len(payloads),
            tables.shape[1],
            block_bytes,
            int(into_pool),
            threads,
        )
