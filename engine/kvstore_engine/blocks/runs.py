"""The measure of fragmentation: into how many contiguous pieces a transfer falls.

Pure. Free blocks that lie apart hurt nobody as such; what costs is a sequence whose blocks lie apart, since each piece
of it is a copy of its own in every plane whenever it is stored, swapped or restored.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt


def count_runs(blocks: Sequence[int] | npt.NDArray[np.int32]) -> int:
    """Pieces of `blocks`, in the order of the transfer, that lie one behind another: 1 is best, len(blocks) worst."""
    ids = np.asarray(blocks, np.int64)
    return int(np.count_nonzero(np.diff(ids) != 1)) + 1 if len(ids) else 0


def split_runs(blocks: Sequence[int]) -> Iterator[tuple[int, int]]:
    """First block and length of each piece, in the order of the transfer."""
    first = 0
    for index in range(1, len(blocks) + 1):
        if index == len(blocks) or blocks[index] != blocks[index - 1] + 1:
            yield blocks[first], index - first
            first = index
