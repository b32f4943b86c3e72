"""The measure of fragmentation: the number of contiguous pieces of a transfer.

Pure. Scattered free blocks cost nothing; scattered blocks of a sequence do, since each piece is a separate copy in
every plane whenever the sequence is stored, swapped or restored.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt


def count_runs(blocks: Sequence[int] | npt.NDArray[np.int32]) -> int:
    """Contiguous pieces of `blocks`, in the order of the transfer: 1 is best, len(blocks) worst."""
    ids = np.asarray(blocks, np.int64)
    return int(np.count_nonzero(np.diff(ids) != 1)) + 1 if len(ids) else 0


def split_runs(blocks: Sequence[int]) -> Iterator[tuple[int, int]]:
    """First block and length of each piece, in the order of the transfer."""
    first = 0
    for index in range(1, len(blocks) + 1):
        if index == len(blocks) or blocks[index] != blocks[index - 1] + 1:
            yield blocks[first], index - first
            first = index
