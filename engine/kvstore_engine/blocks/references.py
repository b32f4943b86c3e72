"""The counts of holders of a pool's blocks."""

from collections.abc import Iterable, Sequence

import numpy as np

from kvstore_engine.pool import BlockPool


class BlockReferences:
    """The counts of holders (sequences, trie nodes and pending puts) of each block of `pool`. Blocks are allocated and
    freed through it alone: a block is free exactly while it has no holder.
    """

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self._counts = np.zeros(pool.blocks, np.int32)
        self.free_blocks = pool.free_blocks  # without a holder

    def allocate(self, count: int, after: int | None = None) -> list[int]:
        """Allocate `count` blocks with one holder each, if possible right after the pool block `after`, and return
        their numbers. Raises PoolExhausted, with none allocated, if too few are free.
        """
        blocks = self.pool.allocate(count, after)
        self._counts[blocks] = 1
        self.free_blocks -= len(blocks)
        return blocks

    def take(self, blocks: Sequence[int]) -> list[int]:
        """Allocate exactly the free blocks `blocks` with one holder each, and return their numbers."""
        taken = self.pool.take(blocks)
        self._counts[taken] = 1
        self.free_blocks -= len(taken)
        return taken

    def count(self, block: int) -> int:
        """Return the number of holders of `block`."""
        return int(self._counts[block])

    def share(self, block: int) -> None:
        """Add a holder to the allocated `block`. Raises RuntimeError if it is free."""
        if self._counts[block] < 1:
            raise RuntimeError(f"share: block {block} is free")
        self._counts[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Remove one holder of each of `blocks`; a block without a holder becomes free. Raises RuntimeError if one is
        free already.
        """
        freed = []
        for block in blocks:
            left = int(self._counts[block]) - 1
            if left < 0:
                raise RuntimeError(f"release: block {block} is free already")
            self._counts[block] = left
            if not left:
                freed.append(block)
        self.pool.free(freed)
        self.free_blocks += len(freed)
