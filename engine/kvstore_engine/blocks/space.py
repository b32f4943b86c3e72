"""The blocks of all sequences: claims, growth, sharing, copy-on-write, and room made by giving up cached prefixes.

Owns which holding and which trie node refer to which block. It never computes K/V and never preempts: where the cached
prefixes are not enough it raises PoolExhausted and has changed nothing.
Invariants (`check` walks them): a block's count is the number of tables, nodes and pins that name it; a block that
two tables name outside the trie is written only after it was copied; a node's block is written only until it is
ready.
"""

from collections import Counter
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from kvstore_engine.blocks.block_table import BlockTable
from kvstore_engine.blocks.references import BlockReferences
from kvstore_engine.blocks.statistics import SpaceStatistics
from kvstore_engine.blocks.trie import PrefixTrie, TrieNode
from kvstore_engine.pool import BlockPool, PoolExhausted

Int32Array = npt.NDArray[np.int32]


class BlockSpace:
    """Hands out the blocks of `pool`. Not for use by two threads."""

    def __init__(self, pool: BlockPool, *, sharing: bool = True) -> None:
        self.pool = pool
        self.block_tokens = pool.block_tokens
        self.references = BlockReferences(pool)
        self.trie = PrefixTrie()
        self.is_sharing = sharing
        self._evicted = self._copied = self._deduplicated = 0

    @property
    def available_blocks(self) -> int:
        """Blocks that are free or would be, once all unused prefixes are given up."""
        return self.references.free_blocks + self.trie.unused

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold `tokens` tokens."""
        return -(-tokens // self.block_tokens)

    def keys(self, tokens: Int32Array) -> list[bytes]:
        """The trie keys of the whole blocks of `tokens`."""
        width = 4 * self.block_tokens
        data = np.ascontiguousarray(tokens, np.int32).tobytes()
        return [data[first : first + width] for first in range(0, len(data) - width + 1, width)]

    def price(self, tenant: str, *texts: Int32Array) -> int:
        """By how much `claim` for each of `texts` would lower `available_blocks`."""
        price, numbers = 0, dict[tuple[int, bytes], int]()
        for tokens in texts:
            keys = self.keys(tokens) if self.is_sharing else []
            matched, above = self.trie.match(tenant, keys), 0
            price += self.blocks_for(len(tokens)) - len(keys)
            for index, key in enumerate(keys):
                known = len(numbers)
                above = numbers.setdefault((above, key), known + 1)
                if above > known:  # none of the texts before has this block
                    price += not (index < len(matched) and matched[index].users)
        return price

    def price_again(self, tokens: int, path: list[TrieNode], shared: int = 0) -> int:
        """By how much `reclaim` would lower `available_blocks`, of whose blocks another has brought `shared` back."""
        kept = sum(1 for node in path[shared:] if node.users and node.is_attached)
        return self.blocks_for(tokens) - shared - kept

    def claim(self, tenant: str, tokens: Int32Array) -> BlockTable:
        """Blocks for `tokens`: those of the longest known prefix, and new ones. PoolExhausted, then nothing changed.

        The whole blocks are shared with whoever comes later, from now on: the caller computes those that are not
        `ready`, or waits for another sequence that does.
        """
        table = BlockTable(tenant)
        keys = self.keys(tokens) if self.is_sharing else []
        matched = self.trie.match(tenant, keys)
        for node in matched:
            self._use(node)
        try:
            blocks = self.allocate(self.blocks_for(len(tokens)) - len(matched), matched[-1].block if matched else None)
        except PoolExhausted:
            self.references.release([*self.trie.leave(matched), *(node.block for node in matched)])
            raise
        table.nodes = matched
        table.append([node.block for node in matched])
        for key, block in zip(keys[len(matched) :], blocks, strict=False):
            table.nodes.append(self.trie.add(tenant, table.nodes[-1] if table.nodes else None, key, block))
            self.references.share(block)
        table.append(blocks)
        return table

    def reclaim(
        self, tenant: str, tokens: Int32Array, path: list[TrieNode], computed: int, begun: BlockTable | None = None
    ) -> tuple[BlockTable, int]:
        """Blocks for `tokens` again, for a sequence that held `path` before: a table, and how many leading blocks of
        it are those of `begun`, a `branch` that becomes the caller's, and then the very ones of `path`. The others are
        new; those of [0, computed) are for the caller to fill, and whole ones of them are shared. PoolExhausted as
        `claim`; `begun` is released then.
        """
        table = begun or BlockTable(tenant)
        shared = table.count
        is_gapless = len(table.nodes) == shared
        for node in path[shared:] if is_gapless else ():
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
        for key, block in zip(self.keys(tokens[:computed])[kept:] if is_gapless else (), blocks, strict=False):
            parent = table.nodes[-1] if table.nodes else None
            if not self.is_sharing or self.trie.child(tenant, parent, key) is not None:
                break  # somebody else's block stands there: ours stay our own
            table.nodes.append(self.trie.add(tenant, parent, key, block))
            self.references.share(block)
        table.append(blocks)
        return table, kept

    def extend(self, table: BlockTable, tokens: int) -> None:
        """Make room for `tokens` tokens in all. PoolExhausted, and then nothing changed."""
        missing = self.blocks_for(tokens) - table.count
        if missing > 0:
            after = int(table.ids[-1]) if table.count else None
            table.append(self.allocate(missing, after))

    def ready_tokens(self, table: BlockTable, computed: int) -> int:
        """Positions whose K/V are there, given that [0, computed) are: others may have put in what follows."""
        if computed % self.block_tokens:
            return computed
        index = computed // self.block_tokens
        while index < len(table.nodes) and table.nodes[index].ready:
            index += 1
        return index * self.block_tokens

    def seal(self, table: BlockTable, tokens: Int32Array, begin: int, end: int) -> None:
        """Positions [begin, end) of `tokens` have been computed: the blocks that are now whole are shared."""
        if not self.is_sharing:
            return
        for index in range(begin // self.block_tokens, end // self.block_tokens):
            if index < len(table.nodes):
                table.nodes[index].ready = True
            elif index == len(table.nodes):
                self._attach(table, tokens, index)

    def make_writable(self, table: BlockTable, position: int) -> None:
        """Before `position` is written: copy its block if another table has it, too. PoolExhausted as `extend`.

        Only for blocks outside the trie; to compute into a block that is ready, take `borrow_copy`.
        """
        index = position // self.block_tokens
        assert index >= len(table.nodes), "a shared prefix is not written again"
        block = int(table.ids[index])
        if self.references.count(block) > 1:
            copy = self.borrow_copy(block)
            table.replace(index, copy)
            self.references.release([block])

    def borrow_copy(self, block: int) -> int:
        """A new block with the same bytes, for the caller to release. PoolExhausted as `extend`."""
        (copy,) = self.allocate(1)
        self.pool.copy_blocks([block], [copy])
        self._copied += 1
        return copy

    def fork(self, table: BlockTable) -> BlockTable:
        """Another table of the same blocks; whichever writes first gets a copy."""
        return self.branch(table, table.count)

    def branch(self, table: BlockTable, count: int) -> BlockTable:
        """Another table of the first `count` blocks."""
        child = BlockTable(table.tenant)
        child.nodes = table.nodes[:count]
        for node in child.nodes:
            self.trie.use(node)
        child.append(table.blocks[:count])
        self.pin(child.blocks)
        return child

    def release(self, table: BlockTable) -> None:
        """Give the blocks back; whole ones that were computed stay in the trie until their room is needed."""
        blocks = table.blocks
        dropped = self.trie.leave(table.nodes)
        table.clear()
        self.references.release([*blocks, *dropped])

    def discard(self, table: BlockTable) -> None:
        """`release`, but what nobody else uses of it leaves the trie, with all that was computed after it: its K/V are
        not to be trusted. What others use at the moment is theirs to judge.
        """
        own = next((node for node in table.nodes if node.users == 1), None)
        self.release(table)
        if own is not None and own.is_attached:
            self.references.release(self.trie.prune(own))

    def pin(self, blocks: Iterable[int]) -> None:
        """Keep `blocks` allocated until `unpin`, whoever else lets go of them."""
        for block in blocks:
            self.references.share(block)

    def unpin(self, blocks: Iterable[int]) -> None:
        self.references.release(blocks)

    def allocate(self, count: int, after: int | None = None) -> list[int]:
        """`count` blocks with one holder, the caller; gives up cached prefixes for them."""
        if count > self.available_blocks:
            raise PoolExhausted(f"{count} blocks wanted, {self.available_blocks} of {self.pool.blocks} can be had")
        while self.references.free_blocks < count:
            block = self.trie.give_up()
            if block is None:  # an unused node whose block is pinned: it frees nothing
                raise PoolExhausted(f"{count} blocks wanted, {self.references.free_blocks} are free")
            self._evicted += 1
            self.references.release([block])
        return self.references.allocate(count, after)

    def relocate(self, table: BlockTable, index: int, block: int) -> None:
        """Block `index`, which has no other holder but its own node, has been copied to `block`, which is ours."""
        old = int(table.ids[index])
        if index < len(table.nodes):
            table.nodes[index].block = block
            self.references.share(block)
            self.references.release([old])
        table.replace(index, block)
        self.references.release([old])

    def is_alone(self, table: BlockTable, index: int) -> bool:
        """Nobody else names block `index` of `table`."""
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

    def check(self, tables: Iterable[BlockTable], pinned: Iterable[int] = ()) -> None:
        """Walk the invariants, given all tables and pins. AssertionError says which is broken."""
        wanted, users = Counter(pinned), Counter[int]()
        for table in tables:
            wanted.update(table.blocks)
            users.update(map(id, table.nodes))
            parent: TrieNode | None = None
            for index, node in enumerate(table.nodes):
                assert node.block == table.ids[index], "a table names another block than its node"
                assert node.is_attached and (parent is None or node.parent is parent), "a path with a gap"
                parent = node
        nodes = [node for _, node in self.trie]
        wanted.update(node.block for node in nodes)
        assert len(nodes) == self.trie.nodes and sum(not node.users for node in nodes) == self.trie.unused
        for node in nodes:
            assert node.users == users[id(node)], "a node's users are miscounted"
            assert node.users or node.ready, "an unused node without K/V"
            above = node.parent
            assert above is not None and (above.parent is None or above.ready or not node.ready), (
                "ready below not ready"
            )
        for block in range(self.pool.blocks):
            assert self.references.count(block) == wanted[block], f"block {block} is miscounted"
        assert self.references.free_blocks == self.pool.free_blocks

    def _use(self, node: TrieNode) -> None:
        self.trie.use(node)
        self.references.share(node.block)

    def _attach(self, table: BlockTable, tokens: Int32Array, index: int) -> None:
        """Block `index` is whole and the first outside the trie: add it, or take the one that is there."""
        first = index * self.block_tokens
        key = np.ascontiguousarray(tokens[first : first + self.block_tokens], np.int32).tobytes()
        parent = table.nodes[-1] if table.nodes else None
        block = int(table.ids[index])
        known = self.trie.child(table.tenant, parent, key)
        if known is None:
            node = self.trie.add(table.tenant, parent, key, block)
            self.references.share(block)
            node.ready = True
            table.nodes.append(node)
        elif known.loader is None:
            if not known.ready:  # others wait for it: let them have ours
                self.pool.copy_blocks([block], [known.block])
                known.ready = True
            self._use(known)
            table.nodes.append(known)
            table.replace(index, known.block)
            self.references.release([block])
            self._deduplicated += 1
