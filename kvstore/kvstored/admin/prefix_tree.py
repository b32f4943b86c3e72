"""The stored chains as a tree for operators: a node is a run of blocks between two places where chains part.

The module only reads, in slices; it works on copies of the index's columns, so that a tree is of one shape although
blocks come and go meanwhile. It keeps nothing, and names the nodes with the most bytes only.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvstored.store.blocks import Residency
from kvstored.store.blocks.listing import Selection, column_of, select_all
from kvstored.tier_set import holding

SLICE_ROWS = 100_000  # of parents followed between two turns of the loop
SLICE_LEVELS = 64
BLOCKS, PAYLOAD, ACCESSES, SLOTS = range(4)  # columns of the sums; one of slots for each tier

Int64Array = npt.NDArray[np.int64]
RowArray = npt.NDArray[np.int32]


@dataclass
class PrefixNode:
    """A node of the tree. `first_row` and `last_row` are the ends of its run of `own_blocks` blocks, and `above` is the
    last row of the node that it continues, or -1. `branches` nodes continue it. All else is summed over the node and
    what continues it: `slot_bytes` by tier, `last_ns` the latest use, `longest` the blocks of the longest chain."""

    first_row: int
    last_row: int
    above: int
    own_blocks: int
    branches: int
    blocks: int
    payload_bytes: int
    accesses: int
    slot_bytes: list[int]
    last_ns: int
    longest: int


class PrefixTree:
    """The tree of the chains that `selection` selects blocks of. `find` builds it; then `largest` lists its nodes."""

    def __init__(self, residency: Residency, selection: Selection) -> None:
        self._residency, self._selection = residency, selection
        columns = residency.rows
        self.generation = np.array(columns.generation)
        self._parent, self._links = np.array(columns.parent, np.int32), np.array(columns.links)
        self._depth = np.array(columns.depth)
        is_held = np.frombuffer(columns.mask, np.uint8) | np.frombuffer(columns.filling, np.uint8)
        self._is_live = (is_held != 0) | (self._links > 0)

    async def find(self) -> None:
        parent, links = self._parent, self._links
        await asyncio.sleep(0)
        is_head = (parent < 0) | (links[parent] != 1) | ~self._is_live  # rows out of use stand alone
        own = np.arange(len(parent), dtype=np.int32)
        heads = np.where(is_head, own, parent).astype(np.int32)
        await follow(heads)
        await asyncio.to_thread(self._number, is_head, heads)
        await self._sum()
        await self._add_up()

    def _number(self, is_head: npt.NDArray[np.bool_], heads: RowArray) -> None:
        """Give each head's run a number, and find its ends and the run above it."""
        parent, own = self._parent, np.arange(len(heads), dtype=np.int32)
        self._firsts: RowArray = own[is_head]
        number = np.zeros(len(parent), np.int32)  # of the node of each head
        number[self._firsts] = np.arange(len(self._firsts))
        self._node = number[heads]
        above = parent[self._firsts]
        self._above = np.where(above < 0, -1, self._node[above])
        self._lasts = self._firsts.copy()
        ends = np.flatnonzero(self._links != 1)
        self._lasts[self._node[ends]] = ends

    async def _sum(self) -> None:
        residency, nodes = self._residency, len(self._firsts)
        self._sums = np.zeros((nodes, SLOTS + len(residency.copies)), np.int64)
        self._last_ns, self._longest = np.zeros(nodes, np.int64), np.zeros(nodes, np.int64)
        async for rows in select_all(residency, self._selection):
            rows = rows[rows < len(self._node)]  # those behind came later
            mask = np.frombuffer(residency.rows.mask, np.uint8)[rows]
            slots = (
                np.where(holding(mask, tier), np.asarray(copies.nbytes)[rows].astype(np.int64), 0)
                for tier, copies in enumerate(residency.copies)
            )
            values = [
                np.ones(len(rows), np.int64), column_of(residency, "payload_bytes", rows),
                column_of(residency, "accesses", rows), *slots,
            ]  # fmt: skip
            place = self._node[rows]
            np.add.at(self._sums, place, np.stack(values, axis=1))
            np.maximum.at(self._last_ns, place, column_of(residency, "last_access_ns", rows))
            np.maximum.at(self._longest, place, self._depth[rows].astype(np.int64) + 1)

    async def _add_up(self) -> None:
        """Add each node to the one above it, the deepest first: what continues a node begins behind it."""
        self._own = self._sums[:, BLOCKS].copy()
        depth, above = self._depth[self._firsts], self._above
        order = await asyncio.to_thread(np.argsort, -depth.astype(np.int64), kind="stable")
        order = order[above[order] >= 0]
        cuts = np.flatnonzero(np.diff(depth[order])) + 1
        for number, level in enumerate(np.split(order, cuts)):
            np.add.at(self._sums, above[level], self._sums[level])
            np.maximum.at(self._last_ns, above[level], self._last_ns[level])
            np.maximum.at(self._longest, above[level], self._longest[level])
            if number % SLICE_LEVELS == 0:
                await asyncio.sleep(0)
        self._is_stored = self._sums[:, BLOCKS] > 0

    @property
    def nodes(self) -> int:
        """The number of nodes with selected blocks, in them or behind them."""
        return int(np.count_nonzero(self._is_stored))

    @property
    def roots(self) -> Int64Array:
        return np.flatnonzero(self._is_stored & (self._above < 0))

    def total(self, column: int) -> int:
        """Return the sum of a column of the sums (`BLOCKS`, `PAYLOAD`, …) over all chains."""
        return int(self._sums[self.roots, column].sum())

    def largest(self, limit: int) -> Iterator[PrefixNode]:
        """Yield up to `limit` nodes, those with the most payload bytes behind them, each after the one above it."""
        size = self._sums[:, PAYLOAD]
        below = np.flatnonzero(self._is_stored & (self._above >= 0))
        below = below[np.argsort(self._above[below], kind="stable")]
        owners = self._above[below]
        roots = self.roots
        if len(roots) > limit:
            roots = roots[np.argpartition(-size[roots], limit)[:limit]]
        waiting = [(-int(size[node]), int(node)) for node in roots]
        heapq.heapify(waiting)
        while waiting and limit:
            _, node = heapq.heappop(waiting)
            first, end = np.searchsorted(owners, node), np.searchsorted(owners, node, "right")
            yield self._described(node, int(end - first))
            limit -= 1
            following = below[first:end]
            if len(following) > limit:
                following = following[np.argsort(-size[following], kind="stable")[:limit]]
            for each in following.tolist():
                heapq.heappush(waiting, (-int(size[each]), each))

    def _described(self, node: int, branches: int) -> PrefixNode:
        sums, above = self._sums[node].tolist(), int(self._above[node])
        return PrefixNode(
            int(self._firsts[node]), int(self._lasts[node]), int(self._lasts[above]) if above >= 0 else -1,
            int(self._own[node]), branches, sums[BLOCKS], sums[PAYLOAD], sums[ACCESSES], sums[SLOTS:],
            int(self._last_ns[node]), int(self._longest[node]),
        )  # fmt: skip


async def follow(heads: RowArray) -> None:
    """Let each row of `heads`, which names itself or a row before it in its chain, name the first row that is reached
    so. It works in slices."""
    changed = True
    while changed:  # each round doubles how far a row looks up its chain
        changed = False
        for first in range(0, len(heads), SLICE_ROWS):
            part = heads[first : first + SLICE_ROWS]
            further = heads[part]
            changed = changed or bool((further != part).any())
            heads[first : first + SLICE_ROWS] = further
            await asyncio.sleep(0)
