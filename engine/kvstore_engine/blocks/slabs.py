"""Equal blocks of memory, backed by slabs as they are needed.

Owns address space for as many blocks as the limit allows, and which slabs of it are backed. A slab is a run of
neighbouring blocks (Bonwick, 1994). It gets memory when one of its blocks is first allocated; `trim` returns the memory
of empty slabs to the system.
Invariants: backed memory never exceeds the limit; a slab without memory has no allocated block.
"""

import mmap
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvstore_engine.free_list import FreeList, PoolExhausted

SLAB_BYTES = 8 << 20


class Slabs:
    """Blocks of `block_bytes`, in slabs of about `slab_bytes`, `limit_bytes` in all. ValueError for sizes below 1."""

    def __init__(self, block_bytes: int, limit_bytes: int, slab_bytes: int = SLAB_BYTES) -> None:
        if block_bytes < 1 or limit_bytes < 0:
            raise ValueError("blocks need at least one byte, and a limit must not be negative")
        self._slab_blocks = max(1, min(slab_bytes, limit_bytes) // block_bytes)
        self.slab_bytes = self._slab_blocks * block_bytes
        slabs = limit_bytes // self.slab_bytes
        blocks = slabs * self._slab_blocks
        # Private, so that discarded pages are really free.
        self._map = mmap.mmap(-1, max(1, blocks * block_bytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory = np.frombuffer(self._map, np.uint8)[: blocks * block_bytes]
        # uint8 [blocks, block_bytes]; only allocated blocks may be touched.
        self.memory: npt.NDArray[np.uint8] = memory.reshape(blocks, block_bytes)
        self._free = FreeList(blocks)
        self._free.take(range(blocks))  # a block without memory cannot be allocated
        self._allocated = np.zeros(slabs, np.int64)
        self._backed = np.zeros(slabs, np.bool_)

    @property
    def used(self) -> int:
        """Allocated blocks."""
        return int(self._allocated.sum())

    @property
    def available(self) -> int:
        """Blocks that can be allocated now."""
        return len(self.memory) - self.used

    @property
    def backed_bytes(self) -> int:
        """Memory of slabs that have some."""
        return int(np.count_nonzero(self._backed)) * self.slab_bytes

    def allocate(self, count: int) -> list[int]:
        """`count` blocks, as `FreeList.allocate`. PoolExhausted, and then nothing has changed."""
        if count > self.available:
            raise PoolExhausted(f"{count} blocks wanted, {self.available} are available")
        while self._free.count < count:
            slab = int(np.flatnonzero(~self._backed)[0])
            self._backed[slab] = True
            self._free.free(list(self._blocks(slab)))
        blocks = self._free.allocate(count)
        np.add.at(self._allocated, np.array(blocks, np.int64) // self._slab_blocks, 1)
        return blocks

    def free(self, blocks: Sequence[int]) -> None:
        """Free blocks. RuntimeError as `FreeList.free`."""
        self._free.free(blocks)
        np.add.at(self._allocated, np.array(blocks, np.int64) // self._slab_blocks, -1)

    def trim(self) -> None:
        """Return the memory of all empty slabs to the system."""
        page = mmap.PAGESIZE
        for slab in np.flatnonzero(self._backed & (self._allocated == 0)).tolist():
            self._backed[slab] = False
            self._free.take(self._blocks(slab))
            begin = slab * self.slab_bytes
            first, last = -(-begin // page) * page, (begin + self.slab_bytes) // page * page
            if last > first:
                self._map.madvise(mmap.MADV_DONTNEED, first, last - first)

    def _blocks(self, slab: int) -> range:
        return range(slab * self._slab_blocks, (slab + 1) * self._slab_blocks)
