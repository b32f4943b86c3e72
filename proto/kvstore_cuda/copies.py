"""Copies in the form that the CUDA driver takes: neighbours merged into one, then all in one call if the driver has
batches.

A copy is a column of arrays, not an object: there are thousands, and each must cost far less than its bytes take on the
bus (32 KiB take 0.65 us at 50 GB/s). cuMemcpyBatchAsync of the driver's library gets these arrays directly;
cuda-bindings would make an object and a list entry of each number. Addresses are in mapped device memory or in
registered host memory.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import ModuleType
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from kvstore_cuda.driver import call, check

BATCH_VERSION = 13000  # of the driver: cuMemcpyBatchAsync in its present form
FIRST_BATCH_VERSION = 12080  # in its first one, which also says where it failed
Way = Literal["to device", "to host", "on device"]
Numbers = npt.NDArray[np.uint64]
_BATCH = "cuMemcpyBatchAsync"
_ANY, _SIZE = ctypes.c_void_p, ctypes.c_size_t
_BatchCall = ctypes.CFUNCTYPE(ctypes.c_int, _ANY, _ANY, _ANY, _SIZE, _ANY, _ANY, _SIZE, _ANY)
_FirstBatchCall = ctypes.CFUNCTYPE(ctypes.c_int, _ANY, _ANY, _ANY, _SIZE, _ANY, _ANY, _SIZE, _ANY, _ANY)


class CopyRun(NamedTuple):
    """One copy between memories: `nbytes` bytes from the address `source` to the address `to`."""

    to: int
    source: int
    nbytes: int


@dataclass(frozen=True, slots=True, eq=False)
class Runs:
    """A set of memory copies, without an order. `columns`, uint64[3, n], holds for each copy its destination address,
    its source address and its bytes.
    """

    columns: Numbers

    @classmethod
    def of(cls, rows: Iterable[CopyRun]) -> Runs:
        return cls(np.array(list(rows), np.uint64).reshape(-1, 3).T)

    @classmethod
    def joined(cls, parts: Sequence[Runs]) -> Runs:
        return cls(np.concatenate([part.columns for part in parts], axis=1)) if len(parts) != 1 else parts[0]

    @property
    def nbytes(self) -> Numbers:
        sizes: Numbers = self.columns[2]
        return sizes

    def __len__(self) -> int:
        count: int = self.columns.shape[1]
        return count

    def __getitem__(self, chosen: slice | npt.NDArray[Any]) -> Runs:
        """Return the copies that `chosen`, a slice, a mask or an array of positions, selects."""
        return Runs(self.columns[:, chosen])

    def rows(self) -> Iterator[CopyRun]:
        return map(CopyRun, *self.columns.tolist())

    def slices(self, nbytes: int) -> list[Runs]:
        """Split these copies, in order, into sets of at most `nbytes` bytes each, and return the sets. A copy of more
        bytes makes a set of its own.
        """
        parts, begin, ends = [], 0, np.cumsum(self.nbytes)
        while begin < len(self):
            before = int(ends[begin - 1]) if begin else 0
            end = max(begin + 1, int(np.searchsorted(ends, np.uint64(before + nbytes), "right")))
            parts.append(self[begin:end])
            begin = end
        return parts

    def merged(self) -> Runs:
        """Return these copies with neighbours merged into one copy: two copies are neighbours if the second continues
        both the source and the destination of the first. The driver does not merge them, and small copies are slow.
        """
        (merged,) = self.merged_groups((0, len(self)))
        return merged

    def merged_groups(self, bounds: Sequence[int]) -> list[Runs]:
        """Split these copies into groups and return the groups. Group i has the copies from position `bounds[i]` to the
        next bound. In each group, copies whose sources and destinations follow each other are merged into one.
        """
        columns, edges = self.columns, [bound - 1 for bound in bounds if 0 < bound < len(self)]
        steps = columns[:2, 1:] - columns[:2, :-1]
        is_back = steps[0].view(np.int64) < 0
        is_back[edges] = False
        if np.count_nonzero(is_back):
            groups = np.repeat(np.arange(len(bounds) - 1), np.diff(bounds))
            columns = columns[:, np.lexsort((columns[0], groups))]
            steps = columns[:2, 1:] - columns[:2, :-1]
        are_next = steps == columns[2, :-1]
        is_next = are_next[0] & are_next[1]
        is_next[edges] = False
        if np.count_nonzero(is_next):
            first = np.flatnonzero(np.concatenate(([True], ~is_next)))
            merged = columns[:, first]
            merged[2] = np.add.reduceat(columns[2], first)
            columns, bounds = merged, np.searchsorted(first, bounds).tolist()
        return [Runs(columns[:, begin:end]) for begin, end in pairwise(bounds)]


class CopyQueue:
    """A caller of the CUDA driver's functions for asynchronous copies. It uses one call for many copies if the driver
    has that function. `cuda` is the driver's Python module. Raises DriverError.
    """

    def __init__(self, cuda: ModuleType) -> None:
        self._cuda = cuda
        self._batch: Any = None
        version = call(cuda, "cuDriverGetVersion")
        if version >= FIRST_BATCH_VERSION:
            is_first = version < BATCH_VERSION
            form = FIRST_BATCH_VERSION if is_first else BATCH_VERSION
            address, _ = call(cuda, "cuGetProcAddress", _BATCH.encode(), form, 0)
            self._batch = (_FirstBatchCall if is_first else _BatchCall)(int(address))
            self._attributes = cuda.CUmemcpyAttributes()
            self._attributes.srcAccessOrder = cuda.CUmemcpySrcAccessOrder.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
            self._first = ctypes.c_size_t(0)  # these attributes are of all copies from the first on
            self._failed = ctypes.c_size_t(0)
            failed = (ctypes.addressof(self._failed),) if is_first else ()
            self._which = self._attributes.getPtr(), ctypes.addressof(self._first), 1, *failed

    def add(self, runs: Runs, way: Way, stream: Any) -> None:
        """Queue the copies of `runs` on the CUDA stream `stream`; they may run in any order. `way` is their direction:
        "to device", "to host" or "on device". Raises DriverError.
        """
        if self._batch is not None and len(runs) > 1:
            columns = np.ascontiguousarray(runs.columns, np.uint64)
            to, each = columns.__array_interface__["data"][0], columns.strides[0]
            code = self._batch(to, to + each, to + 2 * each, len(runs), *self._which, int(stream))
            check(self._cuda, _BATCH, code)
            return
        cuda = self._cuda
        for run in runs.rows():
            if way == "to device":
                call(cuda, "cuMemcpyHtoDAsync", cuda.CUdeviceptr(run.to), run.source, run.nbytes, stream)
            elif way == "to host":
                call(cuda, "cuMemcpyDtoHAsync", run.to, cuda.CUdeviceptr(run.source), run.nbytes, stream)
            else:
                ends = cuda.CUdeviceptr(run.to), cuda.CUdeviceptr(run.source)
                call(cuda, "cuMemcpyDtoDAsync", *ends, run.nbytes, stream)
