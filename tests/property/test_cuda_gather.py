"""The kernel that copies small runs moves their bytes and no others, on the host."""

from __future__ import annotations

import numpy as np
import pytest

from kvstore_client.device.gather import _RUN, BLOCKS, KERNEL, PROGRAM, THREADS, GatherArgument
from tests.cuda_shim.launcher import placed, run_kernel

LINE = 16
LINES = (1, 2, THREADS - 1, THREADS, THREADS + 1, 4 * THREADS - 1, 4 * THREADS, 4 * THREADS + 1, 9 * THREADS + 5)
SIZES = tuple(LINE * each for each in LINES)


@pytest.mark.parametrize("order", [0, 1, 7])
@pytest.mark.parametrize("blocks", [1, 3, BLOCKS])
def test_each_run_is_copied_and_nothing_beside_it(order: int, blocks: int) -> None:
    random = np.random.default_rng(order)
    sizes = random.permutation(np.repeat(SIZES, 3))
    source = placed(random.integers(0, 256, int(sizes.sum()) + LINE * len(sizes), np.uint8))
    destination = placed(np.full(source.nbytes, 0xA5, np.uint8))
    expected, rows, at = destination.copy(), placed(np.zeros(len(sizes), _RUN)), 0
    for row, nbytes in zip(rows, sizes, strict=True):
        other = (at + source.nbytes // 2) % source.nbytes // LINE * LINE
        other = min(other, source.nbytes - int(nbytes))
        row["to"], row["source"], row["nbytes"] = destination.ctypes.data + at, source.ctypes.data + other, nbytes
        expected[at : at + nbytes] = source[other : other + nbytes]
        at += int(nbytes) + LINE
    run_kernel(
        PROGRAM, KERNEL, (blocks, 1, 1), GatherArgument(rows.ctypes.data, len(rows)), threads=THREADS, order=order
    )  # fmt: skip
    assert np.array_equal(destination, expected)
