"""The costs of copying blocks on this machine, by bytes and by pieces; refitted with every transfer.

The module owns one linear model and takes no action:  copying takes  f + bytes/B + r * runs  seconds. A move within the
pool takes longer by a factor: its target is not in a cache, and it must be found and entered in tables and counts. The
pieces measure fragmentation: scattered free blocks cost nothing; scattered blocks of a sequence do, since each
contiguous piece is a separate copy in every plane whenever the sequence is stored, swapped or restored.
"""

import math
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from kvstore_restore.fit import Fit

# Scaled to be of one order of magnitude: seconds per transfer, per 16 MiB, per 100 pieces.
_BYTES, _RUNS = 16.0 * 1024 * 1024, 100.0
_PRIOR = (2e-5, 0.003, 0.0005)
_MOVE_PRIOR, _MOST_FACTOR = 4.0, 16.0  # a high estimate: the first moves, too, must not be a loss
_LEARN = 0.5  # at once: a wrong factor is a loss with every move
_FORGET = 1e-3  # with each transfer: a factor learnt from an interrupted move fades


def count_runs(blocks: Sequence[int] | npt.NDArray[np.int32]) -> int:
    """Return the number of contiguous pieces of the pool that `blocks` form, in the order in which they are given. It
    is from 1 to len(blocks).
    """
    ids = np.asarray(blocks, np.int64)
    return int(np.count_nonzero(np.diff(ids) != 1)) + 1 if len(ids) else 0


def split_runs(blocks: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield each contiguous piece of the pool that `blocks` form, in this order, as its first block and its number of
    blocks.
    """
    first = 0
    for index in range(1, len(blocks) + 1):
        if index == len(blocks) or blocks[index] != blocks[index - 1] + 1:
            yield blocks[first], index - first
            first = index


class TransferCosts:
    """A predictor of the seconds that copies of pool blocks take, by their bytes and their number of contiguous pieces.
    It learns from each copy. It is for one thread.
    """

    def __init__(self) -> None:
        self.copy = Fit(_PRIOR, uncertainty=1.0, memory=0.98, patience=4)
        self._move_factor = _MOVE_PRIOR

    def copy_s(self, nbytes: int, runs: int) -> float:
        """Return the predicted seconds to copy `nbytes` bytes that are `runs` contiguous pieces of the pool."""
        return self.copy.predict((1.0, nbytes / _BYTES, runs / _RUNS)) if nbytes else 0.0

    def move_s(self, nbytes: int, runs: int) -> float:
        """Return the predicted seconds to move `nbytes` bytes in `runs` pieces within the pool."""
        return self._move_factor * self.copy_s(nbytes, runs)

    @property
    def run_s(self) -> float:
        """The predicted seconds that one more contiguous piece adds to a copy with the same number of bytes; at least
        0.
        """
        return max(0.0, self.copy.coefficients[-1]) / _RUNS

    def observe(self, nbytes: int, runs: int, seconds: float) -> None:
        """Learn that a copy of `nbytes` bytes in `runs` pieces took `seconds`."""
        if nbytes > 0:
            self.copy.observe((1.0, nbytes / _BYTES, runs / _RUNS), seconds)
            self._move_factor += _FORGET * (_MOVE_PRIOR - self._move_factor)

    def observe_move(self, nbytes: int, runs: int, seconds: float) -> None:
        """Learn that a move of `nbytes` bytes in `runs` pieces within the pool took `seconds`."""
        expected = self.copy_s(nbytes, runs)
        if expected > 0.0 and math.isfinite(seconds):
            factor = min(max(seconds / expected, 1.0), _MOST_FACTOR)
            self._move_factor += _LEARN * (factor - self._move_factor)
