"""Engine blocks and their holders: block tables, reference counts, copy-on-write, prefix trie, swap, compaction."""

from kvstore_engine.blocks.block_table import BlockTable
from kvstore_engine.blocks.compaction import Compaction, Compactor
from kvstore_engine.blocks.host_pool import HostPool, HostPoolFull, Slabs, SwappedBlocks, swap_in, swap_out
from kvstore_engine.blocks.space import BlockReferences, BlockSpace, SpaceStatistics
from kvstore_engine.blocks.transfers import TransferCosts, count_runs
from kvstore_engine.blocks.trie import PrefixTrie, TrieNode

__all__ = [
    "BlockReferences",
    "BlockSpace",
    "Compaction",
    "Compactor",
    "BlockTable",
    "HostPool",
    "HostPoolFull",
    "PrefixTrie",
    "Slabs",
    "SpaceStatistics",
    "SwappedBlocks",
    "TransferCosts",
    "TrieNode",
    "count_runs",
    "swap_in",
    "swap_out",
]
