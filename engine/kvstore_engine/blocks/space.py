"""The blocks of all sequences: claims, growth, sharing, copy-on-write, and room made by evicting cached prefixes.

The module owns which block table and which trie node refer to which block. It does not compute K/V and does not
preempt: if evicting cached prefixes is not enough it raises PoolExhausted and has changed nothing. Invariants (`check`
walks them): a block's count is the number of tables, nodes and pins that name it; a block that two tables name outside
the trie is written only after it was copied; a node's block is written only until it is ready.

Where windowed layers have a pool of their own, `windows` has its blocks: a sequence then goes on behind a shared prefix
only where the window before that position is there, too.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvstore_engine.blocks.block_table import BlockTable
from kvstore_engine.blocks.references import BlockReferences
from kvstore_engine.blocks.trie import PrefixTrie, TrieNode
from kvstore_engine.blocks.windows import WindowBlocks
from kvstore_engine.pool import BlockPool, PoolExhausted
from kvstore_proto.identity import pack_tokens

Int32Array = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class SpaceStatistics:
    """Counts of a pool's blocks: `used` by sequences, `cached` in the prefix trie alone, `free`. `evicted`, `copied`
    and `deduplicated` count these events since the start.
    """

    blocks: int
    used: int
    cached: int
    free: int
    evicted: int
    copied: int
    deduplicated: int


class BlockSpace:
    """The allocator of the K/V blocks of `pool`. It gives sequences their blocks and, with `sharing`, lets sequences of
    one tenant with an equal prefix share the blocks of that prefix. It is for one thread.
    """

    def __init__(self, pool: BlockPool, *, sharing: bool = True) -> None:
        self.pool = pool
        self.block_tokens = pool.block_tokens
        self.references = BlockReferences(pool)
        self.is_sharing = sharing
        self.windows = WindowBlocks(pool.window, pool.window_tokens) if pool.window is not None else None
        self.trie = PrefixTrie(None if self.windows is None else self.windows.forget)
        self._evicted = self._copied = self._deduplicated = 0

    @property
    def available_blocks(self) -> int:
        """The number of blocks that are free, or can be freed by evicting cached prefixes that no sequence uses."""
        return self.references.free_blocks + self.trie.unused

    def blocks_for(self, tokens: int) -> int:
        """Return the number of blocks that `tokens` tokens need."""
        return -(-tokens // self.block_tokens)

    def keys(self, tokens: Int32Array) -> list[bytes]:
        """Return the key of each whole block of `tokens` in the prefix trie (the index of shared prefixes): the bytes
        of the block's token ids.
        """
        width = 4 * self.block_tokens
        data = pack_tokens(tokens)
        return [data[first : first + width] for first in range(0, len(data) - width + 1, width)]

    def price(self, tenant: str, tokens: Int32Array) -> int:
        """Return how many available blocks `claim(tenant, tokens)` would use up."""
        matched = self.trie.match(tenant, self.keys(tokens) if self.is_sharing else [])
        return self.blocks_for(len(tokens)) - sum(1 for node in matched if node.users)

    def price_again(self, tokens: int, path: list[TrieNode]) -> int:
        """Return how many available blocks `reclaim` would use up, for a sequence of `tokens` tokens (a count) that
        held the trie nodes `path`.
        """
        return self.blocks_for(tokens) - sum(1 for node in path if node.users and node.is_attached)

    def claim(self, tenant: str, tokens: Int32Array) -> BlockTable:
        """Return a new table with pool blocks for `tokens`: shared blocks for the longest known prefix of this tenant,
        new blocks for the other tokens. New whole blocks are shared with later sequences. The caller must compute
        blocks whose nodes are not `ready`, unless another sequence does. Raises PoolExhausted with nothing changed.
        """
        table = BlockTable(tenant)
        keys = self.keys(tokens) if self.is_sharing else []
        matched = self.trie.match(tenant, keys)
        for node in matched:
            self._use(node)
        try:
            blocks = self.allocate(self.blocks_for(len(tokens)) - len(matched), matched[-1].block if matched else None)
        except PoolExhausted:
            self.references.release([*self.trie.release(matched), *(node.block for node in matched)])
            raise
        table.nodes = matched
        table.append([node.block for node in matched])
        for key, block in zip(keys[len(matched) :], blocks, strict=False):
            table.nodes.append(self.trie.add(tenant, table.nodes[-1] if table.nodes else None, key, block))
            self.references.share(block)
        table.append(blocks)
        return table

    def reclaim(self, tenant: str, tokens: Int32Array, path: list[TrieNode], exact: int) -> tuple[BlockTable, int]:
        """Return a table with pool blocks for `tokens`, for a sequence that held the trie nodes `path` before it lost
        its blocks, and the number of leading blocks that are still the blocks of `path`. The caller must fill the other
        blocks; blocks of the first `exact` tokens are shared with later sequences. Raises PoolExhausted with nothing
        changed.
        """
        table = BlockTable(tenant)
        for node in path:
            if not node.is_attached:
                break
            self._use(node)
            table.nodes.append(node)
            table.append([node.block])
        kept = table.count
        try:
            blocks = self.allocate(self.blocks_for(len(tokens)) - kept, int(table.ids[-1]) if kept else None)
        except PoolExhausted:
            self.release(table)
            raise
        for key, block in zip(self.keys(tokens[:exact])[kept:], blocks, strict=False):
            parent = table.nodes[-1] if table.nodes else None
            if not self.is_sharing or self.trie.child(tenant, parent, key) is not None:
                break  # another sequence's block is there: the rest stay unshared
            table.nodes.append(self.trie.add(tenant, parent, key, block))
            self.references.share(block)
        table.append(blocks)
        return table, kept

    def extend(self, table: BlockTable, tokens: int) -> None:
        """Add blocks to `table` until it has room for `tokens` tokens in all. Raises PoolExhausted with nothing
        changed.
        """
        missing = self.blocks_for(tokens) - table.count
        if missing > 0:
            after = int(table.ids[-1]) if table.count else None
            table.append(self.allocate(missing, after))

    def ready_tokens(self, table: BlockTable, computed: int) -> int:
        """Return how many leading tokens of the sequence with `table` have K/V. The caller knows of `computed` tokens;
        other sequences may have filled the shared blocks that follow.
        """
        if computed % self.block_tokens:
            return computed
        index = computed // self.block_tokens
        while index < len(table.nodes) and table.nodes[index].ready:
            index += 1
        return index * self.block_tokens

    def resume(self, table: BlockTable, computed: int, most: int) -> int:
        """Return the position, at most `most`, at which the sequence with `table` can go on computing, when its first
        `computed` tokens have K/V. For layers with a sliding window the table also gets the blocks of the window before
        that position.
        """
        ready = min(self.ready_tokens(table, computed), most)
        if self.windows is None or ready <= computed:
            return max(computed, ready)
        ready = self.windows.longest(table, computed, ready)
        if ready > computed:
            self.windows.take(table, ready)
        return ready

    def unshare(self, table: BlockTable, index: int) -> None:
        """Replace the shared blocks of `table` from place number `index` on by new blocks, which the sequence must
        compute itself. Raises PoolExhausted with nothing changed.
        """
        path = table.nodes[index:]
        shared = [node for node in path if node.users > 1]  # a leading part
        blocks = self.allocate(len(shared))
        table.nodes = table.nodes[:index]
        self.references.release([*(node.block for node in shared), *self.trie.release(path)])
        own = path[len(shared)] if len(shared) < len(path) else None
        if own is not None and own.is_attached:  # its blocks stay in the table
            self.references.release(self.trie.prune(own))
        for offset, block in enumerate(blocks):
            table.replace(index + offset, block)

    def seal(self, table: BlockTable, tokens: Int32Array, begin: int, end: int) -> None:
        """Share the blocks of `table` that are whole now that the positions `begin` to `end` of `tokens` have K/V, with
        later sequences.
        """
        if not self.is_sharing:
            return
        for index in range(begin // self.block_tokens, end // self.block_tokens):
            if index < len(table.nodes):
                table.nodes[index].ready = True
                self._keep_window(table, index)
            elif index == len(table.nodes):
                self._attach(table, tokens, index)

    def make_writable(self, table: BlockTable, position: int) -> None:
        """Make sure that only `table` holds the block of the token at `position`, which is about to be written. A block
        that others hold is replaced by a copy first. The position must be behind the blocks of the prefix trie. Raises
        PoolExhausted.
        """
        index = position // self.block_tokens
        assert index >= len(table.nodes), "a shared prefix is not written again"
        block = int(table.ids[index])
        if self.references.count(block) > 1:
            copy = self.borrow_copy(block)
            table.replace(index, copy)
            self.references.release([block])

    def borrow_copy(self, block: int) -> int:
        """Copy the pool block `block` to a new block and return the new block's number. The caller releases it. Raises
        PoolExhausted.
        """
        (copy,) = self.allocate(1)
        self.pool.copy_blocks([block], [copy])
        self._copied += 1
        return copy

    def fork(self, table: BlockTable) -> BlockTable:
        """Return a second table with all blocks of `table`, for another answer to the same prompt. Before one of the
        two sequences writes to a block that both hold, `make_writable` copies it.
        """
        child = BlockTable(table.tenant)
        child.nodes = list(table.nodes)
        for node in child.nodes:
            self.trie.use(node)
        child.append(table.blocks)
        self.pin(child.blocks)
        if self.windows is not None:
            self.windows.fork(table, child)
        return child

    def release(self, table: BlockTable) -> None:
        """Release all blocks of `table`. Whole computed blocks stay cached until their room is needed."""
        blocks = table.blocks
        if self.windows is not None:
            self.windows.release(table)
        dropped = self.trie.release(table.nodes)
        table.clear()
        self.references.release([*blocks, *dropped])

    def discard(self, table: BlockTable) -> None:
        """Release all blocks of `table`, whose K/V may be wrong. Blocks that no other sequence uses are dropped from
        the cache of prefixes, together with the blocks that follow them.
        """
        own = next((node for node in table.nodes if node.users == 1), None)
        self.release(table)
        if own is not None and own.is_attached:
            self.references.release(self.trie.prune(own))

    def pin(self, blocks: Iterable[int]) -> None:
        """Keep `blocks` allocated until `unpin` is called with them, for example while they are sent to the daemon."""
        for block in blocks:
            self.references.share(block)

    def unpin(self, blocks: Iterable[int]) -> None:
        self.references.release(blocks)

    def allocate(self, count: int, after: int | None = None) -> list[int]:
        """Allocate `count` blocks, if possible right after the pool block `after`, with the caller as their holder, and
        return their numbers. If too few are free, cached prefixes that no sequence uses are evicted. Raises
        PoolExhausted.
        """
        if count > self.available_blocks:
            raise PoolExhausted(f"{count} blocks wanted, {self.available_blocks} of {self.pool.blocks} are available")
        while self.references.free_blocks < count:
            block = self.trie.evict()
            if block is None:  # an unused node whose block is pinned: it frees nothing
                raise PoolExhausted(f"{count} blocks wanted, {self.references.free_blocks} are free")
            self._evicted += 1
            self.references.release([block])
        return self.references.allocate(count, after)

    def relocate(self, table: BlockTable, index: int, block: int) -> None:
        """Replace the block at place `index` of `table` by the pool block `block`, to which the caller has copied its
        bytes, and free the old block. No other table may hold the old block.
        """
        old = int(table.ids[index])
        if index < len(table.nodes):
            table.nodes[index].block = block
            self.references.share(block)
            self.references.release([old])
        table.replace(index, block)
        self.references.release([old])

    def is_alone(self, table: BlockTable, index: int) -> bool:
        """Return True if no other table holds the block at place `index` of `table`. The table's own trie node may hold
        it too.
        """
        if index < len(table.nodes):
            return table.nodes[index].users == 1 and self.references.count(int(table.ids[index])) == 2
        return self.references.count(int(table.ids[index])) == 1

    def statistics(self) -> SpaceStatistics:
        free, cached = self.references.free_blocks, self.trie.unused
        return SpaceStatistics(
            blocks=self.pool.blocks,
            used=self.pool.blocks - free - cached,
            cached=cached,
            free=free,
            evicted=self._evicted,
            copied=self._copied,
            deduplicated=self._deduplicated,
        )

    def _use(self, node: TrieNode) -> None:
        self.trie.use(node)
        self.references.share(node.block)

    def _attach(self, table: BlockTable, tokens: Int32Array, index: int) -> None:
        """Add block `index`, which is whole and the first outside the trie, or use the one in the trie."""
        first = index * self.block_tokens
        key = pack_tokens(tokens[first : first + self.block_tokens])
        parent = table.nodes[-1] if table.nodes else None
        block = int(table.ids[index])
        known = self.trie.child(table.tenant, parent, key)
        if known is None:
            node = self.trie.add(table.tenant, parent, key, block)
            self.references.share(block)
            node.ready = True
            table.nodes.append(node)
            self._keep_window(table, index)
        elif known.loader is None:
            if not known.ready:  # others wait for it: give them a copy
                self.pool.copy_blocks([block], [known.block])
                known.ready = True
            self._use(known)
            table.nodes.append(known)
            table.replace(index, known.block)
            self.references.release([block])
            self._deduplicated += 1
            self._keep_window(table, index)

    def _keep_window(self, table: BlockTable, index: int) -> None:
        if self.windows is not None:
            self.windows.keep(table, index)
