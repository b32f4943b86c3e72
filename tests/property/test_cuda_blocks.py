"""The CUDA kernels that move blocks, run on the host, against numpy's indexing."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore_engine.kernels.cuda.blocks import PIECE_BYTES, BlockMover, BlockRuns
from tests.cuda_shim.launcher import ShimLauncher, placed
from tests.reference.examples import examples

Bytes = npt.NDArray[np.uint8]
BLOCK_BYTES = st.sampled_from([16, 48, 1040, PIECE_BYTES - 16, PIECE_BYTES, PIECE_BYTES + 16])


def addresses(arrays: Bytes) -> npt.NDArray[np.uint64]:
    """Return the addresses of each array along the first axis."""
    return np.array([array.ctypes.data for array in arrays], np.uint64)


def on_device(runs: BlockRuns) -> tuple[tuple[int, int], list[npt.NDArray[np.int32]]]:
    """Addresses of the runs' arrays, and the arrays, which must live as long."""
    kept = [placed(runs.runs), placed(runs.first_pieces)]
    return (kept[0].ctypes.data, kept[1].ctypes.data), kept


@settings(max_examples=examples(60), deadline=None)
@given(
    st.integers(1, 3), st.integers(1, 4), st.integers(1, 5), BLOCK_BYTES, st.booleans(), st.integers(1, 9),
    st.integers(0, 2**31),
)  # fmt: skip
def test_payloads_are_gathered_and_scattered(
    planes: int, payloads: int, width: int, block_bytes: int, is_sorted: bool, blocks: int, seed: int
) -> None:
    random = np.random.default_rng(seed)
    ids = random.permutation(payloads * width + 2).astype(np.int32)[: payloads * width]
    table = (np.sort(ids) if is_sorted else ids).reshape(payloads, width)
    pool = placed(random.integers(0, 256, (planes, payloads * width + 2, block_bytes), np.uint8))
    runs = BlockRuns.of_payloads(table, block_bytes)
    assert runs.runs[:, 3].sum() == payloads * width
    pair, kept = on_device(runs)
    mover = BlockMover(ShimLauncher(seed % 3), blocks=blocks)
    packed = placed(np.zeros((payloads, planes, width, block_bytes), np.uint8))
    plane_at, payload_at = addresses(pool), addresses(packed)
    mover.gather(plane_at.ctypes.data, payload_at.ctypes.data, runs, pair, plane_count=planes)
    assert np.array_equal(packed, pool[:, table].swapaxes(0, 1))
    other = placed(np.zeros_like(pool))
    plane_at = addresses(other)
    mover.scatter(plane_at.ctypes.data, payload_at.ctypes.data, runs, pair, plane_count=planes)
    expected = np.zeros_like(pool)
    expected[:, table] = pool[:, table]
    assert np.array_equal(other, expected)
    assert len(kept) == 2


@settings(max_examples=examples(40), deadline=None)
@given(st.integers(1, 3), st.integers(0, 6), BLOCK_BYTES, st.booleans(), st.integers(0, 2**31))
def test_blocks_are_moved_and_swapped(planes: int, count: int, block_bytes: int, is_sorted: bool, seed: int) -> None:
    random = np.random.default_rng(seed)
    ids = random.permutation(2 * count + 1).astype(np.int32)[: 2 * count]
    sources, targets = np.split(np.sort(ids) if is_sorted else ids, 2)
    before = random.integers(0, 256, (planes, 2 * count + 1, block_bytes), np.uint8)
    runs = BlockRuns.within(sources, targets, block_bytes)
    pair, kept = on_device(runs)
    mover = BlockMover(ShimLauncher(seed % 3))
    moved, swapped = placed(before), placed(before)
    moved_at, swapped_at = addresses(moved), addresses(swapped)
    mover.move(moved_at.ctypes.data, runs, pair, plane_count=planes)
    mover.swap(swapped_at.ctypes.data, runs, pair, plane_count=planes)
    expected = before.copy()
    expected[:, targets] = before[:, sources]
    assert np.array_equal(moved, expected)
    expected[:, sources] = before[:, targets]
    assert np.array_equal(swapped, expected)
    assert len(kept) == 2


def test_neighbours_make_one_run() -> None:
    table = np.array([[4, 5, 6, 1], [7, 8, 3, 2]], np.int32)
    assert BlockRuns.of_payloads(table, 16).runs.tolist() == [
        [0, 0, 4, 3], [0, 3, 1, 1], [1, 0, 7, 2], [1, 2, 3, 1], [1, 3, 2, 1],
    ]  # fmt: skip
    sources, targets = np.array([3, 4, 5, 9], np.int32), np.array([10, 11, 20, 21], np.int32)
    assert BlockRuns.within(sources, targets, 16).runs.tolist() == [[0, 3, 10, 2], [0, 5, 20, 1], [0, 9, 21, 1]]


def test_a_run_is_cut_into_pieces() -> None:
    runs = BlockRuns(np.array([[0, 0, 0, 5], [0, 5, 9, 1]], np.int32), PIECE_BYTES // 2)
    assert runs.first_pieces.tolist() == [0, 3, 4]


def test_what_cannot_be_moved_is_said() -> None:
    with pytest.raises(ValueError, match="a multiple of 16"):
        BlockRuns(np.zeros((0, 4), np.int32), 20)
    with pytest.raises(ValueError, match="a source or a target once"):
        BlockRuns.within(np.array([1, 2], np.int32), np.array([2, 3], np.int32), 16)
    with pytest.raises(ValueError, match="as many of either"):
        BlockRuns.within(np.array([1], np.int32), np.array([2, 3], np.int32), 16)
