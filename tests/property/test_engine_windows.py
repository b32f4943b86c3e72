"""Windowed layers with blocks of their own, against a contiguous reference: the same logits, and the rows of every
window, after random appends, forks, shared prefixes and shortages.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from kvstore_engine.blocks.block_table import BlockTable
from kvstore_engine.blocks.space import BlockSpace
from kvstore_engine.executor import Executor
from kvstore_engine.executors.sizes import StepSizes
from kvstore_engine.gguf import GGUFFile
from kvstore_engine.graph import SequenceSlice
from kvstore_engine.kernels import select_kernels
from kvstore_engine.model.weights import load_model
from kvstore_engine.pool import BlockPool, PoolExhausted
from tests.reference.block_invariants import check_blocks
from tests.reference.examples import examples
from tests.reference.make_gguf import TinyModel, write_model
from tests.reference.twin_compute import twin_config

_TOKENS, _WINDOW = 8, 13
_MODEL = TinyModel(architecture="gemma3", layers=7, metadata={"llama.attention.sliding_window": 40})


@pytest.mark.parametrize("quantisation", ["f32", "q8_0"])
def test_logits_have_the_bits_of_a_pool_that_keeps_everything(tmp_path: Path, quantisation: str) -> None:
    path = write_model(tmp_path / "model.gguf", replace(_MODEL, quantisation=quantisation))
    tokens = np.random.default_rng(3).integers(0, _MODEL.vocabulary, 200).astype(np.int32)
    cuts = [0, 64, 128, 192, *range(193, 201)]
    with load_model(GGUFFile.open(path), context=256) as model:
        whole, paged = BlockPool(model.config, 13), BlockPool(model.config, 13, window_blocks=9)
        assert paged.window is not None
        assert (paged.layers, paged.window.layers) == (1, 6)
        assert paged.planes.nbytes + paged.window.planes.nbytes < 0.75 * whole.planes.nbytes
        space = BlockSpace(paged)
        assert space.windows is not None
        table = space.claim("", tokens)
        sizes = StepSizes(threads=1, max_context=256)
        with Executor(model, whole, sizes) as reference, Executor(model, paged, sizes) as executor:
            for begin, end in pairwise(cuts):
                piece = SequenceSlice(tokens[begin:end], begin, np.arange(13, dtype=np.int32), "all")
                space.windows.prepare(table, begin, end)
                within = len([index for index in table.windows if index >= table.window_first])
                assert within <= -(-39 // 16) + 1 + -(-(end - begin) // 16)
                own = replace(piece, block_table=table.ids, window_table=table.window_ids())
                np.testing.assert_array_equal(executor.forward([own]), reference.forward([piece]))
            with pytest.raises(ValueError, match="blocks of their own"):
                executor.forward([piece])
            with pytest.raises(ValueError, match=r"0\.\.8"):
                executor.forward([replace(own, window_table=np.full(13, 9, np.int32))])


class _Sequence:
    def __init__(self, tokens: list[int], table: BlockTable) -> None:
        self.tokens, self.table, self.computed = tokens, table, 0
        self.rows: list[int] = []


class Windows(RuleBasedStateMachine):
    """A row names its token and its position. Every sequence must find the rows of its window, however others go on,
    and only blocks that nobody holds may be given up.
    """

    sequences = Bundle("sequences")

    @initialize(blocks=st.sampled_from([8, 12, 30]), sharing=st.booleans())
    def begin(self, blocks: int, sharing: bool) -> None:
        config = replace(twin_config(), layers=2, windows=(0, _WINDOW))
        pool = BlockPool(config, 30, block_tokens=_TOKENS, kernels=select_kernels("reference"), window_blocks=blocks)
        self.space = BlockSpace(pool, sharing=sharing)
        assert self.space.windows is not None and pool.window is not None
        self.windows, self.rows = self.space.windows, pool.window.planes[0].reshape(-1, 16).view(np.uint64)
        self.live: list[_Sequence] = []
        self.pinned: list[int] = []

    def _slots(self, table: BlockTable, begin: int, end: int) -> npt.NDArray[np.int64]:
        positions = np.arange(begin, end)
        return table.window_ids()[positions // _TOKENS].astype(np.int64) * _TOKENS + positions % _TOKENS

    @rule(
        target=sequences,
        tokens=st.builds(
            lambda blocks, rest: [token for token in blocks for _ in range(_TOKENS)] + rest,
            st.lists(st.integers(0, 1), max_size=5),
            st.lists(st.integers(0, 1), min_size=1, max_size=9),
        ),
    )
    def claim(self, tokens: list[int]) -> object:
        try:
            table = self.space.claim("", np.array(tokens, np.int32))
        except PoolExhausted:
            table = BlockTable("")
        self.live.append(_Sequence(tokens, table))
        return self.live[-1]

    @rule(sequence=sequences, most=st.integers(1, 24))
    def compute(self, sequence: _Sequence, most: int) -> None:
        table, count = sequence.table, len(sequence.tokens)
        if not table.count:
            return
        ready = self.space.resume(table, sequence.computed, count - 1)
        sequence.rows += [self._row(sequence, position) for position in range(sequence.computed, ready)]
        sequence.computed = ready
        index = ready // _TOKENS
        if index < len(table.nodes) and table.nodes[index].ready:
            if ready == count - 1:
                return  # its last row would be computed into borrowed blocks
            before = self.space.available_blocks
            try:
                self.space.unshare(table, index)
            except PoolExhausted:
                assert self.space.available_blocks == before
                return
        end = min(count, ready + most)
        self._write(sequence, end if end == count else end // _TOKENS * _TOKENS)

    @rule(sequence=sequences, tokens=st.lists(st.integers(0, 1), min_size=1, max_size=10))
    def decode(self, sequence: _Sequence, tokens: list[int]) -> None:
        self.compute(sequence, len(sequence.tokens))
        for token in tokens:
            count = len(sequence.tokens)
            if not sequence.table.count or sequence.computed < count:
                return
            try:
                self.space.extend(sequence.table, count + 1)
                self.space.make_writable(sequence.table, count)
            except PoolExhausted:
                return
            sequence.tokens = [*sequence.tokens, token]
            self._write(sequence, count + 1)

    def _row(self, sequence: _Sequence, position: int) -> int:
        return (position * 4 + sequence.tokens[position]) * 2**8 + 1

    def _write(self, sequence: _Sequence, end: int) -> None:
        begin = sequence.computed
        if end <= begin:
            return
        try:
            self.windows.prepare(sequence.table, begin, end)
        except PoolExhausted:
            sequence.tokens = sequence.tokens[: max(begin, 1)] if begin == len(sequence.tokens) - 1 else sequence.tokens
            return
        rows = [self._row(sequence, position) for position in range(begin, end)]
        self.rows[self._slots(sequence.table, begin, end), 0] = rows
        sequence.rows += rows
        sequence.computed = end
        self.space.seal(sequence.table, np.array(sequence.tokens, np.int32), begin, end)

    @rule(sequence=sequences, blocks=st.integers(1, 5))
    def restore_in_vain(self, sequence: _Sequence, blocks: int) -> None:
        """Prepare a restoration whose lease then ends, or that finds no room."""
        end = min(sequence.table.count, sequence.computed // _TOKENS + blocks) * _TOKENS
        if end <= sequence.computed:
            return
        with contextlib.suppress(PoolExhausted):
            self.windows.references.release(self.windows.prepare_restored(sequence.table, end).values())

    @rule(target=sequences, sequence=sequences)
    def fork(self, sequence: _Sequence) -> object:
        child = _Sequence(list(sequence.tokens), self.space.fork(sequence.table))
        child.computed, child.rows = sequence.computed, list(sequence.rows)
        self.live.append(child)
        return child

    @rule(sequence=consumes(sequences))
    def release(self, sequence: _Sequence) -> None:
        self.live.remove(sequence)
        self.space.release(sequence.table)

    @rule(sequence=sequences, data=st.data())
    def pin(self, sequence: _Sequence, data: st.DataObject) -> None:
        """Pin a block like a store that reads it: the block must keep its rows until it is unpinned."""
        numbers = range(sequence.computed // _TOKENS)
        blocks = [block for index in numbers if (block := self.windows.block(sequence.table, index)) is not None]
        if blocks and not self.windows.is_pinned:
            self.pinned.append(data.draw(st.sampled_from(blocks)))
            self.windows.pin(self.pinned[-1:])

    @rule()
    def unpin(self) -> None:
        self.windows.unpin(self.pinned)
        self.pinned = []

    @invariant()
    def every_window_is_there(self) -> None:
        if not hasattr(self, "space"):
            return
        check_blocks(self.space, [sequence.table for sequence in self.live], windows=self.pinned)
        for sequence in self.live:
            first = max(0, sequence.computed - _WINDOW + 1)
            needed = self.windows.needed(sequence.computed)
            assert not sequence.computed or {*needed} <= {*sequence.table.windows}
            slots = self._slots(sequence.table, first, sequence.computed)
            assert self.rows[slots, 0].tolist() == sequence.rows[first:]
            for index, node in enumerate(sequence.table.nodes):
                if node.window >= 0:
                    begin = index * _TOKENS
                    slots = node.window * _TOKENS + np.arange(_TOKENS)
                    assert self.rows[slots, 0].tolist() == [self._row(sequence, begin + at) for at in range(_TOKENS)]


Windows.TestCase.settings = settings(max_examples=examples(120), stateful_step_count=40, deadline=None)
TestWindows = Windows.TestCase
