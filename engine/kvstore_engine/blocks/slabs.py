"""Blocks of several sizes out of one budget of memory.

Owns, for each class of blocks, planes of address space for as many as the whole budget would hold, and which slabs of
them are backed by memory. A slab is a run of neighbouring blocks; it gets memory when a block of it is first wanted,
and gives it back to the system when its last block is freed and another class wants the room. So what one class does
not need serves another, while a block keeps an address that is its number times its size, as kernels want it. The idea
of slabs is Bonwick's (1994); here address space is reserved rather than objects moved, because K/V blocks never move
by themselves.
Invariants: memory in use and in reserve never exceeds the limit; a slab without memory has no block given out.
"""

import mmap
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvstore_engine.free_list import FreeList, PoolExhausted

Bytes = npt.NDArray[np.uint8]
SLAB_BYTES = 2 << 20


@dataclass(frozen=True, slots=True)
class BlockClass:
    """Blocks that have `plane_bytes` in each of `planes` planes."""

    name: str
    planes: int
    plane_bytes: int

    @property
    def block_bytes(self) -> int:
        """All of a block."""
        return self.planes * self.plane_bytes


class SlabPool:
    """Blocks of the given classes, `limit_bytes` in all. ValueError for names that repeat or sizes that make none."""

    def __init__(self, classes: Sequence[BlockClass], limit_bytes: int, slab_bytes: int = SLAB_BYTES) -> None:
        if len({kind.name for kind in classes}) != len(classes):
            raise ValueError("two classes of blocks have one name")
        if limit_bytes < 0 or any(min(kind.planes, kind.plane_bytes) < 1 for kind in classes):
            raise ValueError("blocks need at least one plane of one byte, and a limit must not be negative")
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self._classes = {kind.name: _ClassSlabs(kind, limit_bytes, slab_bytes) for kind in classes}

    def planes(self, name: str) -> Bytes:
        """The class's memory, uint8 [planes, blocks, plane_bytes]; only blocks that are given out may be touched."""
        return self._classes[name].planes

    def available(self, name: str) -> int:
        """Blocks that `allocate` could give out now."""
        slabs = self._classes[name]
        idle = sum(other.idle_bytes for other in self._classes.values() if other is not slabs)
        return slabs.free.count + slabs.blocks_in(self.limit_bytes - self.used_bytes + idle)

    def used(self, name: str) -> int:
        """Blocks given out."""
        return self._classes[name].used

    def allocate(self, name: str, count: int, after: int | None = None) -> list[int]:
        """`count` blocks, as `FreeList.allocate`. PoolExhausted, and then nothing has changed."""
        if count > self.available(name):
            raise PoolExhausted(f"{count} blocks of class {name} wanted, {self.available(name)} can be had")
        slabs = self._classes[name]
        while slabs.free.count < count:
            if self.used_bytes + slabs.slab_bytes > self.limit_bytes:
                self._take_back(slabs)
            slabs.back_one()
            self.used_bytes += slabs.slab_bytes
        return slabs.allocate(count, after)

    def free(self, name: str, blocks: Sequence[int]) -> None:
        """Give blocks back. RuntimeError as `FreeList.free`."""
        self._classes[name].release(blocks)

    def trim(self) -> None:
        """Give the memory of all empty slabs back to the system."""
        for slabs in self._classes.values():
            while slabs.idle_bytes:
                self.used_bytes -= slabs.unback_one()

    def _take_back(self, wanting: "_ClassSlabs") -> None:
        """Empty slabs of other classes, until one of `wanting` fits."""
        for slabs in self._classes.values():
            while slabs is not wanting and slabs.idle_bytes:
                self.used_bytes -= slabs.unback_one()
                if self.used_bytes + wanting.slab_bytes <= self.limit_bytes:
                    return


class _ClassSlabs:
    """One class's planes and slabs."""

    def __init__(self, kind: BlockClass, limit_bytes: int, slab_bytes: int) -> None:
        self.slab_blocks = max(1, min(slab_bytes, limit_bytes) // kind.block_bytes)
        self.slab_bytes = self.slab_blocks * kind.block_bytes
        self._plane_slab_bytes = self.slab_blocks * kind.plane_bytes
        slabs = limit_bytes // self.slab_bytes
        blocks = slabs * self.slab_blocks
        page = mmap.PAGESIZE
        self._stride = max(1, -(-blocks * kind.plane_bytes // page)) * page
        # Private, so that pages which are given up are really free.
        self._memory = mmap.mmap(-1, kind.planes * self._stride, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        flat = np.frombuffer(self._memory, np.uint8).reshape(kind.planes, self._stride)
        self.planes: Bytes = flat[:, : blocks * kind.plane_bytes].reshape(kind.planes, blocks, kind.plane_bytes)
        self.free = FreeList(blocks)
        self.free.take(range(blocks))  # a block without memory cannot be given out
        self._given = np.zeros(slabs, np.int64)
        self._backed = np.zeros(slabs, np.bool_)

    @property
    def used(self) -> int:
        """Blocks given out."""
        return int(self._given.sum())

    @property
    def idle_bytes(self) -> int:
        """Memory of slabs of which no block is given out."""
        return int(np.count_nonzero(self._backed & (self._given == 0))) * self.slab_bytes

    def blocks_in(self, nbytes: int) -> int:
        """Blocks that slabs without memory would add, if `nbytes` were there for them."""
        unbacked = len(self._backed) - int(np.count_nonzero(self._backed))
        return min(nbytes // self.slab_bytes, unbacked) * self.slab_blocks

    def back_one(self) -> None:
        """The first slab without memory gets some."""
        slab = int(np.flatnonzero(~self._backed)[0])
        self._backed[slab] = True
        self.free.free(list(self._blocks(slab)))

    def unback_one(self) -> int:
        """The last empty slab loses its memory; how much that was."""
        slab = int(np.flatnonzero(self._backed & (self._given == 0))[-1])
        self._backed[slab] = False
        self.free.take(self._blocks(slab))
        page = mmap.PAGESIZE
        for plane in range(len(self.planes)):
            begin = plane * self._stride + slab * self._plane_slab_bytes
            first, last = -(-begin // page) * page, (begin + self._plane_slab_bytes) // page * page
            if last > first:
                self._memory.madvise(mmap.MADV_DONTNEED, first, last - first)
        return self.slab_bytes

    def allocate(self, count: int, after: int | None) -> list[int]:
        blocks = self.free.allocate(count, after)
        np.add.at(self._given, np.array(blocks, np.int64) // self.slab_blocks, 1)
        return blocks

    def release(self, blocks: Sequence[int]) -> None:
        self.free.free(blocks)
        np.add.at(self._given, np.array(blocks, np.int64) // self.slab_blocks, -1)

    def _blocks(self, slab: int) -> range:
        return range(slab * self.slab_blocks, (slab + 1) * self.slab_blocks)
