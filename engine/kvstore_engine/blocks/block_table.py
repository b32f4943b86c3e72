"""The blocks of one sequence.

The module owns the ids and the trie nodes through which its leading blocks are shared. It does not allocate, count or
copy: only `space.BlockSpace` changes a block table. Invariants: block i holds positions [16i, 16i + 16), with blocks of
16 tokens; the first `len(nodes)` blocks belong to the nodes, a path from the tenant's root; the others are this
sequence's own, or shared with its forks.
"""

import numpy as np
import numpy.typing as npt

from kvstore_engine.blocks.trie import TrieNode

_FIRST_CAPACITY = 16


class BlockTable:
    """The blocks that a sequence of `tenant` holds."""

    __slots__ = ("_table", "count", "nodes", "tenant")

    def __init__(self, tenant: str) -> None:
        self.tenant = tenant
        self.nodes: list[TrieNode] = []
        self.count = 0
        self._table = np.empty(_FIRST_CAPACITY, np.int32)

    @property
    def ids(self) -> npt.NDArray[np.int32]:
        """Engine block ids, int32 [count]; a view that is valid until the next change of the table."""
        return self._table[: self.count]

    @property
    def blocks(self) -> list[int]:
        """The block ids as a list."""
        ids: list[int] = self.ids.tolist()
        return ids

    def append(self, blocks: list[int]) -> None:
        needed = self.count + len(blocks)
        if needed > len(self._table):
            larger = np.empty(max(needed, 2 * len(self._table)), np.int32)
            larger[: self.count] = self.ids
            self._table = larger
        self._table[self.count : needed] = blocks
        self.count = needed

    def replace(self, index: int, block: int) -> None:
        """Make `block` the block number `index`."""
        self.ids[index] = block

    def clear(self) -> None:
        self.nodes = []
        self.count = 0
