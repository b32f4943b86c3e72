"""Copies sequences' blocks out of the pool to host memory, and back.

Owns the record of a swapped sequence. It never decides which to swap. The K/V that are swapped in have the same bits: a
block that stayed in the trie is used again; one that was evicted and computed again by another sequence is not, since
recomputing may round differently.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvstore_engine.blocks.block_table import BlockTable
from kvstore_engine.blocks.host_pool import HostPool
from kvstore_engine.blocks.runs import count_runs
from kvstore_engine.blocks.space import BlockSpace
from kvstore_engine.blocks.trie import TrieNode

Int32Array = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class SwappedBlocks:
    """Holds the K/V of positions [0, computed) in `places` of the host pool. `path` was the part in the trie."""

    tenant: str
    computed: int
    places: list[int]
    path: list[TrieNode]
    runs: int
    nbytes: int


def swap_out(space: BlockSpace, host: HostPool, table: BlockTable, computed: int) -> SwappedBlocks:
    """Copy positions [0, computed) of `table` to the host, and release the table. HostPoolFull: nothing has changed."""
    blocks, path = table.blocks[: space.blocks_for(computed)], table.nodes[: computed // space.block_tokens]
    places = host.save(blocks)
    space.release(table)
    return SwappedBlocks(table.tenant, computed, places, path, count_runs(blocks), len(blocks) * host.block_bytes)


def swap_in(space: BlockSpace, host: HostPool, swapped: SwappedBlocks, tokens: Int32Array) -> tuple[BlockTable, int]:
    """Bring back a sequence of `tokens`, and free its places on the host.

    Returns its block table, filled up to the last swapped position, and the number of blocks copied for it.
    PoolExhausted: nothing has changed.
    """
    block_table, kept = space.reclaim(swapped.tenant, tokens, swapped.path, swapped.computed)
    targets = block_table.blocks[kept : len(swapped.places)]
    if targets:
        host.load(swapped.places, kept, targets)
    host.free(swapped.places)
    for node in block_table.nodes[kept:]:
        node.ready = True
    return block_table, len(targets)
