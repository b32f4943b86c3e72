"""The questions about kernels by name; as a program, every kernel once, over small memory, with its results checked:
the tools of compute-sanitizer watch that.

python -m support.gpu_launches [--device N]      from benchmarks/
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

import numpy as np

from kvstore_cuda import nvrtc
from kvstore_cuda.nvrtc import CompileError
from kvstore_engine.kernels.cuda.blocks import BlockMover, BlockRuns
from kvstore_engine.kernels.cuda.program import CacheShape
from support.cuda_card import CudaCard
from support.gpu_answers import Answer, Sizes
from support.gpu_kernels import (
    Card,
    crossover,
    decode_of_a_batch,
    decode_of_one,
    error_of,
    errors,
    gather_against_batch,
    shared_prefix,
)
from support.gpu_rivals import decode_beside_transfer, decode_of_rivals

SHAPES = (
    CacheShape(8, 2, 128, 16), CacheShape(8, 2, 128, 16, cache="int8"), CacheShape(4, 2, 64, 8, cache="fp8"),
    CacheShape(4, 1, 256, 32, cache="f16"),
)  # fmt: skip
CONTEXTS = (1, 17, 600)  # of several partitions, too
LARGEST_ERROR = 0.5  # what is asked here is whether memory is read and written where it should be
_BLOCKS, _PLANES, _BLOCK_BYTES = 6, 2, 2064


def of_card(device: int, sizes: Sizes, *, name: str) -> Answer:
    """The question `name`. Unknown where there is no compiler of kernels."""
    try:
        return _ASKED[name](CudaCard(device, sizes), sizes)
    except CompileError:
        try:
            nvrtc.library()
        except CompileError as missing:
            return Answer(None, f"not asked: {missing}")
        raise


def _launches(card: CudaCard, sizes: Sizes) -> Answer:
    launch_all(card)
    return Answer(True, "every kernel runs, with the results that it should have")


def _crossover(card: CudaCard, sizes: Sizes) -> Answer:
    batches = tuple(1 << power for power in range((2 * sizes.batch).bit_length()))
    return crossover(card, batches, sizes.context)


_ASKED: dict[str, Callable[[CudaCard, Sizes], Answer]] = {
    "launches": _launches,
    "errors": lambda card, sizes: errors(card),
    "decode": lambda card, sizes: decode_of_a_batch(card, sizes.batch, sizes.context),
    "decode-one": lambda card, sizes: decode_of_one(card, sizes.long_context),
    "crossover": _crossover,
    "decode-rivals": lambda card, sizes: decode_of_rivals(card, sizes.batch, sizes.context),
    "beside-transfer": lambda card, sizes: decode_beside_transfer(
        card, sizes.batch, sizes.context, sizes.layers, sizes.steps
    ),
    "gather-batch": lambda card, sizes: gather_against_batch(card, sizes.pieces_bytes, sizes.copied_bytes // 4),
    "hot-prefix": lambda card, sizes: shared_prefix(card, card.launcher, sizes.batch, sizes.context),
}


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
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", type=int, default=0, metavar="N")
    launch_all(CudaCard(parser.parse_args().device, exact=True))
    print("every kernel ran, with the results that it should have")
    return 0


if __name__ == "__main__":
    sys.exit(main())
