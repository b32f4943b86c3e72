"""Copies sequences' blocks out of the pool to host memory, and back.

Owns the record of a swapped sequence. It never decides which to swap. The K/V that are swapped in have the same bits: a
block that stayed in the trie is used again; one that was evicted and computed again by another sequence is not, since
recomputing may round differently.

Sequences that are swapped out together (the beams of one request) are swapped in together. A block that several of them
held is copied once, and shared again: each records the earlier one, its base, with which it shares its beginning.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvstore_engine.blocks.block_table import BlockTable
from kvstore_engine.blocks.host_pool import HostPool, HostPoolFull
from kvstore_engine.blocks.runs import count_runs
from kvstore_engine.blocks.space import BlockSpace
from kvstore_engine.blocks.trie import TrieNode
from kvstore_engine.free_list import PoolExhausted

Int32Array = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class SwappedBlocks:
    """The K/V of positions [0, computed). The first `shared` blocks are those of sequence number `base` of those
    swapped together; the others are in `places` of the host pool. `path` was the part in the trie.
    """

    tenant: str
    computed: int
    places: list[int]
    path: list[TrieNode]
    runs: int
    nbytes: int
    base: int = 0
    shared: int = 0


def own_parts(tables: Sequence[list[int]]) -> list[tuple[int, int]]:
    """For each of `tables` the earlier one with most leading blocks in common, and how many they are.

    Sequences share only leading blocks, so no other one has the rest.
    """
    parts = []
    for number, table in enumerate(tables):
        common = [_common(table, earlier) for earlier in tables[:number]]
        most = max(common, default=0)
        parts.append((common.index(most) if most else 0, most))
    return parts


def swap_out(space: BlockSpace, host: HostPool, held: Sequence[tuple[BlockTable, int]]) -> list[SwappedBlocks]:
    """Copy the computed positions of each block table to the host, and release the table. `held`: (table, positions).

    HostPoolFull: nothing has changed.
    """
    tables = [block_table.blocks[: space.blocks_for(computed)] for block_table, computed in held]
    parts = own_parts(tables)
    wanted = sum(len(table) - shared for table, (_, shared) in zip(tables, parts, strict=True))
    if wanted > host.free_blocks:
        raise HostPoolFull(f"{wanted} blocks wanted, {host.free_blocks} are free")
    swapped = []
    for (block_table, computed), table, (base, shared) in zip(held, tables, parts, strict=True):
        own, path = table[shared:], block_table.nodes[: computed // space.block_tokens]
        places, nbytes = host.save(own), len(own) * host.block_bytes
        swapped.append(SwappedBlocks(block_table.tenant, computed, places, path, count_runs(own), nbytes, base, shared))
    for block_table, _ in held:
        space.release(block_table)
    return swapped


def swap_in(
    space: BlockSpace, host: HostPool, swapped: Sequence[SwappedBlocks], texts: Sequence[Int32Array]
) -> list[tuple[BlockTable, int]]:
    """Brings back sequences that were swapped out together, in that order; `texts` are their tokens.

    Returns for each its block table, filled up to what was swapped, and the number of blocks copied for it. The host's
    places are free again. PoolExhausted: nothing has changed.
    """
    claimed: list[tuple[BlockTable, int]] = []
    try:
        for each, tokens in zip(swapped, texts, strict=True):
            begun = space.branch(claimed[each.base][0], each.shared) if each.shared else None
            claimed.append(space.reclaim(each.tenant, tokens, each.path, each.computed, begun))
    except PoolExhausted:
        for block_table, _ in claimed:
            space.release(block_table)
        raise
    back = []
    for each, (block_table, kept) in zip(swapped, claimed, strict=True):
        targets = block_table.blocks[kept : each.shared + len(each.places)]
        if targets:
            host.load(each.places, kept - each.shared, targets)
        host.free(each.places)
        for node in block_table.nodes[kept:]:
            node.ready = True
        back.append((block_table, len(targets)))
    return back


def _common(table: list[int], other: list[int]) -> int:
    """Length of the common beginning."""
    most = min(len(table), len(other))
    return next((index for index in range(most) if table[index] != other[index]), most)
