"""The free places among equal ones, and the choice of places to allocate next.

The module owns one flag for each place, and does not know what is stored there. Invariant: a place is free or
allocated, never both; freeing a free place is a broken invariant and raises.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Bools = npt.NDArray[np.bool_]


class PoolExhausted(RuntimeError):
    """An error: more places (blocks of a pool) were asked for than are free."""


class FreeList:
    """A record of which of `size` numbered places (such as the blocks of a pool) are free; at first all are. It tries
    to give neighbouring places out together.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.count = size
        self.flags: Bools = np.ones(size, np.bool_)  # True for each free place; not to be changed by others

    def allocate(self, count: int, after: int | None = None) -> list[int]:
        """Take `count` free places and return their numbers. It prefers the places right behind place `after`, if they
        are free; then the smallest free range that has room for all of them (with `after`, the middle of the largest
        range, so that the sequence can grow); then the largest ranges. Raises PoolExhausted with nothing taken.
        """
        if count <= 0:
            return []
        if count > self.count:
            raise PoolExhausted(f"{count} blocks wanted, {self.count} of {self.size} are free")
        if after is not None and after + count < self.size and self.flags[after + 1 : after + 1 + count].all():
            return self.take(range(after + 1, after + 1 + count))
        starts, lengths = free_runs(self.flags)
        fitting = np.flatnonzero(lengths >= count)
        if fitting.size and after is not None:
            largest = np.argmax(lengths)
            first = int(starts[largest]) + (int(lengths[largest]) - count) // 2
            return self.take(range(first, first + count))
        if fitting.size:
            best = fitting[np.argmin(lengths[fitting])]
            return self.take(range(int(starts[best]), int(starts[best]) + count))
        order = np.argsort(-lengths, kind="stable")
        runs = [np.arange(starts[i], starts[i] + lengths[i]) for i in order]
        return self.take([int(place) for place in np.concatenate(runs)[:count]])

    def take(self, places: Sequence[int]) -> list[int]:
        """Take exactly the free places with the numbers `places`, and return these numbers. Raises RuntimeError if one
        is not free.
        """
        taken = list(places)
        if not self.flags[taken].all():
            raise RuntimeError(f"take: a place of {taken} is not free")
        self.flags[taken] = False
        self.count -= len(taken)
        return taken

    def free(self, places: Sequence[int] | npt.NDArray[np.int32]) -> None:
        """Make the places with the numbers `places` free again. Raises RuntimeError if one is out of range, free
        already or named twice.
        """
        if not len(places):
            return
        ids = np.asarray(places, np.int64)
        if ids.min() < 0 or ids.max() >= self.size:
            raise RuntimeError(f"free: block ids {places} are outside 0..{self.size - 1}")
        ordered = np.sort(ids)  # np.unique imports numpy.ma when it is first called: 8 ms of the first answer
        if self.flags[ids].any() or (ordered[1:] == ordered[:-1]).any():
            raise RuntimeError(f"free: a block of {places} is free already or named twice")
        self.flags[ids] = True
        self.count += len(ids)


def free_runs(free: Bools) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the starts and the lengths of the ranges of True in the boolean array `free`."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], free.view(np.int8), [0]))))
    return edges[::2], edges[1::2] - edges[::2]
