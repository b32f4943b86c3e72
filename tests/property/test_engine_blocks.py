"""Blocks, trie, forks, copy-on-write and swapping against a plain model: the row that each sequence reads anywhere."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
)

from kvstore_engine.blocks.block_table import BlockTable
from kvstore_engine.blocks.compaction import Compactor
from kvstore_engine.blocks.host_pool import HostPool, HostPoolFull, SwappedBlocks, swap_in, swap_out
from kvstore_engine.blocks.space import BlockSpace
from kvstore_engine.blocks.transfers import TransferCosts, count_runs
from kvstore_engine.pool import PoolExhausted
from tests.reference.block_invariants import check_blocks
from tests.reference.examples import examples
from tests.reference.twin_compute import twin_pool

_BLOCKS, _TOKENS = 20, 8


class _Sequence:
    """A sequence and the plain model of it: its tokens, how many are computed, and the row of each position."""

    def __init__(self, tenant: str, tokens: list[int], block_table: BlockTable) -> None:
        self.tenant, self.tokens, self.block_table = tenant, tokens, block_table
        self.computed = 0
        self.rows: list[int] = []
        self.swapped: SwappedBlocks | None = None


class Blocks(RuleBasedStateMachine):
    """Rows are numbers that name the token, its position and who computed it. A shared row is one of several that a
    sequence may rely on, so the model takes over what it first sees there, and it must never change again.
    """

    sequences = Bundle("sequences")
    yielded = Bundle("yielded")

    @initialize()
    def begin(self) -> None:
        self.pool = twin_pool(_BLOCKS, _TOKENS)
        self.space = BlockSpace(self.pool)
        self.host = HostPool(self.pool, 8 * self.pool.payload_bytes(1))
        self.costs = TransferCosts()
        self.live: list[_Sequence] = []
        self.serial = 0

    def _slots(self, block_table: BlockTable, begin: int, end: int) -> npt.NDArray[np.int64]:
        positions = np.arange(begin, end)
        return block_table.ids[positions // _TOKENS].astype(np.int64) * _TOKENS + positions % _TOKENS

    def _rows(self) -> npt.NDArray[np.uint64]:
        rows: npt.NDArray[np.uint64] = self.pool.planes[0].reshape(-1, 16).view(np.uint64)
        return rows

    @rule(
        target=sequences,
        tenant=st.sampled_from(["a", "b"]),
        tokens=st.builds(
            lambda blocks, rest: [token for token in blocks for _ in range(_TOKENS)] + rest,
            st.lists(st.integers(0, 1), max_size=3),
            st.lists(st.integers(0, 1), min_size=1, max_size=9),
        ),
    )
    def claim(self, tenant: str, tokens: list[int]) -> object:
        array = np.array(tokens, np.int32)
        before, price = self.space.available_blocks, self.space.price(tenant, array)
        try:
            block_table = self.space.claim(tenant, array)
        except PoolExhausted:
            assert price > before == self.space.available_blocks
            return multiple()
        assert self.space.available_blocks == before - price
        sequence = _Sequence(tenant, tokens, block_table)
        self.live.append(sequence)
        return sequence

    @rule(sequence=sequences, most=st.integers(1, 12))
    def compute(self, sequence: _Sequence, most: int) -> None:
        """Skip what is there, then compute some tokens, cut at blocks as the engine cuts."""
        if sequence.block_table.count == 0:
            return
        ready = min(self.space.ready_tokens(sequence.block_table, sequence.computed), len(sequence.tokens))
        taken = self._rows()[self._slots(sequence.block_table, sequence.computed, ready), 0]
        for position, row in enumerate(taken.tolist(), sequence.computed):
            assert row // 2**32 == position * 4 + sequence.tokens[position], "a row of another token or place"
            sequence.rows.append(row)
        sequence.computed = ready
        end = min(len(sequence.tokens), ready + most)
        if end < len(sequence.tokens):
            end = end // _TOKENS * _TOKENS
        self._write(sequence, end)

    @rule(sequence=sequences, tokens=st.lists(st.integers(0, 1), min_size=1, max_size=10))
    def decode(self, sequence: _Sequence, tokens: list[int]) -> None:
        self.compute(sequence, len(sequence.tokens))
        if sequence.block_table.count == 0:
            return
        for token in tokens:
            try:
                self.space.extend(sequence.block_table, len(sequence.tokens) + 1)
                self.space.make_writable(sequence.block_table, len(sequence.tokens))
            except PoolExhausted:
                return
            sequence.tokens = [*sequence.tokens, token]
            self._write(sequence, len(sequence.tokens))

    def _write(self, sequence: _Sequence, end: int) -> None:
        begin = sequence.computed
        if end <= begin:
            return
        self.serial += 1
        rows = [(position * 4 + sequence.tokens[position]) * 2**32 + self.serial for position in range(begin, end)]
        self._rows()[self._slots(sequence.block_table, begin, end), 0] = rows
        sequence.rows += rows
        sequence.computed = end
        before = sequence.block_table.blocks
        self.space.seal(sequence.block_table, np.array(sequence.tokens, np.int32), begin, end)
        for index, (old, new) in enumerate(zip(before, sequence.block_table.blocks, strict=True)):
            if old != new:  # an equal block was there already: from now on the sequence reads that one
                first = index * _TOKENS
                slots = self._slots(sequence.block_table, first, first + _TOKENS)
                sequence.rows[first : first + _TOKENS] = self._rows()[slots, 0].tolist()

    @rule(target=sequences, sequence=sequences)
    def fork(self, sequence: _Sequence) -> object:
        self.compute(sequence, len(sequence.tokens))
        if sequence.block_table.count == 0:
            return multiple()
        child = _Sequence(sequence.tenant, list(sequence.tokens), self.space.fork(sequence.block_table))
        child.computed, child.rows = sequence.computed, list(sequence.rows)
        self.live.append(child)
        return child

    @rule(sequence=consumes(sequences))
    def release(self, sequence: _Sequence) -> None:
        if sequence in self.live:
            self.live.remove(sequence)
            self.space.release(sequence.block_table)

    @rule(target=yielded, sequence=consumes(sequences))
    def swap_out(self, sequence: _Sequence) -> object:
        if sequence not in self.live:
            return multiple()
        self.live.remove(sequence)
        before = self.host.used_blocks
        try:
            sequence.swapped = swap_out(
                self.space, self.host, sequence.block_table, sequence.computed, sequence.computed
            )
        except HostPoolFull:
            assert self.host.used_blocks == before
            self.space.release(sequence.block_table)
            return multiple()
        assert self.host.used_blocks - before == -(-sequence.computed // _TOKENS)
        return sequence

    @rule(target=sequences, sequence=consumes(yielded))
    def swap_in(self, sequence: _Sequence) -> object:
        swapped = sequence.swapped
        assert swapped is not None
        price = self.space.price_again(len(sequence.tokens), swapped.path)
        before = self.space.available_blocks
        try:
            sequence.block_table, _ = swap_in(self.space, self.host, swapped, np.array(sequence.tokens, np.int32))
        except PoolExhausted:
            assert price > before == self.space.available_blocks
            self.host.free(swapped.places)
            return multiple()
        assert self.space.available_blocks == before - price
        self.live.append(sequence)
        return sequence

    @precondition(lambda self: self.live)
    @rule(data=st.data(), transfers=st.sampled_from([0.0, 1.0, 1e4]))
    def compact(self, data: st.DataObject, transfers: float) -> None:
        sequence = data.draw(st.sampled_from(self.live))
        before = count_runs(sequence.block_table.ids)
        done = Compactor(self.space, self.costs).compact(sequence.block_table, transfers)
        after = count_runs(sequence.block_table.ids)
        assert (done.runs_before, done.runs_after) == ((before, after) if done.moved_blocks else (0, 0))
        assert before >= after
        assert (done.gain_s > 0.0) == (done.moved_blocks > 0)
        assert transfers or not done.moved_blocks

    @invariant()
    def every_sequence_reads_its_own_rows(self) -> None:
        if hasattr(self, "space"):
            check_blocks(self.space, [sequence.block_table for sequence in self.live])
            for sequence in self.live:
                slots = self._slots(sequence.block_table, 0, sequence.computed)
                assert self._rows()[slots, 0].tolist() == sequence.rows


Blocks.TestCase.settings = settings(max_examples=examples(120), stateful_step_count=30, deadline=None)
TestBlocks = Blocks.TestCase
