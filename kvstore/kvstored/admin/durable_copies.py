"""Durable copies on NVMe of blocks that are only in DRAM, made before an operator removes the DRAM copy.

The module asks write-back in portions, because a lane's queue is bounded and refuses more. It drops nothing.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvstored.store.blocks import Residency
from kvstored.store.blocks.listing import tokens_of
from kvstored.store.blocks.orphans import Tokens
from kvstored.store.blocks.rows import ROW_BITS, as_array
from kvstored.store.transfer.writeback import WriteBack
from kvstored.tier_set import holding

PORTION_BLOCKS = 256
SLICE_ROWS = 20_000  # looked at between two looks at the loop: about 0.2 ms
SLICE_TOKENS = 1000  # ... and one by one


async def tokens_in_tier(residency: Residency, tier: int, tenant: int | None = None) -> Sequence[int]:
    """Return tokens (each names a row of the block index and its present block) of the blocks with a readable copy in
    `tier`, the deepest in their chains first. If `tenant` is given, only its blocks count. Other tasks run meanwhile,
    and their changes may be included or not."""
    columns = residency.rows
    found, depths = [np.empty(0, np.uint64)], [np.empty(0, np.uint32)]
    first = 0
    while first < columns.capacity:
        mask = np.frombuffer(columns.mask, np.uint8)[first : first + SLICE_ROWS]
        rows = first + np.flatnonzero(holding(mask, tier))
        if tenant is not None:
            rows = rows[residency.tenants_of(rows) == tenant]
        found.append(tokens_of(residency, rows))
        depths.append(as_array(columns.depth)[rows])
        del mask  # a column cannot grow while a view of it exists
        first += SLICE_ROWS
        await asyncio.sleep(0)
    return await asyncio.to_thread(_deepest_first, found, depths)


def _deepest_first(parts: list[Tokens], depths: list[npt.NDArray[np.uint32]]) -> array[int]:
    order = np.argsort(np.concatenate(depths), kind="stable")[::-1]
    return array("Q", np.concatenate(parts)[order].tobytes())  # whose numbers are made when they are asked for


async def save(
    residency: Residency, writeback: WriteBack, tiers: Sequence[int], timeout_s: float, tenant: int | None = None
) -> tuple[int, int, int]:
    """Write every block in `tiers`, which are tiers in memory, to the durable tier if it has no copy there, the last
    used first, as long as nothing that was used as late has to leave that tier for it. Return three numbers of blocks:
    the durable ones, the ones that are not durable after `timeout_s` seconds or whose write was refused, and the ones
    that were not written."""
    deadline = asyncio.get_running_loop().time() + timeout_s
    wanted = array("Q")
    for tier in tiers:
        wanted += await _unsafe(residency, writeback, await tokens_in_tier(residency, tier, tenant))
    wanted, kept = await _last_used_first(residency, wanted), 0
    for start in range(0, len(wanted), PORTION_BLOCKS):
        rows = list(map(residency.current, wanted[start : start + PORTION_BLOCKS]))
        rows = [row for row in rows if row >= 0 and residency.fastest_in_memory(row) >= 0]
        fitting = writeback.fitting(rows)
        for row in rows[:fitting]:
            writeback.write_through(row)
        await writeback.flush(max(0.0, deadline - asyncio.get_running_loop().time()))
        if fitting < len(rows):
            kept = len(wanted) - start - fitting
            break
    left = len(await _unsafe(residency, writeback, wanted[: len(wanted) - kept]))
    return len(wanted) - kept - left, left, kept


async def _last_used_first(residency: Residency, tokens: array[int]) -> array[int]:
    """Return `tokens` ordered by the last use of their blocks, parents before the children used with them."""
    last, depths = [np.empty(0, np.uint64)], [np.empty(0, np.uint32)]
    for first in range(0, len(tokens), SLICE_ROWS):
        names = np.frombuffer(tokens[first : first + SLICE_ROWS], np.uint64)
        rows = (names & np.uint64((1 << ROW_BITS) - 1)).astype(np.int64)
        last.append(np.frombuffer(residency.rows.last_access_ns, np.uint64)[rows])
        depths.append(as_array(residency.rows.depth)[rows])
        await asyncio.sleep(0)
    order = await asyncio.to_thread(lambda: np.lexsort((np.concatenate(depths), ~np.concatenate(last))))
    return array("Q", np.frombuffer(tokens, np.uint64)[order].tobytes())


async def _unsafe(residency: Residency, writeback: WriteBack, tokens: Sequence[int]) -> array[int]:
    """Return the rows that are still not durable and were not evicted meanwhile."""
    left = array("Q")
    for position, token in enumerate(tokens):
        row = residency.current(token)
        if row >= 0 and not writeback.is_durable(row):
            left.append(token)
        if position % SLICE_TOKENS == SLICE_TOKENS - 1:
            await asyncio.sleep(0)
    return left
