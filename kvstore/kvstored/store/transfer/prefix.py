"""Which blocks have to be written together so that a prefix on NVMe is whole.

After a restart a block can be had only through the blocks before it. So a block is written to NVMe with those of its
ancestors that are not there yet, or not at all. Pure: asks residency, changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable

from kvstored.store.blocks import ResidencyView

MAX_PATH_BLOCKS = 1024
MAX_CHAIN_BLOCKS = 1 << 32


def _is_missing(residency: ResidencyView, row: int) -> bool:
    """Whether the block is in memory alone."""
    return residency.fastest_in_memory(row) >= 0 and not residency.has(row, residency.durable)


def missing_path(
    residency: ResidencyView, row: int, is_coming: Callable[[int], bool], most: int = MAX_CHAIN_BLOCKS
) -> list[int] | None:
    """`row` and its ancestors that NVMe does not have and that are not on their way there, head first.

    Ends where the chain is broken: an ancestor without a readable copy cannot be written, and blocks of windowed layer
    groups are of use without it. A path longer than `MAX_PATH_BLOCKS` is cut at its end: the head is written first, and
    `row` has to be asked for again. None when more than `most` blocks are missing: a caller that cannot pay for them
    need not walk to the end of a long chain.
    """
    path: list[int] = []
    while row >= 0 and _is_missing(residency, row) and not is_coming(row):
        if len(path) >= most:
            return None
        path.append(row)
        row = residency.parent(row)
    path.reverse()
    return path[:MAX_PATH_BLOCKS]
