"""Who holds which engine blocks: reference counts, tables, copy-on-write, the prefix trie, swapping, compaction."""

from kvstore_engine.blocks.block_table import BlockTable
from kvstore_engine.blocks.compaction import Compaction, Compactor
from kvstore_engine.blocks.host_pool import HostPool, HostPoolFull
from kvstore_engine.blocks.references import BlockReferences
from kvstore_engine.blocks.runs import count_runs
from kvstore_engine.blocks.slabs import BlockClass, SlabPool
from kvstore_engine.blocks.space import BlockSpace
from kvstore_engine.blocks.statistics import SpaceStatistics
from kvstore_engine.blocks.swap import SwappedBlocks, own_parts, swap_in, swap_out
from kvstore_engine.blocks.transfer_costs import TransferCosts
from kvstore_engine.blocks.trie import PrefixTrie, TrieNode

__all__ = [
    "BlockClass",
    "BlockReferences",
    "BlockSpace",
    "Compaction",
    "Compactor",
    "BlockTable",
    "HostPool",
    "HostPoolFull",
    "PrefixTrie",
    "SlabPool",
    "SpaceStatistics",
    "SwappedBlocks",
    "TransferCosts",
    "TrieNode",
    "count_runs",
    "own_parts",
    "swap_in",
    "swap_out",
]
