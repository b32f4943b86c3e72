"""The choice of pages that a decode row reads: the bounds hold, the choice is theirs, and attention reads it alone."""

import ctypes as ct
import platform

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore_engine.ggml import Tensor
from kvstore_engine.kernels import Kernels, select_kernels
from kvstore_engine.kernels.elements import KV_TYPES, widen_rows
from kvstore_engine.kernels.foreign import array_at
from kvstore_engine.kernels.layout import ITEM_FIELDS, AttentionShape, LayerAttention, StepMemory
from kvstore_engine.kernels.page_bounds import PageBounds
from kvstore_engine.kernels.reference import paged_attention
from kvstore_engine.page_selection import LEAST_PAGES, PAGE_TOKENS, RECENT_PAGES
from tests.reference.compilers import native_kernels
from tests.reference.examples import examples

_OPERATION = ct.CFUNCTYPE(None, ct.c_void_p, ct.c_int, ct.c_int, ct.c_void_p)
Floats = npt.NDArray[np.float32]
_ISAS = {"x86_64": ["avx512", "avx2", "baseline"], "aarch64": ["neon"]}.get(platform.machine(), ["baseline"])


class _Layer:
    """A layer with K and V of sequences in scattered blocks, and queries for (rows, context, pages to read) of each."""

    def __init__(self, kernels: Kernels, shape: AttentionShape, steps: list[tuple[int, int, int]], seed: int) -> None:
        self.kernels, self.shape, self.steps = kernels, shape, steps
        random = np.random.default_rng(seed)
        counts = [-(-context // shape.block_tokens) for _, context, _ in steps]
        blocks, width = sum(counts), shape.kv_heads * shape.head_dim
        floats = random.standard_normal((2, blocks, shape.block_tokens, width), dtype=np.float32)
        stored = {
            "f16": lambda: floats.astype(np.float16).view(np.uint8),
            "bf16": lambda: (floats.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8),
            "f32": lambda: floats.view(np.uint8),
        }
        name = next(name for name, number in KV_TYPES.items() if number == shape.kv_type)
        if name in stored:
            self.planes = np.ascontiguousarray(stored[name]())
        else:  # any bytes are numbers, with a sound scale in front
            size = shape.row_bytes * 32 // width
            self.planes = random.integers(0, 256, (2, blocks, shape.block_tokens, shape.row_bytes), np.uint8)
            scales = (0.02 * random.standard_normal((*self.planes.shape[:3], width // 32))).astype(np.float16)
            rows = self.planes.reshape(*self.planes.shape[:3], width // 32, size)
            rows[..., :2] = scales[..., None].view(np.uint8).reshape(*scales.shape, 2)
        self.tables = np.split(random.permutation(blocks).astype(np.int32), np.cumsum(counts)[:-1])
        rows = sum(rows for rows, _, _ in steps)
        self.queries = 2 * random.standard_normal((rows, shape.query_heads, shape.head_dim), dtype=np.float32)
        self.bounds = PageBounds(1, blocks, shape.kv_heads, shape.head_dim)
        self._room = self.bounds.beside(lambda size: memoryview(bytearray(size)))(1)

    def run(self, threads: int = 2, pages: list[int] | None = None) -> list[Floats]:
        """Choose, attend, and return each sequence's rows."""
        most = max(len(table) for table in self.tables)
        memory = self.memory = StepMemory(
            self.shape,
            [(self.planes[0].ctypes.data, self.planes[1].ctypes.data)],
            max_sequences=len(self.steps),
            max_blocks=most,
            bounds=self.bounds,
        )
        first = 0
        for index, ((rows, context, read), table) in enumerate(zip(self.steps, self.tables, strict=True)):
            memory.sequences[index] = first, rows, context, read if pages is None else pages[index]
            memory.tables[index, : len(table)] = table
            first += rows
        output = np.full_like(self.queries, np.nan)
        source, destination = Tensor(data=self.queries.ctypes.data), Tensor(data=output.ctypes.data)
        destination.src[0] = ct.addressof(source)
        memory.begin(len(self.steps), threads)
        for address in (self.kernels.page_choice_address, self.kernels.attention_address):
            for thread in range(threads):
                _OPERATION(address)(ct.addressof(destination), thread, threads, memory.layer_address(0))
        return np.split(output, np.cumsum([rows for rows, _, _ in self.steps])[:-1])

    def widened(self, index: int) -> Floats:
        """Return K and V of a sequence, [2, tokens, kv_heads, head_dim]."""
        context = self.steps[index][1]
        rows = self.planes[:, self.tables[index]].reshape(2, -1, self.shape.row_bytes)[:, :context]
        wide = widen_rows(np.ascontiguousarray(rows).reshape(-1, self.shape.row_bytes), self.shape.kv_type)
        return wide.reshape(2, context, self.shape.kv_heads, self.shape.head_dim)

    def bounds_of(self, index: int, block: int) -> npt.NDArray[np.float64]:
        """Return the kept bounds of a block of a sequence, [kv_heads, 2, head_dim]."""
        place = self.tables[index][block]
        assert self.bounds.known[place].all()
        return (self.bounds.values[0, place].astype(np.uint32) << 16).view(np.float32).astype(np.float64)

    def spoil(self, index: int, page: int, head: int) -> None:
        """Overwrite a head's part of a page of K and V with NaN."""
        part = self.shape.row_bytes // self.shape.kv_heads
        for token in range(page * PAGE_TOKENS, (page + 1) * PAGE_TOKENS):
            block, within = self.tables[index][token // self.shape.block_tokens], token % self.shape.block_tokens
            self.planes[:, block, within, head * part : (head + 1) * part] = 0xFF


@st.composite
def _shapes(draw: st.DrawFn) -> AttentionShape:
    head_dim, heads = draw(st.sampled_from([8, 24, 64, 256])), draw(st.integers(1, 3))
    kinds = sorted(KV_TYPES) if heads * head_dim % 32 == 0 else ["bf16", "f16", "f32"]
    kind = draw(st.sampled_from(kinds))
    group = draw(st.sampled_from([1, 3, 50]))
    return AttentionShape(heads * group, heads, head_dim, draw(st.sampled_from([8, 16, 32])), KV_TYPES[kind])


def _estimates(layer: _Layer, index: int, head: int) -> npt.NDArray[np.float64]:
    """Return the attention that the definition expects of the pages to choose from, for the only row of a sequence."""
    _, context, _ = layer.steps[index]
    pages = -(-context // PAGE_TOKENS)
    row = sum(rows for rows, _, _ in layer.steps[:index])
    group = layer.shape.group
    queries = layer.queries[row, head * group : (head + 1) * group].astype(np.float64)
    scores = np.full((group, pages), -np.inf)
    each = PAGE_TOKENS // layer.shape.block_tokens
    for page in range(1, pages - RECENT_PAGES):
        bounds = np.stack([layer.bounds_of(index, block)[head] for block in range(page * each, (page + 1) * each)])
        least, greatest = bounds[:, 0].min(axis=0), bounds[:, 1].max(axis=0)
        scores[:, page] = np.maximum(queries * least, queries * greatest).sum(axis=1)
    weights = np.exp((scores - scores.max(axis=1, keepdims=True)) * layer.shape.head_dim**-0.5)
    estimates: npt.NDArray[np.float64] = (weights / weights.sum(axis=1, keepdims=True)).sum(axis=0)
    return estimates[1:-RECENT_PAGES]


@settings(deadline=None, max_examples=examples(25))
@given(
    shape=_shapes(),
    context=st.integers(270, 640),
    seed=st.integers(0, 99),
)
def test_no_key_of_a_block_scores_above_its_bounds(shape: AttentionShape, context: int, seed: int) -> None:
    layer = _Layer(select_kernels("cpp"), shape, [(1, context, LEAST_PAGES)], seed)
    layer.run()
    keys, group, size = layer.widened(0)[0].astype(np.float64), shape.group, shape.block_tokens
    each = PAGE_TOKENS // size
    for block in range(each, (-(-context // PAGE_TOKENS) - RECENT_PAGES) * each):
        held = keys[block * size : (block + 1) * size]
        bounds = layer.bounds_of(0, block)
        least, greatest = held.min(axis=0), held.max(axis=0)
        assert (bounds[:, 0] <= least).all() and (bounds[:, 1] >= greatest).all()
        np.testing.assert_allclose(bounds, np.stack([least, greatest], axis=1), rtol=2**-7)
        for head in range(shape.kv_heads):
            queries = layer.queries[0, head * group : (head + 1) * group].astype(np.float64)
            allowed = np.maximum(queries * bounds[head, 0], queries * bounds[head, 1]).sum(axis=1)
            assert (allowed + 1e-9 >= (queries @ held[:, head].T).max(axis=1)).all()


@settings(deadline=None, max_examples=examples(25))
@given(
    shape=_shapes(), context=st.integers(300, 960), more=st.integers(0, 9),
    threads=st.integers(1, 3), seed=st.integers(0, 99),
)  # fmt: skip
def test_a_row_reads_the_chosen_pages_and_no_other(
    shape: AttentionShape, context: int, more: int, threads: int, seed: int
) -> None:
    """The first page, the last six, and those with the best bounds: the rest may be overwritten with NaN."""
    pages = -(-context // PAGE_TOKENS)
    wanted = min(LEAST_PAGES + more, pages - 1)
    layer = _Layer(select_kernels("cpp"), shape, [(1, context, wanted)], seed)
    (before,) = layer.run(threads)
    whole = layer.widened(0)
    for head in range(shape.kv_heads):
        chosen = layer.memory.chosen[0, head, :pages].astype(np.bool_)
        assert chosen[0] and chosen[-RECENT_PAGES:].all() and chosen.sum() == wanted
        estimates, among = _estimates(layer, 0, head), chosen[1:-RECENT_PAGES]
        assert estimates[among].min() * (1 + 1e-3) + 1e-37 >= estimates[~among].max()
        kept = np.repeat(chosen, PAGE_TOKENS)[:context]
        group = slice(head * shape.group, (head + 1) * shape.group)
        keys, values = whole[:, kept, head : head + 1]
        seen = np.array([kept.sum()], np.int32)
        expected = paged_attention(layer.queries[:, group], keys, values, seen, LayerAttention())
        np.testing.assert_allclose(before[:, group], expected, atol=5e-5, rtol=5e-5)
        if shape.head_dim % 32 == 0:  # else a head's bytes are not apart in every format
            for page in np.flatnonzero(~chosen):
                layer.spoil(0, int(page), head)
    np.testing.assert_array_equal(layer.run(threads)[0], before)


@settings(deadline=None, max_examples=examples(15))
@given(shape=_shapes(), threads=st.integers(1, 3), seed=st.integers(0, 99))
def test_all_pages_chosen_give_the_bits_of_no_choice_and_company_changes_none(
    shape: AttentionShape, threads: int, seed: int
) -> None:
    """Prompts, rows that read everything, and rows that select, side by side: each as in a step of its own."""
    steps = [(7, 300, 0), (1, 900, LEAST_PAGES), (1, 650, 0), (1, 1300, 2 * LEAST_PAGES), (1, 700, 0)]
    kernels = select_kernels("cpp")
    mixed = _Layer(kernels, shape, steps, seed)
    together = mixed.run(threads)
    for index, (rows, context, wanted) in enumerate(steps):
        alone = _Layer(kernels, shape, [steps[index]], seed)
        alone.planes, alone.tables = mixed.planes, [mixed.tables[index]]
        alone.bounds = PageBounds(1, mixed.planes.shape[1], shape.kv_heads, shape.head_dim)
        alone.bounds.beside(lambda size: memoryview(bytearray(size)))(1)
        first = sum(count for count, _, _ in steps[:index])
        alone.queries = np.ascontiguousarray(mixed.queries[first : first + rows])
        np.testing.assert_array_equal(alone.run(1)[0], together[index])
        if rows == 1:
            (every,) = alone.run(threads, [-(-context // PAGE_TOKENS)])
            np.testing.assert_array_equal(every, alone.run(1, [0])[0])
            assert not wanted or not np.array_equal(every, together[index])


def test_heads_share_an_item_only_while_their_rows_read_all_pages() -> None:
    layer = _Layer(select_kernels("cpp"), AttentionShape(9, 3, 64, 16, KV_TYPES["f16"]), [(1, 400, 0)] * 8, seed=1)
    layer.run()
    step, heads = layer.memory.step, []
    for pages in (0, LEAST_PAGES):
        layer.memory.sequences[:, 3] = pages
        layer.memory.begin(8, 2)
        heads.append(array_at(step.items, np.int32, step.item_count, ITEM_FIELDS)[:, 10].tolist())
    assert heads == [[3] * 8, [1] * 24]


@pytest.mark.parametrize("isa", _ISAS)
def test_every_instruction_set_chooses_alike(isa: str) -> None:
    if isa not in native_kernels("system").isas:
        pytest.skip(f"this machine has no {isa}")
    for kind in sorted(KV_TYPES):
        shape = AttentionShape(6, 2, 64, 16, KV_TYPES[kind])
        both = native_kernels("system", isa), select_kernels("cpp")
        layers = [_Layer(kernels, shape, [(1, 1900, 20)], 3) for kernels in both]
        for layer in layers:
            layer.run()
        np.testing.assert_array_equal(layers[0].memory.chosen, layers[1].memory.chosen)
        np.testing.assert_array_equal(layers[0].bounds.values, layers[1].bounds.values)
