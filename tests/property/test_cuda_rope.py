"""The CUDA kernel that rotates and writes into the cache, run on the host, against numpy."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore_engine.kernels.cuda.program import CacheShape
from kvstore_engine.kernels.cuda.rope import NewTokens, RopeCache, turns
from tests.cuda_shim.launcher import ShimLauncher, placed
from tests.reference.cuda_cache import GARBAGE, Floats, Plane, narrowed, quantised, widened
from tests.reference.examples import examples, quick_are

POSITIONS = 300
TOLERANCE = {"f32": 1e-6, "f16": 2.0**-10, "bf16": 2.0**-7}  # of values up to about 4


def rotated(values: Floats, positions: npt.NDArray[np.int32], rope: RopeCache, frequencies: Floats) -> Floats:
    """Return the rotated rows in double precision, from the definition: pairs turn by position times frequency."""
    half = rope.rotary // 2
    angles = positions[:, None, None] * frequencies.astype(np.float64)
    first = np.arange(half) * 2 if rope.interleaved else np.arange(half)
    second = first + 1 if rope.interleaved else first + half
    x, y = values[..., first].astype(np.float64), values[..., second].astype(np.float64)
    turned = values.astype(np.float64)
    turned[..., first] = x * np.cos(angles) - y * np.sin(angles)
    turned[..., second] = y * np.cos(angles) + x * np.sin(angles)
    return turned.astype(np.float32)


def check(shape: CacheShape, rotary: int, interleaved: bool, rows: int, fused: bool, seed: int) -> None:
    random = np.random.default_rng(seed)
    rope = RopeCache(ShimLauncher(seed % 4), shape, rotary=rotary, interleaved=interleaved)
    heads = (shape.query_heads, shape.kv_heads, shape.kv_heads)
    width = sum(heads) * shape.head_dim
    projections = placed(narrowed(random.standard_normal((rows, width), dtype=np.float32), shape.compute))
    ends = np.cumsum([count * shape.head_dim for count in heads])
    parts = np.split(projections, ends[:-1], axis=1)
    values = [
        widened(part, shape.compute).reshape(rows, count, shape.head_dim)
        for part, count in zip(parts, heads, strict=True)
    ]
    arrays = parts if fused else [placed(part) for part in parts]
    addresses = [array.ctypes.data for array in arrays]
    positions = random.integers(0, POSITIONS, rows).astype(np.int32)
    blocks = -(-rows // shape.block_tokens) + 1
    slots = random.permutation(blocks * shape.block_tokens)[:rows].astype(np.int32)
    slots[random.random(rows) < 0.2] = -1
    frequencies = 10000.0 ** (-np.arange(rope.rotary // 2) / (rope.rotary // 2))
    table = placed(turns(POSITIONS, frequencies))
    planes = Plane(shape, blocks), Plane(shape, blocks)
    output = np.empty((rows, shape.query_heads, shape.head_dim), projections.dtype)
    stride = width if fused else 0
    tokens = NewTokens(rows, *addresses, positions.ctypes.data, slots.ctypes.data, stride, stride, stride)
    rope.write(
        tokens, output.ctypes.data, (planes[0].memory.ctypes.data, planes[1].memory.ctypes.data), table.ctypes.data
    )
    expected = rotated(values[0], positions, rope, frequencies)
    assert np.allclose(widened(output, shape.compute), expected, rtol=TOLERANCE[shape.compute], atol=2e-6)
    keys = rotated(values[1], positions, rope, frequencies)
    check_planes(shape, planes, slots, keys, values[2])


def check_planes(
    shape: CacheShape, planes: tuple[Plane, Plane], slots: npt.NDArray[np.int32], keys: Floats, values: Floats
) -> None:
    """Values bit for bit, keys as near as their type is; and that nothing else was written."""
    blocks, tokens = len(planes[0].memory), shape.block_tokens
    expected = Plane(shape, blocks)
    near = Plane(shape, blocks)
    for slot, key, value in zip(slots, keys, values, strict=True):
        if slot >= 0:
            expected.write(slot // tokens, slot % tokens, value)
            near.write(slot // tokens, slot % tokens, key)
    assert np.array_equal(planes[1].memory, expected.memory)
    row = shape.kv_heads * shape.head_dim * shape.element.nbytes
    stored, wanted = planes[0].memory, near.memory
    for slot, key in zip(slots, keys, strict=True):
        if slot < 0:
            continue
        block, place = slot // tokens, slot % tokens
        scale = np.ones(shape.kv_heads, np.float32)
        if shape.element.scaled:
            at = tokens * row + place * shape.kv_heads * 4
            scale = stored[block, at : at + 4 * shape.kv_heads].view(np.float32)
            assert np.allclose(scale, quantised(key, shape.cache)[1], rtol=1e-5)
        raw = stored[block, place * row : (place + 1) * row].view(narrowed(key, shape.cache).dtype)
        back = widened(raw, shape.cache).reshape(key.shape) * scale[:, None]
        step = {"f32": 1e-6, "f16": 2.0**-10, "bf16": 2.0**-7, "int8": 0.0, "fp8": 2.0**-3}[shape.cache]
        least = 1.01 * scale[:, None] if shape.element.scaled else 2e-6
        assert (np.abs(back - key) <= step * np.abs(key) + least).all()
    untouched = wanted == GARBAGE
    assert (stored[untouched & (expected.memory == GARBAGE)] == GARBAGE).mean() > 0.9  # 0xFF is also int8's -1
    empty = sorted(set(range(blocks)) - {slot // tokens for slot in slots.tolist() if slot >= 0})
    assert (stored[empty] == GARBAGE).all()


SHAPES = [
    CacheShape(4, 2, 80, 8, "f32", "int8"),
    CacheShape(3, 1, 128, 16, "bf16", "fp8"),
    CacheShape(4, 4, 64, 16, "f16", "f16"),
    CacheShape(2, 2, 256, 32, "bf16", "bf16"),
    CacheShape(6, 2, 96, 12, "f32", "f32"),
]


@pytest.mark.parametrize("shape", quick_are(SHAPES, [True, False, False, False, False]), ids=str)
def test_new_tokens_are_rotated_and_stored(shape: CacheShape) -> None:
    @settings(max_examples=examples(40), deadline=None)
    @given(
        st.sampled_from([0, 2, 32, shape.head_dim]), st.booleans(), st.integers(1, 12), st.booleans(),
        st.integers(0, 2**31),
    )  # fmt: skip
    def holds(rotary: int, interleaved: bool, rows: int, fused: bool, seed: int) -> None:
        check(shape, rotary, interleaved, rows, fused, seed)

    holds()


@pytest.mark.parametrize("shape", quick_are(SHAPES[:2], [True, False]), ids=str)
def test_zeros_and_extremes_are_quantised_as_numpy_has_them(shape: CacheShape) -> None:
    """Ties, subnormal e4m3 values, zeros, rows too small for an inverse. Nothing is rotated, so to the bit."""
    rows, dim = 6, shape.head_dim
    made = np.zeros((rows, shape.kv_heads, dim), np.float32)
    made[1] = np.linspace(-127, 127, dim)
    made[2] = np.float32(448) * np.linspace(-1, 1, dim, dtype=np.float32) ** 9
    made[3] = 1e-36
    made[4] = np.arange(dim) / 2 - 20
    made[5, :, 0], made[5, :, 1:] = 448, 2.0**-10 * np.arange(dim - 1)
    stored = placed(narrowed(made, shape.compute))
    queries = np.zeros((rows, shape.query_heads, dim), stored.dtype)
    positions, slots = np.zeros(rows, np.int32), np.arange(rows, dtype=np.int32)
    planes = Plane(shape, 1), Plane(shape, 1)
    rope = RopeCache(ShimLauncher(), shape)
    table = placed(turns(1, np.ones(dim // 2)))
    tokens = NewTokens(
        rows, queries.ctypes.data, stored.ctypes.data, stored.ctypes.data, positions.ctypes.data, slots.ctypes.data
    )
    rope.write(
        tokens, queries.ctypes.data, (planes[0].memory.ctypes.data, planes[1].memory.ctypes.data), table.ctypes.data
    )
    expected = Plane(shape, 1)
    for row, values in enumerate(widened(stored, shape.compute)):
        expected.write(0, row, values)
    assert np.array_equal(planes[1].memory, expected.memory)
    assert np.array_equal(planes[0].memory, expected.memory), "at position 0 nothing turns"


def test_angles_of_far_positions_are_exact() -> None:
    table = turns(131073, np.array([1.0, 0.1]))
    assert np.allclose(table[131072, 0], [np.cos(131072.0), np.sin(131072.0)], atol=1e-7)


def test_what_cannot_be_rotated_is_said() -> None:
    for rotary in (3, 66, -2):
        with pytest.raises(ValueError, match="an even number up to 64"):
            RopeCache(ShimLauncher(), CacheShape(2, 2, 64, 16), rotary=rotary)
