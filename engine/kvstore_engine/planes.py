"""The contract of a pool's memory: planes of K and V, and the copies in and out of them.

The caller guarantees that block ids are inside the pool, that payloads have the right size, and that no block is
written while it is read. When a method returns, its copy has been made, and a step that begins later sees it.
`HostPlanes` keeps them in this process's memory.
"""

import copy
import mmap
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Self

import numpy as np

from kvstore_engine.kernels.base import Bytes, Int32Array, Kernels


class PoolPlanes(ABC):
    """The memory of a K/V pool. `array` is uint8 [planes, blocks, block_bytes], a NumPy array or a tensor on a device.
    Each layer has two planes, one for K and one for V.
    """

    array: Any

    @abstractmethod
    def address(self, plane: int) -> int:
        """Return the memory address of plane number `plane`."""

    @abstractmethod
    def copy_blocks(self, payloads: Sequence[Bytes], tables: Int32Array, *, into_pool: bool, threads: int) -> None:
        """Copy storage blocks into the pool if `into_pool`, otherwise out of it, with `threads` threads. `payloads` is
        the memory of each storage block and `tables` its pool blocks; see `Kernels.copy_blocks`.
        """

    @abstractmethod
    def write_part(self, parts: Bytes, block_ids: Int32Array) -> None:
        """Write `parts`, uint8 [planes, n, block_bytes], to the pool blocks with the numbers `block_ids`."""

    @abstractmethod
    def move_blocks(self, sources: Int32Array, targets: Int32Array) -> None:
        """Copy pool block sources[i] over pool block targets[i] in every plane. No block may be both a source and a
        target.
        """


class HostPlanes(PoolPlanes):
    """The memory of a K/V pool in this process, copied by the processor. All its pages are in RAM from the start.
    `memory` allocates it, for example to share it with another process.
    """

    def __init__(
        self,
        count: int,
        blocks: int,
        block_bytes: int,
        kernels: Kernels,
        memory: Callable[[int], mmap.mmap | memoryview] | None = None,
    ) -> None:
        size = self.size_bytes(count, blocks, block_bytes)
        flat, stride = np.frombuffer((memory or touched_memory)(size), np.uint8), size // count
        self.kernels = kernels
        self.array: Bytes = flat.reshape(count, stride)[:, : blocks * block_bytes].reshape(count, blocks, block_bytes)

    @staticmethod
    def size_bytes(count: int, blocks: int, block_bytes: int) -> int:
        """Return the bytes of memory that `count` planes of `blocks` blocks take."""
        return count * (-(-blocks * block_bytes // 64) * 64)

    def part(self, first: int, end: int) -> Self:
        """Return the memory of the planes from number `first` to before `end` as an object of its own; nothing is
        copied.
        """
        part = copy.copy(self)
        part.array = self.array[first:end]
        return part

    def address(self, plane: int) -> int:
        return int(self.array.ctypes.data) + plane * self.array.strides[0]

    def copy_blocks(self, payloads: Sequence[Bytes], tables: Int32Array, *, into_pool: bool, threads: int) -> None:
        self.kernels.copy_blocks(self.array, payloads, tables, into_pool=into_pool, threads=threads)

    def write_part(self, parts: Bytes, block_ids: Int32Array) -> None:
        self.array[:, block_ids] = parts

    def move_blocks(self, sources: Int32Array, targets: Int32Array) -> None:
        self.kernels.move_blocks(self.array, sources, targets)


def touched_memory(size_bytes: int) -> mmap.mmap:
    """Return `size_bytes` of zeroed memory of this process, all of whose pages are in RAM already."""
    memory = mmap.mmap(-1, size_bytes)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    np.frombuffer(memory, np.uint8).fill(0)
    return memory
