"""Blocks between host memory and a paged pool by the gather kernel, against one batch of copies: where they cross."""

from __future__ import annotations

import numpy as np

from kvstore_engine.kernels.cuda import BlockMover
from kvstore_engine.kernels.cuda.blocks import BlockRuns
from support.gpu_answers import Answer, known
from support.gpu_card import Card
from support.gpu_kernels import speed

PIECES_BYTES = (4 << 10, 8 << 10, 16 << 10, 32 << 10, 64 << 10, 256 << 10)
MOVED_BYTES = 64 << 20
FEW_BLOCKS = 16  # thread blocks: what a load may take from a step that runs beside it


def gather_against_batch(
    card: Card, pieces_bytes: tuple[int, ...] = PIECES_BYTES, moved_bytes: int = MOVED_BYTES
) -> Answer:
    """Speed of the kernel in units of the batch's, by piece size, both ways. It only informs: it sets the default."""
    ways: list[str] = []
    figures: dict[str, float] = {}
    for to_pool in (True, False):
        way, said, below = "host to pool" if to_pool else "pool to host", [], []
        for piece in pieces_bytes:
            count = max(2, moved_bytes // piece)
            batch_s, kernel_s = _seconds(card, piece, count, to_pool=to_pool)
            name = f"{piece >> 10} KiB"
            figures[f"{way}, {name}"] = batch_s / kernel_s
            fast = speed(figures, f"{way}, {name}, kernel", count * piece, kernel_s)
            slow = speed(figures, f"{way}, {name}, batch", count * piece, batch_s)
            said.append(f"{name} {batch_s / kernel_s:.2f}x ({fast}; batch {slow})")
            below += [piece] * (batch_s > kernel_s)
            known("; ".join([*ways, f"{way} {', '.join(said)}"]), figures)
        crossover = f"faster up to {max(below) >> 10} KiB" if below else "never faster"
        ways.append(f"{way} {', '.join(said)} ({crossover})")
        figures[f"{way}, crossover bytes"] = float(max(below, default=0))
    return Answer(True, f"gather kernel on {FEW_BLOCKS} thread blocks against one batch: {'; '.join(ways)}", figures)


def _seconds(card: Card, piece: int, count: int, *, to_pool: bool) -> tuple[float, float]:
    """Of one batch, and of the kernel, for `count` pieces. Raises RuntimeError where the kernel's bytes are wrong."""
    table = np.random.default_rng(0).permutation(2 * count)[:count].astype(np.int32).reshape(count, 1)
    runs = BlockRuns.of_payloads(table, piece)
    content = np.random.default_rng(1).integers(0, 256, (count, piece), np.uint8)
    empty = np.zeros((2 * count, piece), np.uint8)
    host, pool = card.place_on_host(content), card.place(empty)
    planes = card.place(np.array([pool], np.uint64))
    payloads = card.place(host + piece * np.arange(count, dtype=np.uint64))
    on_device = card.place(runs.runs), card.place(runs.first_pieces)
    mover = BlockMover(card.launcher, blocks=FEW_BLOCKS)
    move = mover.scatter if to_pool else mover.gather
    if not to_pool:
        mover.scatter(planes, payloads, runs, on_device, plane_count=1, stream=card.stream)
    kernel_s = card.seconds(lambda: move(planes, payloads, runs, on_device, plane_count=1, stream=card.stream))
    expected = empty.copy()
    expected[table.ravel()] = content
    if not np.array_equal(card.read(pool, empty), expected):
        raise RuntimeError(f"the kernel moved pieces of {piece} bytes wrong")
    ends = [(pool + int(place) * piece, host + number * piece) for number, place in enumerate(table.ravel())]
    copies = [(*(pair if to_pool else pair[::-1]), piece) for pair in ends]
    return card.batch_s(copies, to_device=to_pool), kernel_s
