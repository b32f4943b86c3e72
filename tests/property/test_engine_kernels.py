"""Paged attention, each implementation, against its definition; and that a row's bits depend on nothing else."""

import ctypes as ct
import platform
import threading
from dataclasses import dataclass, replace
from itertools import pairwise, product

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore_engine.ggml import Tensor
from kvstore_engine.kernels import Kernels, select_kernels
from kvstore_engine.kernels.build import build_kernels
from kvstore_engine.kernels.elements import KV_TYPES, widen_rows
from kvstore_engine.kernels.layout import (
    ROWS_PER_ITEM,
    SPAN_TOKENS,
    AttentionShape,
    LayerAttention,
    StepMemory,
    plan_work,
)
from kvstore_engine.kernels.reference import paged_attention
from kvstore_engine.kernels.selection import NativeKernels
from kvstore_proto.ggml_types import Q4_0, Q8_0, TENSOR_TYPES
from tests.reference.compilers import Compiler, native_kernels
from tests.reference.examples import examples

_OPERATION = ct.CFUNCTYPE(None, ct.c_void_p, ct.c_int, ct.c_int, ct.c_void_p)
FloatArray = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]
_PLAIN = LayerAttention()
_GARBAGE = 0xFF  # NaN in each float type, and a NaN scale of a quantised block


@dataclass(frozen=True)
class _Sequence:
    """`queries` at the end of a context whose stored K and V, uint8 [tokens, row bytes], are in blocks of `table`."""

    queries: FloatArray
    keys: Bytes
    values: Bytes
    table: npt.NDArray[np.int32]

    def expected(self, shape: AttentionShape, kind: LayerAttention) -> FloatArray:
        rows, context = len(self.queries), len(self.keys)
        seen = np.arange(context - rows + 1, context + 1, dtype=np.int32)
        keys, values = (
            widen_rows(plane, shape.kv_type).reshape(context, shape.kv_heads, shape.head_dim)
            for plane in (self.keys, self.values)
        )
        return paged_attention(self.queries, keys, values, seen, kind)

    def part(self, first: int, last: int) -> "_Sequence":
        """A step that computes only the queries [first, last)."""
        end = len(self.keys) - len(self.queries) + last
        return replace(self, queries=self.queries[first:last], keys=self.keys[:end], values=self.values[:end])


def _stored(random: np.random.Generator, shape: AttentionShape, tokens: int) -> Bytes:
    """Random K or V rows as ggml would have written them."""
    width = shape.kv_heads * shape.head_dim
    if shape.kv_type in (Q8_0, Q4_0):
        made = random.integers(0, 256, (tokens, shape.row_bytes), np.uint8)
        blocks = made.reshape(tokens, -1, TENSOR_TYPES[shape.kv_type].block_bytes)
        step = 0.02 if shape.kv_type == Q8_0 else 0.2
        scales = (step * random.standard_normal(blocks.shape[:2])).astype(np.float16)
        blocks[:, :, :2] = scales[:, :, None].view(np.uint8).reshape(*scales.shape, 2)
        return made
    floats = random.standard_normal((tokens, width), dtype=np.float32)
    if shape.kv_type == KV_TYPES["f16"]:
        return floats.astype(np.float16).view(np.uint8)
    if shape.kv_type == KV_TYPES["bf16"]:
        return (floats.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    return floats.view(np.uint8)


def _sequences(shape: AttentionShape, lengths: list[tuple[int, int]], seed: int) -> list[_Sequence]:
    """One sequence for each (rows, context before them), with block tables permuted across all of them."""
    random = np.random.default_rng(seed)
    blocks = [-(-(rows + before) // shape.block_tokens) for rows, before in lengths]
    ids = random.permutation(sum(blocks)).astype(np.int32)
    made = []
    for (rows, before), table in zip(lengths, np.split(ids, np.cumsum(blocks)[:-1]), strict=True):
        queries = 2 * random.standard_normal((rows, shape.query_heads, shape.head_dim), dtype=np.float32)
        keys, values = (_stored(random, shape, rows + before) for _ in range(2))
        made.append(_Sequence(queries, keys, values, table))
    return made


def _visible(kind: LayerAttention, rows: int, context: int) -> npt.NDArray[np.int64]:
    """The positions that any of the last `rows` tokens sees."""
    position = np.arange(context)
    first = context - rows + 1 - kind.window if kind.window else 0
    return position[(position < kind.sink_tokens) | (position >= first)]


def _run(
    kernels: Kernels,
    shape: AttentionShape,
    sequences: list[_Sequence],
    threads: int,
    kind: LayerAttention = _PLAIN,
    *,
    at_once: bool = False,
) -> list[FloatArray]:
    """Put what may be seen into a pool that is garbage everywhere else, and call the operation as ggml would."""
    blocks = sum(len(sequence.table) for sequence in sequences)
    planes = np.full((2, blocks, shape.block_tokens, shape.row_bytes), _GARBAGE, np.uint8)
    memory = StepMemory(
        shape,
        [(planes[0].ctypes.data, planes[1].ctypes.data)],
        max_sequences=len(sequences),
        max_blocks=blocks,
        attention=[kind],
    )
    first = 0
    for index, sequence in enumerate(sequences):
        rows, context = len(sequence.queries), len(sequence.keys)
        position = _visible(kind, rows, context)
        slot = sequence.table[position // shape.block_tokens], position % shape.block_tokens
        planes[0][slot], planes[1][slot] = sequence.keys[position], sequence.values[position]
        memory.sequences[index, :3] = first, rows, context
        memory.tables[index, : len(sequence.table)] = sequence.table
        first += rows
    queries = np.ascontiguousarray(np.concatenate([sequence.queries for sequence in sequences]))
    output = np.full_like(queries, np.nan)
    source, destination = Tensor(data=queries.ctypes.data), Tensor(data=output.ctypes.data)
    destination.src[0] = ct.addressof(source)
    operation = _OPERATION(kernels.attention_address)
    memory.begin(len(sequences), threads)
    calls = [
        threading.Thread(target=operation, args=(ct.addressof(destination), thread, threads, memory.layer_address(0)))
        for thread in range(threads)
    ]
    for call in calls:
        call.start()
        if not at_once:
            call.join()
    for call in calls:
        call.join()
    return np.split(output, np.cumsum([len(sequence.queries) for sequence in sequences])[:-1])


def _head_dims(kv_heads: int, kv_type: int) -> st.SearchStrategy[int]:
    whole = TENSOR_TYPES[kv_type].block_elements
    return st.sampled_from([size for size in (8, 24, 64, 80, 128, 256) if kv_heads * size % whole == 0])


@st.composite
def _shapes(draw: st.DrawFn) -> AttentionShape:
    kv_heads, kv_type = draw(st.integers(1, 4)), draw(st.sampled_from(sorted(KV_TYPES.values())))
    if kv_type in (Q8_0, Q4_0) and kv_heads == 3:
        kv_heads = 4
    head_dim = draw(_head_dims(kv_heads, kv_type))
    group, block = draw(st.sampled_from([1, 2, 3, 8, 50])), draw(st.sampled_from([8, 16, 40, 256]))
    return AttentionShape(kv_heads * group, kv_heads, head_dim, block, kv_type)


_KINDS = st.builds(
    LayerAttention,
    window=st.sampled_from([0, 0, 1, 5, 33, 64, 300]),
    softcap=st.sampled_from([0.0, 0.0, 3.0, 50.0]),
    scale=st.sampled_from([0.0, 0.0, 0.3]),
    sink_tokens=st.sampled_from([0, 0, 1, 4, 40]),
)
_LENGTHS = st.lists(
    st.one_of(
        st.tuples(st.integers(1, 40), st.integers(0, 90)),
        st.tuples(st.integers(1, 9), st.integers(SPAN_TOKENS - 9, 3 * SPAN_TOKENS)),
    ),
    min_size=1,
    max_size=4,
)


@pytest.mark.parametrize("name", ["cpp", "reference"])
@settings(deadline=None, max_examples=examples(40))
@given(shape=_shapes(), kind=_KINDS, lengths=_LENGTHS, threads=st.integers(1, 3), seed=st.integers(0, 9))
def test_agrees_with_the_definition(
    name: str,
    shape: AttentionShape,
    kind: LayerAttention,
    lengths: list[tuple[int, int]],
    threads: int,
    seed: int,
) -> None:
    sequences = _sequences(shape, lengths, seed)
    results = _run(select_kernels(name), shape, sequences, threads, kind)
    for result, sequence in zip(results, sequences, strict=True):
        np.testing.assert_allclose(result, sequence.expected(shape, kind), atol=5e-5, rtol=5e-5)


@settings(deadline=None, max_examples=examples(25))
@given(
    shape=_shapes(),
    kind=_KINDS,
    rows=st.integers(2, 60),
    before=st.sampled_from([0, 1, 31, 70, SPAN_TOKENS - 3, 2 * SPAN_TOKENS]),
    cut=st.integers(1, 59),
    threads=st.integers(1, 4),
)
def test_a_rows_bits_do_not_depend_on_the_batch(
    shape: AttentionShape, kind: LayerAttention, rows: int, before: int, cut: int, threads: int
) -> None:
    """The whole at once, cut in two steps, the last row alone, contexts cut among threads or not: the same bits."""
    whole = _sequences(shape, [(rows, before)], seed=1)[0]
    kernels = select_kernels("cpp")
    (together,) = _run(kernels, shape, [whole], 1, kind)
    cut = min(cut, rows - 1)
    for first, last in ((0, cut), (cut, rows), (rows - 1, rows), (0, rows)):
        (alone,) = _run(kernels, shape, [whole.part(first, last)], threads, kind)
        np.testing.assert_array_equal(alone, together[first:last])


def test_threads_that_share_a_long_context_give_the_bits_of_one() -> None:
    shape = AttentionShape(6, 2, 64, 16, KV_TYPES["f16"])
    sequences = _sequences(shape, [(1, 3000), (5, 1100), (40, 700)], seed=3)
    kernels = select_kernels("cpp")
    alone = _run(kernels, shape, sequences, 1)
    for _ in range(5):
        shared = _run(kernels, shape, sequences, 4, at_once=True)
        for one, other in zip(alone, shared, strict=True):
            np.testing.assert_array_equal(one, other)


_ISAS = {"x86_64": ["avx512", "avx2", "baseline"], "aarch64": ["neon"]}.get(platform.machine(), ["baseline"])


@pytest.mark.parametrize("compiler", ["system", pytest.param("zig", marks=pytest.mark.slow)])
@pytest.mark.parametrize("isa", _ISAS)
@settings(deadline=None, max_examples=examples(20))
@given(shape=_shapes(), kind=_KINDS, lengths=_LENGTHS)
def test_every_instruction_set_agrees(
    compiler: Compiler, isa: str, shape: AttentionShape, kind: LayerAttention, lengths: list[tuple[int, int]]
) -> None:
    """Instruction sets agree with the definition to rounding; and sets with fused multiply-add agree with one another
    to the bit: a store may hold blocks of all.
    """
    if isa not in native_kernels(compiler).isas:
        assert isa not in native_kernels("system").isas
        pytest.skip(f"this machine has no {isa}")
    kernels = native_kernels(compiler, isa)
    sequences = _sequences(shape, lengths, seed=5)
    results = _run(kernels, shape, sequences, 2, kind)
    best = _run(select_kernels("cpp"), shape, sequences, 1, kind)
    for result, wanted, sequence in zip(results, best, sequences, strict=True):
        np.testing.assert_allclose(result, sequence.expected(shape, kind), atol=5e-5, rtol=5e-5)
        if isa != "baseline":
            np.testing.assert_array_equal(result, wanted)


def test_an_instruction_set_that_is_not_here_is_refused() -> None:
    with pytest.raises(OSError, match="usable: "):
        NativeKernels(build_kernels(), "mmx")


@given(lengths=_LENGTHS, group=st.integers(1, 60), kv_heads=st.integers(1, 4), threads=st.integers(1, 8))
def test_work_items_cover_every_query_of_every_head_and_its_context_once(
    lengths: list[tuple[int, int]], group: int, kv_heads: int, threads: int
) -> None:
    sequences = np.array([(0, rows, rows + before, 0) for rows, before in lengths], np.int32)
    plan = plan_work(sequences, kv_heads=kv_heads, group=group, threads=threads)
    covered: dict[tuple[int, int, int], list[tuple[int, int]]] = {}
    records: list[tuple[int, int]] = []
    finishing: dict[int, list[int]] = {}
    for sequence, head, first, queries, begin, end, split, tile, partial, last, heads in plan.items[:, :11].tolist():
        assert queries <= max(1, ROWS_PER_ITEM // group) and (heads == 1 or heads * queries * group <= ROWS_PER_ITEM)
        seen = sequences[sequence, 2] - sequences[sequence, 1] + first + queries
        spans = (begin, end) if split else (0, -(-seen // SPAN_TOKENS))
        for query, each in product(range(queries), range(head, head + heads)):
            covered.setdefault((sequence, each, first + query), []).append(spans)
        if split:
            assert last == -(-seen // SPAN_TOKENS) and last >= end
            records += [
                (partial + span * queries * group * heads, queries * group * heads) for span in range(begin, end)
            ]
            finishing.setdefault(tile, []).append(split)
    assert len(covered) == sum(rows for rows, _ in lengths) * kv_heads
    for (sequence, _, query), parts in covered.items():
        parts.sort()
        position = sequences[sequence, 2] - sequences[sequence, 1] + query
        assert parts[0][0] == 0 and parts[-1][1] * SPAN_TOKENS > position
        assert all(left[1] == right[0] for left, right in pairwise(parts))
    records.sort()
    assert all(left + rows <= right for (left, rows), (right, _) in pairwise(records))
    assert all(first >= 0 and first + rows <= plan.partial_rows for first, rows in records)
    assert sorted(finishing) == list(range(plan.split_tiles))
    assert all(parts == [len(parts)] * len(parts) for parts in finishing.values())
