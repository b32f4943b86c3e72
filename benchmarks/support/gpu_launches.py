"""Every kernel once, over small memory, with its results checked: what the tools of compute-sanitizer watch.

python -m support.gpu_launches [--device N]      from benchmarks/
"""

from __future__ import annotations

import argparse
import sys

import numpy as np

from kvstore_engine.kernels.cuda import BlockMover, CacheShape
from kvstore_engine.kernels.cuda.blocks import BlockRuns
from support.gpu_card import Card
from support.gpu_kernels import error_of

SHAPES = (
    CacheShape(8, 2, 128, 16), CacheShape(8, 2, 128, 16, cache="int8"), CacheShape(4, 2, 64, 8, cache="fp8"),
    CacheShape(4, 1, 256, 32, cache="f16"),
)  # fmt: skip
CONTEXTS = (1, 17, 600)  # of several partitions, too
LARGEST_ERROR = 0.5  # what is asked here is whether memory is read and written where it should be
_BLOCKS, _PLANES, _BLOCK_BYTES = 6, 2, 2064


def launch_all(card: Card) -> None:
    """Raises RuntimeError for a result that is wrong."""
    for shape in SHAPES:
        worst = float(np.abs(error_of(card, shape, CONTEXTS)).max())
        if not worst <= LARGEST_ERROR:
            raise RuntimeError(f"attention over {shape} is wrong by {worst}")
    _move_blocks(card)


def _move_blocks(card: Card) -> None:
    content = np.random.default_rng(2).integers(0, 256, (_PLANES, _BLOCKS, _BLOCK_BYTES), np.uint8)
    pool = card.place(content)
    planes = card.place(pool + np.arange(_PLANES, dtype=np.uint64) * (_BLOCKS * _BLOCK_BYTES))
    mover, expected = BlockMover(card.launcher), content.copy()
    within = BlockRuns.within(np.array([0, 1], np.int32), np.array([4, 2], np.int32), _BLOCK_BYTES)
    options = {"plane_count": _PLANES, "stream": card.stream}
    at = card.place(within.runs), card.place(within.first_pieces)
    mover.move(planes, within, at, **options)
    expected[:, [4, 2]] = expected[:, [0, 1]]
    swapped = BlockRuns.within(np.array([3], np.int32), np.array([0], np.int32), _BLOCK_BYTES)
    at = card.place(swapped.runs), card.place(swapped.first_pieces)
    mover.swap(planes, swapped, at, **options)
    expected[:, [3, 0]] = expected[:, [0, 3]]
    _must_equal(card, pool, expected, "moved")
    table = np.array([[5, 1], [2, 3]], np.int32)
    packed = np.zeros((2, _PLANES, 2, _BLOCK_BYTES), np.uint8)
    runs, room = BlockRuns.of_payloads(table, _BLOCK_BYTES), card.place(packed)
    payloads = card.place(room + np.arange(2, dtype=np.uint64) * packed[0].nbytes)
    at = card.place(runs.runs), card.place(runs.first_pieces)
    mover.gather(planes, payloads, runs, at, **options)
    _must_equal(card, room, expected[:, table].swapaxes(0, 1), "gathered")
    other = np.zeros_like(content)
    pool = card.place(other)
    planes = card.place(pool + np.arange(_PLANES, dtype=np.uint64) * (_BLOCKS * _BLOCK_BYTES))
    mover.scatter(planes, payloads, runs, at, **options)
    other[:, table] = expected[:, table]
    _must_equal(card, pool, other, "scattered")


def _must_equal(card: Card, address: int, expected: np.ndarray, what: str) -> None:
    expected = np.ascontiguousarray(expected)
    if not np.array_equal(card.read(address, expected), expected):
        raise RuntimeError(f"blocks are {what} wrong")


def main() -> int:
    from support.cuda_card import CudaCard

    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", type=int, default=0, metavar="N")
    launch_all(CudaCard(parser.parse_args().device, exact=True))
    print("every kernel ran, with the results that it should have")
    return 0


if __name__ == "__main__":
    sys.exit(main())
