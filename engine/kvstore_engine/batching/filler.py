"""Fills the blocks of a sequence that is being restored from leases: before the next step, or beside it.

Owns what a load means to its sequence: how far it is computed, which blocks are ready. It never decides what to load.
Invariants: no byte is read outside a lease; a block that is ready is never written, and becomes ready only once its
lease was valid after the copy; where a load beside a step turns out to be lost, the sequence stands where it stood
before.
"""

from __future__ import annotations

import numpy as np

from kvstore_engine.batching.restoration import Arriving, Restoration
from kvstore_engine.blocks import BlockSpace
from kvstore_engine.restore.copies import BlockCopies, BlockLoad
from kvstore_engine.restore.session import KvLease


class Filler:
    """Into the blocks of `space`, by `copies`. For one thread."""

    def __init__(self, space: BlockSpace, copies: BlockCopies) -> None:
        self._space, self._copies = space, copies

    @property
    def steps_wait(self) -> bool:
        """`begin` may be used: steps wait for what they read."""
        return self._copies.steps_wait

    def fill(self, restoration: Restoration, lease: KvLease, base: int, portion: range) -> bool:
        """Copy the blocks `portion` of the prefix; the lease's first is block `base`. Returns whether the lease was
        valid throughout."""
        if not self._load(restoration, lease, base, portion).finish():
            return False
        self._note(restoration, portion)
        self.pass_copied(restoration)
        return True

    def begin(self, restoration: Restoration, lease: KvLease) -> None:
        """Begin to copy all blocks that are mapped: steps may compute behind them from now on, and `end` says before
        their results are used whether they were right to."""
        sequence, portion = restoration.sequence, range(restoration.next_mapped, restoration.mapped_end)
        computed, furthest = sequence.computed, sequence.furthest
        load = self._load(restoration, lease, 0, portion)
        new = sequence.advance_to(max(computed, portion.stop * restoration.size), "daemon")
        restoration.next_mapped = portion.stop
        restoration.arriving = Arriving(load, portion, computed, furthest, new)

    def end(self, restoration: Restoration) -> bool:
        """Wait for what was begun. Whether it has come; if not, the sequence is computed up to where it was before."""
        arriving, restoration.arriving = restoration.arriving, None
        assert arriving is not None
        sequence = restoration.sequence
        if not arriving.load.finish():
            restoration.next_mapped = arriving.portion.start
            sequence.retreat_to(arriving.computed, arriving.furthest, arriving.new)
            return False
        self._note(restoration, arriving.portion)
        self._space.seal(sequence.held, sequence.tokens, arriving.computed, arriving.portion.stop * restoration.size)
        return True

    def pass_copied(self, restoration: Restoration) -> None:
        """Advance the sequence past the blocks in place that all before them have reached."""
        sequence, size = restoration.sequence, restoration.size
        begin = end = sequence.computed
        while end // size in restoration.copied:
            end = (end // size + 1) * size
        if end > begin:
            sequence.advance_to(end, "daemon")
            self._space.seal(sequence.held, sequence.tokens, begin, end)

    def _load(self, restoration: Restoration, lease: KvLease, base: int, portion: range) -> BlockLoad:
        sequence, pool = restoration.sequence, self._space.pool
        blocks, nodes = sequence.held.blocks, sequence.held.nodes
        per_block = restoration.size // self._space.block_tokens
        whole = []
        for index in portion:
            places = slice(index * per_block, (index + 1) * per_block)
            table = blocks[places]
            present = sum(node.ready for node in nodes[places])  # leading ones: others may have filled some meanwhile
            present = max(present, min(per_block, sequence.computed // self._space.block_tokens - index * per_block))
            if present <= 0:
                whole.append((index - base, table))
            elif present < per_block:
                pool.scatter_part(np.asarray(lease.payload(index - base)), present, table[present:])
        return self._copies.load(lease, whole)

    def _note(self, restoration: Restoration, portion: range) -> None:
        """The blocks of `portion` are in place."""
        restoration.note_copied(portion)
        nodes, per_block = restoration.sequence.held.nodes, restoration.size // self._space.block_tokens
        for index in portion:
            last = (index + 1) * per_block - 1
            if last < len(nodes):
                nodes[last].stored = True
