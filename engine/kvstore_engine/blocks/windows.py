"""The blocks of windowed layers: a sequence needs the ones of its last positions alone.

The module owns which tables and trie nodes hold which blocks of that pool. A block that has left a sequence's window,
or whose sequence has ended, stays until its room is needed, for prompts that go on there and for the store: the one
that left first goes first. So blocks in the middle of a prompt go before those at its end, and the ones where another
prompt branched off go last. Invariants: a block's count is the number of tables, nodes and pins that name it; a block
within a sequence's window is never given up; a block is written by the one table that holds it.
"""

from collections import OrderedDict
from collections.abc import Iterable

from kvstore_engine.blocks.block_table import BlockTable
from kvstore_engine.blocks.references import BlockReferences
from kvstore_engine.blocks.trie import TrieNode
from kvstore_engine.pool import BlockPool, PoolExhausted

_MOST_PINNED = 0.25  # of the pool, for sequences that run: a store that is slow must not stop the steps


class WindowBlocks:
    """The allocator of the pool blocks for layers with a sliding window, which see only the last `window_tokens`
    tokens, the present one included. A block whose tokens have left the window of its sequence stays until its room is
    needed.
    """

    def __init__(self, pool: BlockPool, window_tokens: int) -> None:
        self.pool = pool
        self.references = BlockReferences(pool)
        self._before, self._size = window_tokens - 1, pool.block_tokens
        self._left: OrderedDict[TrieNode | tuple[BlockTable, int], None] = OrderedDict()  # in the order of leaving
        self._pinned = 0

    @property
    def is_pinned(self) -> bool:
        """True if the blocks that are kept for storing in the daemon take a great part of the pool, and running
        sequences should keep no more.
        """
        return self._pinned > _MOST_PINNED * self.pool.blocks

    def may_lose(self, tokens: int) -> bool:
        """Return True if a prompt of `tokens` tokens is so long that blocks of its beginning may be given up before its
        end is computed.
        """
        return 2 * tokens > self.pool.blocks * self._size

    def blocks_for(self, step_tokens: int) -> int:
        """Return the number of window blocks that one sequence needs so that steps of `step_tokens` tokens can be
        computed.
        """
        return -(-self._before // self._size) + -(-step_tokens // self._size) + 3

    def needed(self, position: int) -> range:
        """Return the range of block numbers, counted from the sequence's beginning, whose K/V a sequence needs to go on
        computing at token `position`.
        """
        return range(max(0, position - self._before) // self._size, -(-position // self._size))

    def longest(self, table: BlockTable, least: int, most: int) -> int:
        """Return the last position from `least` to `most` at which the sequence with `table` can go on computing,
        because the blocks of the window before it are available. Only `most` and the ends of blocks are tried; `least`
        is returned if none of them fits.
        """
        while most > least:
            missing = next((index for index in reversed(self.needed(most)) if self.block(table, index) is None), None)
            if missing is None:
                return most
            most = min(missing * self._size, (most - 1) // self._size * self._size)
        return least

    def block(self, table: BlockTable, index: int) -> int | None:
        """Return the pool block, for layers with a sliding window, of the sequence's block number `index`; None if it
        was given up.
        """
        if (block := table.windows.get(index)) is None and index < len(table.nodes):
            block = table.nodes[index].window
        return None if block is None or block < 0 else block

    def take(self, table: BlockTable, position: int) -> None:
        """Add to `table` the window blocks that its sequence needs to go on at `position`, all of which are available,
        and release earlier ones.
        """
        self._leave(table, self.needed(position).start)
        for index in self.needed(position):
            if index not in table.windows:
                table.windows[index] = table.nodes[index].window
                self.references.share(table.windows[index])

    def prepare(self, table: BlockTable, begin: int, end: int) -> list[int]:
        """Give `table` window blocks for the positions `begin` to `end`, which are written next, and release the blocks
        that have left the window. A block that others hold as well is copied first. Return the numbers of the new pool
        blocks. Raises PoolExhausted.
        """
        self._leave(table, self.needed(begin).start)
        first = begin // self._size
        shared = table.windows.get(first)
        if shared is not None and begin % self._size and self.references.count(shared) > 1:
            table.windows[first] = self.copy(shared)
            self.references.release([shared])
        new = [index for index in range(first, -(-end // self._size)) if index not in table.windows]
        table.windows.update(zip(new, self.allocate(len(new)), strict=True))
        return new

    def prepare_restored(self, table: BlockTable, position: int) -> dict[int, int]:
        """Allocate the window blocks that `table` lacks to go on at `position`, and return them by block number. The
        caller fills them and passes them to `add_restored`, or releases them. Raises PoolExhausted.
        """
        missing = [index for index in self.needed(position) if index not in table.windows]
        return dict(zip(missing, self.allocate(len(missing)), strict=True))

    def add_restored(self, table: BlockTable, position: int, blocks: dict[int, int]) -> None:
        """Add the `blocks` from `prepare_restored`, which the caller has filled, to `table`. Release blocks that its
        sequence does not need at `position`.
        """
        self._leave(table, self.needed(position).start)
        table.windows.update(blocks)

    def copy(self, block: int | None) -> int:
        """Allocate a pool block and return its number; the caller releases it. The bytes of `block` are copied to it,
        unless `block` is None. Raises PoolExhausted.
        """
        (copy,) = self.allocate(1)
        if block is not None:
            self.pool.copy_blocks([block], [copy])
        return copy

    def keep(self, table: BlockTable, index: int) -> None:
        """Let the trie node of block number `index` of `table` hold the window block as well, so that later sequences
        can use it. The block must be whole.
        """
        node, block = table.nodes[index], table.windows.get(index)
        if node.window < 0 and block is not None:
            node.window = block
            self.references.share(block)

    def fork(self, table: BlockTable, child: BlockTable) -> None:
        """Let `child`, a second table for the sequence of `table`, hold the blocks of its window as well."""
        child.window_first = table.window_first
        child.windows = {index: block for index, block in table.windows.items() if index >= table.window_first}
        for block in child.windows.values():
            self.references.share(block)

    def release(self, table: BlockTable) -> None:
        """Release the window blocks of `table`. Blocks that the prefix trie holds stay until their room is needed."""
        for index, block in table.windows.items():
            self._left.pop((table, index), None)
            if index < len(table.nodes):
                self._touch(table.nodes[index])
            self.references.release([block])
        table.windows, table.window_first = {}, 0

    def forget(self, node: TrieNode) -> None:
        """Release the window block of `node`, which was removed from the prefix trie."""
        self._left.pop(node, None)
        if node.window >= 0:
            self.references.release([node.window])
            node.window = -1

    def pin(self, blocks: list[int]) -> None:
        """Keep the window blocks `blocks` allocated until `unpin` is called with them."""
        self._pinned += len(blocks)
        for block in blocks:
            self.references.share(block)

    def unpin(self, blocks: Iterable[int]) -> None:
        released = list(blocks)
        self._pinned -= len(released)
        self.references.release(released)

    def allocate(self, count: int) -> list[int]:
        """Allocate `count` blocks with the caller as their holder, and return their numbers. If too few are free,
        blocks that have left the windows of their sequences are given up. Raises PoolExhausted.
        """
        for _ in range(len(self._left)):
            if self.references.free_blocks >= count:
                break
            self._give_up(self._left.popitem(last=False)[0])
        if self.references.free_blocks < count:
            raise PoolExhausted(f"{count} blocks of windows wanted, {self.references.free_blocks} are free")
        return self.references.allocate(count)

    def _give_up(self, holder: TrieNode | tuple[BlockTable, int]) -> None:
        block = holder.window if isinstance(holder, TrieNode) else holder[0].windows[holder[1]]
        if self.references.count(block) > 1:  # another one holds it: this would free nothing
            self._left[holder] = None
        elif isinstance(holder, TrieNode):
            self.forget(holder)
        else:
            self.references.release([holder[0].windows.pop(holder[1])])

    def _leave(self, table: BlockTable, first: int) -> None:
        """Let the blocks before number `first` go, which have left the window."""
        for index in range(table.window_first, first):
            block = table.windows.get(index)
            if block is None:
                continue
            if index >= len(table.nodes):
                self._left[table, index] = None
                continue
            self.keep(table, index)
            del table.windows[index]
            self.references.release([block])
            self._touch(table.nodes[index])
        table.window_first = max(table.window_first, first)

    def _touch(self, node: TrieNode) -> None:
        if node.window >= 0:
            self._left[node] = None
            self._left.move_to_end(node)
