"""Paged attention, each implementation, against its definition; and that rows are independent."""

import ctypes as ct
import platform
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore_engine.ggml import Tensor
from kvstore_engine.kernels import Kernels, select_kernels
from kvstore_engine.kernels.build import build_kernels
from kvstore_engine.kernels.layout import AttentionShape, StepMemory, work_items
from kvstore_engine.kernels.native import NativeKernels
from kvstore_engine.kernels.reference import paged_attention

_OPERATION = ct.CFUNCTYPE(None, ct.c_void_p, ct.c_int, ct.c_int, ct.c_void_p)
FloatArray = npt.NDArray[np.float32]
_DTYPES = {2: np.float16, 4: np.float32}


@dataclass
class _Sequence:
    """`rows` queries at the end of a context of `context` tokens, whose K/V lie in the blocks of `table`."""

    queries: FloatArray
    keys: FloatArray
    values: FloatArray
    table: npt.NDArray[np.int32]

    @property
    def expected(self) -> FloatArray:
        rows, context = len(self.queries), len(self.keys)
        seen = np.arange(context - rows + 1, context + 1, dtype=np.int32)
        return paged_attention(self.queries, self.keys, self.values, seen)


def _sequences(shape: AttentionShape, lengths: list[tuple[int, int]], seed: int) -> list[_Sequence]:
    """One sequence for each (rows, context before them), with block tables permuted across all of them."""
    random = np.random.default_rng(seed)
    blocks = [-(-(rows + before) // shape.block_tokens) for rows, before in lengths]
    ids = random.permutation(sum(blocks)).astype(np.int32)
    dtype = _DTYPES[shape.element_bytes]
    made = []
    for (rows, before), table in zip(lengths, np.split(ids, np.cumsum(blocks)[:-1]), strict=True):
        queries = 2 * random.standard_normal((rows, shape.query_heads, shape.head_dim), dtype=np.float32)
        cached = random.standard_normal((2, rows + before, shape.kv_heads, shape.head_dim)).astype(dtype)
        keys, values = cached.astype(np.float32)
        made.append(_Sequence(queries, keys, values, table))
    return made


def _run(kernels: Kernels, shape: AttentionShape, sequences: list[_Sequence], threads: int) -> list[FloatArray]:
    """Put the sequences into a pool that is NaN everywhere else, and call the operation as ggml would."""
    blocks = sum(len(sequence.table) for sequence in sequences)
    planes = np.full(
        (2, blocks, shape.block_tokens, shape.kv_heads, shape.head_dim), np.nan, _DTYPES[shape.element_bytes]
    )
    memory = StepMemory(
        shape,
        [(planes[0].ctypes.data, planes[1].ctypes.data)],
        max_sequences=len(sequences),
        max_blocks=blocks,
        max_tokens=sum(len(sequence.queries) for sequence in sequences),
    )
    first = 0
    for index, sequence in enumerate(sequences):
        rows, context = len(sequence.queries), len(sequence.keys)
        position = np.arange(context)
        slot = sequence.table[position // shape.block_tokens], position % shape.block_tokens
        planes[0][slot], planes[1][slot] = sequence.keys, sequence.values
        memory.sequences[index, :3] = first, rows, context
        memory.tables[index, : len(sequence.table)] = sequence.table
        first += rows
    queries = np.ascontiguousarray(np.concatenate([sequence.queries for sequence in sequences]))
    output = np.full_like(queries, np.nan)
    source, destination = Tensor(data=queries.ctypes.data), Tensor(data=output.ctypes.data)
    destination.src[0] = ct.addressof(source)
    memory.begin(len(sequences))
    operation = _OPERATION(kernels.attention_address)
    for thread in range(threads):
        operation(ct.addressof(destination), thread, threads, memory.layer_address(0))
    return np.split(output, np.cumsum([len(sequence.queries) for sequence in sequences])[:-1])


_SHAPES = st.builds(
    lambda kv_heads, group, head_dim, block, element: AttentionShape(
        kv_heads * group, kv_heads, head_dim, block, element
    ),
    st.integers(1, 3),
    st.sampled_from([1, 2, 3, 8, 50]),
    st.sampled_from([8, 24, 64, 128, 256]),
    st.sampled_from([8, 16, 40, 256]),
    st.sampled_from([2, 4]),
)
_LENGTHS = st.lists(st.tuples(st.integers(1, 40), st.integers(0, 90)), min_size=1, max_size=4)


@pytest.mark.parametrize("name", ["cpp", "numba", "reference"])
@settings(deadline=None, max_examples=30)
@given(shape=_SHAPES, lengths=_LENGTHS, threads=st.integers(1, 3), seed=st.integers(0, 9))
def test_agrees_with_the_definition(
    name: str, shape: AttentionShape, lengths: list[tuple[int, int]], threads: int, seed: int
) -> None:
    sequences = _sequences(shape, lengths, seed)
    results = _run(select_kernels(name), shape, sequences, threads)
    for result, sequence in zip(results, sequences, strict=True):
        np.testing.assert_allclose(result, sequence.expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("name", ["cpp", "numba"])
@settings(deadline=None, max_examples=15)
@given(shape=_SHAPES, rows=st.integers(2, 60), before=st.integers(0, 70), cut=st.integers(1, 59))
def test_a_rows_bits_do_not_depend_on_the_batch(
    name: str, shape: AttentionShape, rows: int, before: int, cut: int
) -> None:
    """The whole at once, cut in two steps, and the last row alone: the same bits."""
    whole = _sequences(shape, [(rows, before)], seed=1)[0]
    (together,) = _run(select_kernels(name), shape, [whole], threads=2)
    cut = min(cut, rows - 1)
    for first, last in ((0, cut), (cut, rows), (rows - 1, rows)):
        part = _Sequence(
            whole.queries[first:last], whole.keys[: before + last], whole.values[: before + last], whole.table
        )
        (alone,) = _run(select_kernels(name), shape, [part], threads=1)
        np.testing.assert_array_equal(alone, together[first:last])


@pytest.mark.skipif(platform.machine() != "x86_64", reason="names x86 processors")
@pytest.mark.parametrize("cpu", ["x86-64", "haswell", "skylake-avx512"])
def test_other_vector_widths_agree_too(cpu: str, tmp_path: Path) -> None:
    """The source has 4, 8 or 16 lanes by processor: build each, run those that this machine can run."""
    library = build_kernels(tmp_path, cpu)
    needed = {"x86-64": "sse2", "haswell": "avx2", "skylake-avx512": "avx512vl"}[cpu]
    if needed not in Path("/proc/cpuinfo").read_text().split():
        pytest.skip(f"this machine has no {needed}: built, not run")
    for shape in (AttentionShape(6, 2, 64, 16, 2), AttentionShape(50, 1, 24, 8, 4), AttentionShape(2, 2, 128, 40, 2)):
        sequences = _sequences(shape, [(1, 70), (23, 0), (70, 33)], seed=5)
        for result, sequence in zip(_run(NativeKernels(library), shape, sequences, 2), sequences, strict=True):
            np.testing.assert_allclose(result, sequence.expected, atol=2e-5, rtol=2e-5)


@given(lengths=_LENGTHS, queries_per_item=st.integers(1, 48), kv_heads=st.integers(1, 4))
def test_work_items_cover_every_query_of_every_head_once(
    lengths: list[tuple[int, int]], queries_per_item: int, kv_heads: int
) -> None:
    sequences = np.array([(0, rows, rows + before, 0) for rows, before in lengths], np.int32)
    items = work_items(sequences, queries_per_item, kv_heads)
    covered = sorted(
        (sequence, head, first + query) for sequence, head, first, queries in items.tolist() for query in range(queries)
    )
    assert covered == sorted(
        (index, head, query)
        for index, (rows, _) in enumerate(lengths)
        for head in range(kv_heads)
        for query in range(rows)
    )
    assert items[:, 3].max() <= queries_per_item
