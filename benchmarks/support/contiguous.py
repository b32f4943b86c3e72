"""A cache in which the blocks of a sequence follow each other, as without paging: the other side of `inter_token`.

A new sequence begins in the middle of the largest hole, so that it and its neighbour can grow. One that meets its
neighbour moves to the largest hole; where no hole is large enough, all sequences move together. The engine around it
is the same, and so are the kernels, which read a table of consecutive blocks. Prefixes are not shared.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np

from kvstore_engine.blocks.block_table import BlockTable
from kvstore_engine.blocks.space import BlockSpace, Int32Array
from kvstore_engine.blocks.trie import TrieNode
from kvstore_engine.free_list import free_runs
from kvstore_engine.pool import BlockPool, PoolExhausted


class ContiguousSpace(BlockSpace):
    """The allocator of the K/V blocks of `pool` for sequences that lie in one piece. `moved` counts the blocks that
    `_move` has copied for that; `moves` has of each move when it ended, by `clock`, and how long it took.
    """

    def __init__(
        self, pool: BlockPool, *, sharing: bool = True, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        super().__init__(pool, sharing=False)
        self.tables: set[BlockTable] = set()
        self.moved = 0
        self.moves: list[tuple[float, float]] = []
        self._clock = clock

    def gaps_without_moves(self, at_s: Sequence[float]) -> list[float]:
        """Return the seconds between neighbours in the times `at_s`, without the seconds of moves."""
        ends, seconds = np.array(self.moves or [(0.0, 0.0)]).T
        before = np.concatenate(([0.0], np.cumsum(seconds)))[np.searchsorted(ends, at_s, side="right")]
        gaps: list[float] = np.diff(np.asarray(at_s) - before).tolist()
        return gaps

    def claim(self, tenant: str, tokens: Int32Array) -> BlockTable:
        table = super().claim(tenant, tokens)
        self.tables.add(table)
        return table

    def reclaim(self, tenant: str, tokens: Int32Array, path: list[TrieNode], exact: int) -> tuple[BlockTable, int]:
        table, kept = super().reclaim(tenant, tokens, path, exact)
        self.tables.add(table)
        return table, kept

    def release(self, table: BlockTable) -> None:
        super().release(table)
        self.tables.discard(table)

    def allocate(self, count: int, after: int | None = None) -> list[int]:
        return self.references.take(range(first := self._hole(count, count), first + count))

    def extend(self, table: BlockTable, tokens: int) -> None:
        missing = self.blocks_for(tokens) - table.count
        if missing <= 0:
            return
        if not self._has_room(table, missing):
            self._move(table, self._hole(table.count + missing, missing))
        first = int(table.ids[-1]) + 1
        table.append(self.references.take(range(first, first + missing)))

    def _has_room(self, table: BlockTable, missing: int) -> bool:
        first = int(table.ids[-1]) + 1
        free = self.pool.free_flags[first : first + missing]
        return len(free) == missing and bool(free.all())

    def _hole(self, count: int, missing: int) -> int:
        """Return the first of `count` free places in the middle of the largest hole. `missing` more blocks must be free
        in all. Raises PoolExhausted if that cannot be had even when all sequences have moved together.
        """
        if missing > self.references.free_blocks:
            raise PoolExhausted(f"{missing} blocks wanted, {self.references.free_blocks} are free")
        for is_last in (False, True):
            starts, lengths = free_runs(self.pool.free_flags)
            largest = int(np.argmax(lengths)) if len(lengths) else 0
            if len(lengths) and lengths[largest] >= count:
                return int(starts[largest]) + (int(lengths[largest]) - count) // 2
            if not is_last:
                self._gather()
        raise PoolExhausted(f"{count} blocks in one piece wanted, the largest hole is smaller")

    def _gather(self) -> None:
        """Move all sequences together at the beginning of the pool."""
        end = 0
        for table in sorted((each for each in self.tables if each.count), key=lambda each: int(each.ids[0])):
            self._move(table, end)
            end += table.count

    def _move(self, table: BlockTable, target: int) -> None:
        """Move `table` to the places from `target` on, which are free or its own."""
        shift = int(table.ids[0]) - target
        if not shift:
            return
        begin_s = self._clock()
        piece = abs(shift) if shift > 0 else table.count  # a move to the left may overlap: in pieces it does not
        for first in range(0, table.count, piece):
            sources = table.blocks[first : first + piece]
            targets = self.references.take([source - shift for source in sources])
            self.moved += len(sources)
            self.pool.copy_blocks(sources, targets)
            for offset, block in enumerate(targets):
                self.relocate(table, first + offset, block)
        end_s = self._clock()
        self.moves.append((end_s, end_s - begin_s))
