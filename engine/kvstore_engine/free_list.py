"""The free places among equal ones, and the choice of places to allocate next.

The module owns one flag for each place, and does not know what is stored there. Invariant: a place is free or
allocated, never both; freeing a free place is a broken invariant and raises.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Bools = npt.NDArray[np.bool_]


class PoolExhausted(RuntimeError):
    """More places were requested than are free. If that is normal, check `count` first."""


class FreeList:
    """A list of `size` places, all free at first. Runs of neighbours are kept whole if possible."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.count = size
        self.flags: Bools = np.ones(size, np.bool_)  # True for each free place; not to be changed by others

    def allocate(self, count: int, after: int | None = None) -> list[int]:
        """Return `count` places, neighbours if possible. If it raises PoolExhausted, nothing is allocated.

        The places behind `after` are taken, if they are free; otherwise the smallest free run that holds them all,
        otherwise the largest runs first: neighbours are copied in one memcpy, and small requests leave the large runs
        whole.

        A sequence that grows and finds the places behind `after` taken will grow further. It gets places in the middle
        of the largest run: small holes would scatter it, and the run's beginning is where the sequence before it grows.
        So sequences that grow side by side divide the free places among them.
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
        """Take exactly these places, which are free, and return them."""
        taken = list(places)
        if not self.flags[taken].all():
            raise RuntimeError(f"take: a place of {taken} is not free")
        self.flags[taken] = False
        self.count -= len(taken)
        return taken

    def free(self, places: Sequence[int] | npt.NDArray[np.int32]) -> None:
        """Free places. Raises RuntimeError if one is out of range, free already, or named twice."""
        if not len(places):
            return
        ids = np.asarray(places, np.int64)
        if ids.min() < 0 or ids.max() >= self.size:
            raise RuntimeError(f"free: block ids {places} are outside 0..{self.size - 1}")
        if self.flags[ids].any() or len(np.unique(ids)) != len(ids):
            raise RuntimeError(f"free: a block of {places} is free already or named twice")
        self.flags[ids] = True
        self.count += len(ids)


def free_runs(free: Bools) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return start and length of each run of set elements."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], free.view(np.int8), [0]))))
    return edges[::2], edges[1::2] - edges[::2]
