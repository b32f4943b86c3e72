"""Copies sequences' blocks out of the pool to host memory, and back.

The module owns the memory beside the pool, and the record of a swapped sequence. It does not decide which sequence is
swapped. Empty memory is returned to the system once it has been unused for a while: when blocks are short, one swap
follows another, and first writes to fresh memory take five times as long as the copy. Swapped-in K/V have their former
bits: a block that stayed in the trie is used again; one that was evicted and computed again by another sequence is not,
since recomputing may round differently.
"""

import mmap
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvstore_engine.blocks.block_table import BlockTable
from kvstore_engine.blocks.space import BlockSpace
from kvstore_engine.blocks.transfers import count_runs, split_runs
from kvstore_engine.blocks.trie import TrieNode
from kvstore_engine.free_list import FreeList, PoolExhausted
from kvstore_engine.pool import BlockPool

Int32Array = npt.NDArray[np.int32]
SLAB_BYTES = 8 << 20
_PATIENCE = 32


class Slabs:
    """An allocator of blocks of `block_bytes` bytes in host memory, at most `limit_bytes` bytes in all. It takes memory
    from the system in slabs (pieces of about `slab_bytes` bytes) when they are needed; `trim` returns slabs without
    blocks. Raises ValueError for sizes below 1.
    """

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
        """The number of allocated blocks."""
        return int(self._allocated.sum())

    @property
    def available(self) -> int:
        """The number of blocks that can be allocated now."""
        return len(self.memory) - self.used

    @property
    def backed_bytes(self) -> int:
        """The bytes of the slabs (pieces of memory for several blocks) that are taken from the system at present."""
        return int(np.count_nonzero(self._backed)) * self.slab_bytes

    def allocate(self, count: int) -> list[int]:
        """Return the numbers of `count` free blocks, as close together as possible. Raises PoolExhausted, with nothing
        changed, if there are too few.
        """
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
        """Free the blocks with the numbers `blocks`. Raises RuntimeError if one is free already."""
        self._free.free(blocks)
        np.add.at(self._allocated, np.array(blocks, np.int64) // self._slab_blocks, -1)

    def trim(self) -> None:
        """Return the memory of all slabs (pieces for several blocks) in which no block is allocated to the system."""
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


class HostPoolFull(RuntimeError):
    """An error: the host pool has too little room for the sequence that should be swapped out."""


class HostPool:
    """Host memory, at most `limit_bytes` bytes, to which blocks of `pool` are copied when a sequence is swapped out."""

    def __init__(self, pool: BlockPool, limit_bytes: int) -> None:
        self._pool = pool
        self.block_bytes = pool.payload_bytes(1)
        self._slabs = Slabs(self.block_bytes, limit_bytes)
        self._unused_calls = 0

    @property
    def free_blocks(self) -> int:
        """The number of further pool blocks that can be saved in this host memory."""
        return self._slabs.available

    @property
    def resident_bytes(self) -> int:
        """The bytes of system memory that this pool takes at present."""
        return self._slabs.backed_bytes

    @property
    def used_blocks(self) -> int:
        """The number of pool blocks that are saved in this host memory."""
        return self._slabs.used

    def save(self, blocks: list[int]) -> list[int]:
        """Copy the pool blocks with the numbers `blocks` to host memory, and return their places there. Raises
        HostPoolFull, with nothing copied, if there is too little room.
        """
        try:
            places = self._slabs.allocate(len(blocks))
        except PoolExhausted as error:
            raise HostPoolFull(str(error)) from None
        self._unused_calls = 0
        done = 0
        for first, count in split_runs(places):
            self._pool.gather_block(blocks[done : done + count], self._view(first, count))
            done += count
        return places

    def load(self, places: list[int], skip: int, blocks: list[int]) -> None:
        """Copy the blocks that `save` put at `places`, without the first `skip` of them, into the pool blocks `blocks`.
        The places stay allocated.
        """
        # A run of places was written as one payload, plane by plane, so it is read as one, without its head.
        done = 0
        for first, count in split_runs(places):
            kept = min(max(skip - done, 0), count)
            targets = blocks[done + kept - skip : done + count - skip]
            if targets:
                self._pool.scatter_part(self._view(first, count), kept, targets)
            done += count

    def free(self, places: list[int]) -> None:
        """Free the `places` that `save` returned. The blocks saved there are lost."""
        self._slabs.free(places)

    def trim_if_unused(self) -> None:
        """Return memory without saved blocks to the system, if no block was saved during the last 32 calls of this
        method.
        """
        self._unused_calls += 1
        if self._unused_calls >= _PATIENCE:
            self.trim()

    def trim(self) -> None:
        """Return all memory without saved blocks to the system."""
        self._slabs.trim()

    def _view(self, first: int, count: int) -> npt.NDArray[np.uint8]:
        return self._slabs.memory[first : first + count].reshape(-1)


@dataclass(frozen=True, slots=True)
class SwappedBlocks:
    """A record of a sequence whose blocks were copied to host memory: the K/V of its first `computed` tokens are at
    `places` of the host pool. `path` lists the nodes of the prefix trie that it held; `runs` counts the contiguous
    pieces that were copied. Only the first `exact` tokens may be shared.
    """

    tenant: str
    computed: int
    exact: int
    places: list[int]
    path: list[TrieNode]
    runs: int
    nbytes: int


def swap_out(space: BlockSpace, host: HostPool, table: BlockTable, computed: int, exact: int) -> SwappedBlocks:
    """Copy the blocks with the first `computed` tokens of `table` to `host`, release the table, and return a record for
    `swap_in`, which shares the first `exact` tokens again. Raises HostPoolFull with nothing changed.
    """
    blocks, path = table.blocks[: space.blocks_for(computed)], table.nodes[: computed // space.block_tokens]
    places = host.save(blocks)
    space.release(table)
    runs, nbytes = count_runs(blocks), len(blocks) * host.block_bytes
    return SwappedBlocks(table.tenant, computed, exact, places, path, runs, nbytes)


def swap_in(space: BlockSpace, host: HostPool, swapped: SwappedBlocks, tokens: Int32Array) -> tuple[BlockTable, int]:
    """Give a swapped-out sequence blocks of the pool again, copy its K/V back from `host` and free its places there.
    `swapped` is the record of `swap_out`, `tokens` are the sequence's tokens. Return its new block table and the number
    of copied blocks; blocks that are still in the prefix trie are not copied. Raises PoolExhausted with nothing
    changed.
    """
    block_table, kept = space.reclaim(swapped.tenant, tokens, swapped.path, swapped.exact)
    targets = block_table.blocks[kept : len(swapped.places)]
    if targets:
        host.load(swapped.places, kept, targets)
    host.free(swapped.places)
    for node in block_table.nodes[kept:]:
        node.ready = True
    return block_table, len(targets)
