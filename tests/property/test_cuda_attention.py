"""The CUDA attention kernels, run on the host, against their definition in double precision."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore_engine.kernels.cuda.attention import AttentionCrossover, KernelRows, PagedAttention
from kvstore_engine.kernels.cuda.program import CacheShape
from kvstore_engine.kernels.layout import LayerAttention
from kvstore_engine.kernels.reference import paged_attention
from tests.cuda_shim.launcher import ShimLauncher, placed
from tests.reference.cuda_cache import GREATEST, Floats, Plane, narrowed, widened
from tests.reference.examples import each_nth, examples, quick_are

ROUNDING = {"f32": 0.0, "f16": 2.0**-11, "bf16": 2.0**-8}  # of a result, relative
SUMS = 2e-5  # error of sums in floats, relative to the greatest value
_PLAIN = LayerAttention()


@dataclass(frozen=True)
class Case:
    """Contexts and what the rows hold. `values` are as stored, `exact` before they were narrowed."""

    shape: CacheShape
    queries: npt.NDArray[np.generic]
    contexts: list[int]
    planes: tuple[Plane, Plane]
    tables: npt.NDArray[np.int32]
    stored: list[tuple[Floats, Floats]]
    exact: list[tuple[Floats, Floats]]

    def expected(self, kind: LayerAttention, *, exact: bool = False) -> Floats:
        queries = widened(self.queries, self.shape.compute)
        rows = []
        for query, context, (keys, values) in zip(
            queries, self.contexts, self.exact if exact else self.stored, strict=True
        ):
            seen = np.array([context], np.int32)
            rows.append(paged_attention(query[None], keys, values, seen, kind)[0] if context else np.zeros_like(query))
        return np.stack(rows)

    def bound(self, expected: Floats) -> Floats:
        greatest = max((np.abs(values).max() for _, values in self.stored if values.size), default=0.0)
        return ROUNDING[self.shape.compute] * np.abs(expected) + np.float32(SUMS * greatest + 1e-30)


def make_case(shape: CacheShape, contexts: list[int], seed: int, kind: LayerAttention = _PLAIN) -> Case:
    """Only what a row may see is in the pool: everything else is garbage, which must not change a result."""
    random = np.random.default_rng(seed)
    width = max(1, max(-(-context // shape.block_tokens) for context in contexts))
    ids = random.permutation(len(contexts) * width).astype(np.int32)
    tables = ids.reshape(len(contexts), width)
    planes = Plane(shape, len(ids)), Plane(shape, len(ids))
    stored, exact = [], []
    for table, context in zip(tables, contexts, strict=True):
        made = [random.standard_normal((context, shape.kv_heads, shape.head_dim), dtype=np.float32) for _ in planes]
        kept = [np.zeros_like(values) for values in made]
        first = context - kind.window if kind.window else 0
        for position in range(context):
            if position >= kind.sink_tokens and position < first:
                continue
            block, place = table[position // shape.block_tokens], position % shape.block_tokens
            for plane, values, back in zip(planes, made, kept, strict=True):
                back[position] = plane.write(block, place, values[position])
        stored.append((kept[0], kept[1]))
        exact.append((made[0], made[1]))
    rows = (len(contexts), shape.query_heads, shape.head_dim)
    queries = narrowed(2 * random.standard_normal(rows, dtype=np.float32), shape.compute)
    return Case(shape, placed(queries), contexts, planes, placed(tables), stored, exact)


def run(case: Case, attention: PagedAttention, kind: LayerAttention = _PLAIN, version: int = 0) -> Floats:
    count, longest = len(case.contexts), max(case.contexts)
    sequences, contexts = np.arange(count, dtype=np.int32), np.array(case.contexts, np.int32)
    output = placed(np.full(case.queries.nbytes, 0xFF, np.uint8)).view(case.queries.dtype).reshape(case.queries.shape)
    scratch = placed(np.full(attention.scratch_bytes(count, longest, kind), 0xFF, np.uint8))
    rows = KernelRows(
        count, sequences.ctypes.data, contexts.ctypes.data, case.tables.ctypes.data, case.tables.shape[1], longest
    )
    planes = case.planes[0].memory.ctypes.data, case.planes[1].memory.ctypes.data
    attention.attend(
        case.queries.ctypes.data,
        output.ctypes.data,
        planes,
        rows,
        kind=kind,
        scratch=scratch.ctypes.data,
        version=version,
    )
    return widened(output, case.shape.compute)


def check(shape: CacheShape, contexts: list[int], kind: LayerAttention, seed: int, order: int, partition: int) -> None:
    case = make_case(shape, contexts, seed, kind)
    attention = PagedAttention(ShimLauncher(order), shape, partition_keys=partition)
    expected = case.expected(kind)
    for version in (1, 2):
        error = np.abs(run(case, attention, kind, version) - expected)
        assert (error <= case.bound(expected)).all(), f"V{version}: off by {error.max():.2e}"


KINDS = st.builds(
    LayerAttention,
    window=st.sampled_from([0, 0, 1, 7, 33, 100]),
    sink_tokens=st.sampled_from([0, 0, 1, 4, 17]),
    softcap=st.sampled_from([0.0, 0.0, 0.8, 30.0]),
    scale=st.sampled_from([0.0, 0.3]),
)
CONTEXTS = st.lists(st.integers(0, 150), min_size=1, max_size=3)
QUICK_SHAPES = [  # each is a compilation: few
    CacheShape(4, 2, 64, 16, "f32", "int8"),
    CacheShape(10, 2, 80, 8, "bf16", "bf16"),
]
MORE_SHAPES = [
    CacheShape(8, 8, 128, 32, "f16", "f16"),
    CacheShape(16, 2, 128, 16, "bf16", "fp8"),
    CacheShape(12, 1, 96, 128, "f16", "int8"),
    CacheShape(4, 1, 256, 64, "bf16", "bf16"),
    CacheShape(5, 1, 256, 8, "f32", "f32"),
    CacheShape(9, 1, 112, 12, "f32", "fp8"),
    CacheShape(2, 2, 192, 20, "f32", "f16"),
]


@pytest.mark.parametrize(
    "shape", quick_are(QUICK_SHAPES + MORE_SHAPES, [True] * len(QUICK_SHAPES) + [False] * len(MORE_SHAPES)), ids=str
)
def test_both_versions_compute_attention(shape: CacheShape) -> None:
    @settings(max_examples=examples(24), deadline=None)
    @given(CONTEXTS, KINDS, st.integers(0, 2**31), st.integers(0, 5), st.sampled_from([16, 50, 512]))
    def holds(contexts: list[int], kind: LayerAttention, seed: int, order: int, partition: int) -> None:
        check(shape, contexts, kind, seed, order, partition)

    holds()


@pytest.mark.parametrize("kind", [_PLAIN, LayerAttention(window=40, sink_tokens=3, softcap=5.0)], ids=["plain", "all"])
@pytest.mark.parametrize("context", [1, 15, 16, 17, 64, 65, 129, 700])
def test_lengths_around_tiles_and_blocks(context: int, kind: LayerAttention) -> None:
    check(QUICK_SHAPES[1], [context], kind, seed=context, order=1, partition=64)


def test_a_result_does_not_depend_on_the_order_of_threads() -> None:
    case = make_case(QUICK_SHAPES[0], [140, 3], 5)
    results = [run(case, PagedAttention(ShimLauncher(order), case.shape), version=1) for order in range(4)]
    assert all(np.array_equal(results[0], other) for other in results[1:])


def test_a_row_has_the_same_bits_in_any_batch() -> None:
    case = make_case(QUICK_SHAPES[0], [90, 41, 7], 6)
    attention = PagedAttention(ShimLauncher(), case.shape, partition_keys=32)
    alone = Case(case.shape, placed(case.queries[1:2]), [41], case.planes, placed(case.tables[1:2]), [], [])
    for version in (1, 2):
        assert np.array_equal(run(case, attention, version=version)[1], run(alone, attention, version=version)[0])


@pytest.mark.parametrize("tile", [16, 32, 64])
@pytest.mark.slow
def test_every_tile_computes_the_same(tile: int) -> None:
    case = make_case(QUICK_SHAPES[0], [150, 60], 7)
    expected = case.expected(_PLAIN)
    got = run(case, PagedAttention(ShimLauncher(2), case.shape, tile=tile), version=1)
    assert (np.abs(got - expected) <= case.bound(expected)).all()


@pytest.mark.parametrize("shape", each_nth([QUICK_SHAPES[0], CacheShape(16, 2, 128, 16, "bf16", "fp8")], 2))
def test_a_quantised_cache_is_within_its_bound(shape: CacheShape) -> None:
    """The error of scores is at most e = scale * sum|q| * dk, of weights' sum exp(2e) - 1 (dk, dv: of an element)."""
    case = make_case(shape, [120, 64, 9], 8)
    exact = case.expected(_PLAIN, exact=True)
    error = np.abs(run(case, PagedAttention(ShimLauncher(), shape), version=1) - exact)
    queries = np.abs(widened(case.queries, shape.compute)).sum(axis=2)
    for row, (keys, values) in enumerate(case.exact):
        steps = []
        for plane in (keys, values):
            # Half a step: of int8 the scale, of e4m3 a 16th of the value, and what is subnormal.
            greatest = np.abs(plane).max()
            steps.append(
                greatest / 254 if shape.cache == "int8" else greatest / 28 + greatest / GREATEST["fp8"] * 2.0**-10
            )
        scores = shape.head_dim**-0.5 * queries[row].max() * steps[0]
        bound = steps[1] + np.expm1(2 * scores) * np.abs(values).max() + ROUNDING[shape.compute] * 4
        assert (error[row] <= bound).all()
    # Of normally distributed values, far below the worst case.
    assert np.sqrt(np.mean(error**2)) <= (1e-2 if shape.cache == "int8" else 6e-2)


def test_the_version_follows_the_crossover() -> None:
    shape = CacheShape(32, 8, 128, 16)
    attention = PagedAttention(ShimLauncher(multiprocessors=100), shape, crossover=AttentionCrossover(2.0))
    assert attention.version(1, 32768) == 2
    assert attention.version(25, 32768) == 1, "200 thread blocks fill 100 multiprocessors twice"
    assert attention.version(1, 512) == 1, "one partition"
    assert attention.version(1, 32768, LayerAttention(window=256, sink_tokens=4)) == 1, "a window is one partition"


def test_what_attention_needs_is_said() -> None:
    launcher = ShimLauncher()
    attention = PagedAttention(launcher, CacheShape(4, 2, 64, 16))
    rows = KernelRows(1, 16, 16, 16, 64, 1024)
    with pytest.raises(ValueError, match=r"needs 2080 bytes of scratch memory"):
        attention.attend(16, 16, (16, 16), rows, version=2)
    with pytest.raises(ValueError, match="plane of keys starts at 0x8"):
        attention.attend(16, 16, (8, 16), rows, version=1)
    with pytest.raises(ValueError, match="must not be negative"):
        attention.attend(16, 16, (16, 16), rows, kind=LayerAttention(window=-1))
    with pytest.raises(ValueError, match="choose one of"):
        PagedAttention(launcher, CacheShape(4, 2, 64, 16), tile=8)
    with pytest.raises(ValueError, match="multiple of 16 from 64 to 256"):
        CacheShape(4, 2, 40, 16)
    with pytest.raises(ValueError, match="multiple of 4 from 8 to 128"):
        CacheShape(4, 2, 64, 4)
    with pytest.raises(ValueError, match="cannot share"):
        CacheShape(5, 2, 64, 16)
    with pytest.raises(ValueError, match="cache type 'int4'"):
        CacheShape(4, 2, 64, 16, cache="int4")
    assert launcher.launched == []
