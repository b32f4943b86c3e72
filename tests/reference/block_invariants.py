"""Walks the invariants of a block space."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from kvstore_engine.blocks.block_table import BlockTable
from kvstore_engine.blocks.space import BlockSpace
from kvstore_engine.blocks.trie import TrieNode


def check_blocks(
    space: BlockSpace, tables: Iterable[BlockTable], pinned: Iterable[int] = (), windows: Iterable[int] = ()
) -> None:
    """Walk the invariants, given all tables and pins (`windows`: of windowed layers). AssertionError says which is
    broken.
    """
    tables = list(tables)
    wanted, users = Counter(pinned), Counter[int]()
    for table in tables:
        wanted.update(table.blocks)
        users.update(map(id, table.nodes))
        parent: TrieNode | None = None
        for index, node in enumerate(table.nodes):
            assert node.block == table.ids[index], "a table names another block than its node"
            assert node.is_attached and (parent is None or node.parent is parent), "a path with a gap"
            parent = node
    nodes = [node for _, node in space.trie]
    wanted.update(node.block for node in nodes)
    assert len(nodes) == space.trie.nodes and sum(not node.users for node in nodes) == space.trie.unused
    for node in nodes:
        assert node.users == users[id(node)], "a node's users are miscounted"
        assert node.users or node.ready, "an unused node without K/V"
        above = node.parent
        assert above is not None and (above.parent is None or above.ready or not node.ready), "ready below not ready"
    for block in range(space.pool.blocks):
        assert space.references.count(block) == wanted[block], f"block {block} is miscounted"
    assert space.references.free_blocks == space.pool.free_blocks
    if space.windows is not None:
        held = Counter(windows)
        for table in tables:
            held.update(table.windows.values())
        held.update(node.window for node in nodes if node.window >= 0)
        references = space.windows.references
        for block in range(references.pool.blocks):
            assert references.count(block) == held[block], f"block {block} of windowed layers is miscounted"
        assert references.free_blocks == references.pool.free_blocks
