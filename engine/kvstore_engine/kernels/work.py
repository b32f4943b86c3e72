"""Cuts a step's attention into work items that threads take one by one.

Owns where tiles of queries and parts of contexts end. It never touches K or V, and no result depends on what it
decides: kernels merge the parts of a context in an order that positions alone fix.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Int32Array = npt.NDArray[np.int32]

ROWS_PER_ITEM = 48  # kRows of paged_attention.cpp: one pass of the kernel
SPAN_TOKENS = 256  # kSpanKeys of layout.h: the least that a context is cut into
ITEM_FIELDS = 12  # struct Item of layout.h
_ITEMS_PER_THREAD = 4  # a tile that is more than this part of a thread's share is worth cutting


class WorkPlan(NamedTuple):
    """`items` int32 [n, ITEM_FIELDS] (struct Item), the costliest first, and what split ones need."""

    items: Int32Array
    split_tiles: int
    partial_rows: int


def plan_work(sequences: Int32Array, *, kv_heads: int, group: int, threads: int) -> WorkPlan:
    """Items for `sequences`, int32 [n, 4]: first row, rows, context after them, unused.

    A tile of queries sees the context up to its last query. One tile and K/V head is one item, unless that is so
    much of the step that threads would wait for it: then its spans are shared out. Costliest first keeps the
    threads level at the end of a layer.
    """
    per_tile = max(1, ROWS_PER_ITEM // group)
    tiles = [
        (index, first, min(per_tile, rows - first), min(context, context - rows + first + per_tile))
        for index, (_, rows, context, _) in enumerate(sequences.tolist())
        for first in range(0, rows, per_tile)
    ]
    costs = [queries * seen for _, _, queries, seen in tiles]
    share = max(1, sum(costs) * kv_heads // (threads * _ITEMS_PER_THREAD))
    items: list[tuple[int, ...]] = []
    split_tiles = partial_rows = 0
    for (index, first, queries, seen), cost in zip(tiles, costs, strict=True):
        spans = -(-seen // SPAN_TOKENS)
        parts = min(spans, -(-cost // share)) if threads > 1 else 1
        length = -(-spans // parts)
        starts = range(0, spans, length)
        for head in range(kv_heads):
            if len(starts) == 1:
                items.append((cost, index, head, first, queries, 0, 0, 0, 0, 0, 0))
                continue
            for start in starts:
                end = min(start + length, spans)
                part = (start, end, len(starts), split_tiles, partial_rows, spans)
                items.append((cost * (end - start) // spans, index, head, first, queries, *part))
            split_tiles += 1
            partial_rows += spans * queries * group
    items.sort(key=lambda item: -item[0])
    table = np.zeros((len(items), ITEM_FIELDS), np.int32)
    table[:, : len(items[0]) - 1] = [item[1:] for item in items]
    return WorkPlan(table, split_tiles, partial_rows)
