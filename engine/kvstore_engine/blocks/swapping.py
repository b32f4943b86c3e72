"""Takes a sequence's blocks out of the pool, bytes and all, and brings them back.

Owns what is remembered of a swapped sequence. It never decides whom to swap. What comes back is the same bits: a block
that stayed in the trie all the while is taken again as it is; one that was given up and computed again by somebody else
is not, since a recomputed block may differ in its rounding.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvstore_engine.blocks.host_pool import HostPool
from kvstore_engine.blocks.runs import count_runs
from kvstore_engine.blocks.space import BlockSpace
from kvstore_engine.blocks.table import Holding
from kvstore_engine.blocks.trie import TrieNode

Int32Array = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class SwappedBlocks:
    """The K/V of positions [0, computed), in `places` of the host pool; `path` was the shared part of it."""

    tenant: str
    computed: int
    places: list[int]
    path: list[TrieNode]
    runs: int
    nbytes: int


def swap_out(space: BlockSpace, host: HostPool, holding: Holding, computed: int) -> SwappedBlocks:
    """Copy positions [0, computed) to the host and release the holding. HostPoolFull: nothing has changed."""
    blocks = holding.blocks[: space.blocks_for(computed)]
    places = host.save(blocks)
    path = holding.nodes[: computed // space.block_tokens]
    swapped = SwappedBlocks(holding.tenant, computed, places, path, count_runs(blocks), len(blocks) * host.block_bytes)
    space.release(holding)
    return swapped


def swap_in(space: BlockSpace, host: HostPool, swapped: SwappedBlocks, tokens: Int32Array) -> tuple[Holding, int]:
    """A holding for `tokens` with what was swapped in place, and how many blocks were copied for it.

    The host's places are free again. PoolExhausted: nothing has changed.
    """
    holding, kept = space.reclaim(swapped.tenant, tokens, swapped.path, swapped.computed)
    targets = holding.blocks[kept : len(swapped.places)]
    if targets:
        host.load(swapped.places, kept, targets)
    host.free(swapped.places)
    for node in holding.nodes[kept:]:
        node.ready = True
    return holding, len(targets)
