"""The blocks of one sequence.

The module owns the ids and the trie nodes through which its leading blocks are shared. It does not allocate, count or
copy: only `space.BlockSpace` changes a block table. Invariants: block i holds positions [16i, 16i + 16), with blocks of
16 tokens; the first `len(nodes)` blocks belong to the nodes, a path from the tenant's root; the others are this
sequence's own, or shared with its forks. `windows` has the blocks of windowed layers by their numbers, those from
`window_first` on for this sequence alone to give up (`windows.WindowBlocks`).
"""

import numpy as np
import numpy.typing as npt

from kvstore_engine.blocks.trie import TrieNode

_FIRST_CAPACITY = 16


class BlockTable:
    """The list of pool blocks that one sequence of `tenant` holds, in the order of its tokens. The first of them are
    shared through `nodes` of the prefix trie (the index of shared prefixes). `windows` has the pool blocks of layers
    with a sliding window, by their place in the table.
    """

    __slots__ = ("_table", "count", "nodes", "tenant", "window_first", "windows")

    def __init__(self, tenant: str) -> None:
        self.tenant = tenant
        self.nodes: list[TrieNode] = []
        self.count = 0
        self.windows: dict[int, int] = {}
        self.window_first = 0
        self._table = np.empty(_FIRST_CAPACITY, np.int32)

    @property
    def ids(self) -> npt.NDArray[np.int32]:
        """The numbers of the pool blocks in this table, int32 [count]. The array is a view that is valid until the
        table changes.
        """
        return self._table[: self.count]

    @property
    def blocks(self) -> list[int]:
        """The numbers of the pool blocks in this table, as a list."""
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
        """Put the pool block `block` at the place number `index` of this sequence's table."""
        self.ids[index] = block

    def window_ids(self) -> npt.NDArray[np.int32]:
        """Return the pool blocks of layers with a sliding window, int32 [count], one for each place of the table. A
        place that has no such block has 0.
        """
        ids = np.zeros(self.count, np.int32)
        ids[list(self.windows)] = list(self.windows.values())
        return ids

    def clear(self) -> None:
        self.nodes, self.windows, self.window_first = [], {}, 0
        self.count = 0
