"""Observations of chains that are not yet added to the counts of hazard tables, by class and age bin.

The module owns these numbers. It knows no ladders and no times.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from kvstore_cuda.host_copies import address_of
from kvstore_predictor.ages import BINS, Floats, Ints
from kvstore_predictor.base import Array, untouched
from kvstore_predictor.estimates import native
from kvstore_predictor.ladders import COPIED

LATE = np.dtype([("cell", "i4"), ("seen", "f4", (2, BINS))])
FOLDED = 48  # cells a call


class Seen(NamedTuple):
    """Numbers of chains seen, by class (`cells`) and age bin (`bins`): how many got `through` the bin, and how many
    `returned` in it. `estimates` has the chances of a return that the ladders gave. The arrays hold until the next call
    of `Observations.taken`.
    """

    cells: Ints
    bins: Ints
    through: Floats
    returned: Floats
    estimates: Floats


class Observations:
    """The observations of `cells` classes that wait to be counted."""

    def __init__(self, cells: int, estimates: Floats) -> None:
        """`estimates` has the chance of a return by class, ladder and age bin."""
        self._estimates = estimates
        self._is_late = bytearray(cells)  # cells of which something was seen
        self._late = untouched(cells, 2, BINS)  # got through, returned
        self._one_by_one = self._late.reshape(-1).data.cast("B").cast("d")
        self.places = address_of(np.frombuffer(self._is_late, np.uint8)), address_of(self._late)
        most, ladders = FOLDED * BINS, estimates.shape[1]
        (cells_seen, bins), (through, returned) = np.empty((2, most), np.int64), np.empty((2, most))
        self._taken = Seen(cells_seen, bins, through, returned, np.empty((most, ladders)))
        self._taken_at = *self.places, address_of(estimates), ladders, *map(address_of, self._taken)

    def flags(self, cells: int) -> Array:
        """Return for each of the first `cells` classes whether something was seen of it, in shared memory."""
        return np.frombuffer(self._is_late, np.uint8, cells)

    def exposed(self, cells: Ints, bins: Ints) -> None:
        """Count for each of `cells` a chain that got through its age bin in `bins` without a use."""
        np.add.at(self._late.reshape(-1), cells * (2 * BINS) + bins, 1.0)
        np.frombuffer(self._is_late, np.uint8)[cells] = 1

    def passed(self, cell: int, first: int, last: int) -> None:
        """Count a chain of class `cell` that got through the age bins `first` to `last` - 1 without a use."""
        late = self._one_by_one
        for place in range(2 * BINS * cell + first, 2 * BINS * cell + last):
            late[place] += 1.0
        self._is_late[cell] = 1

    def returned(self, cell: int, at_bin: int) -> None:
        self._one_by_one[(2 * cell + 1) * BINS + at_bin] += 1.0
        self._is_late[cell] = 1

    def taken(self, most: int, cells: int) -> tuple[int, Seen]:
        """Take the observations of at most `most` of the first `cells` classes. Return how many classes they are of,
        and the observations.
        """
        library = native.get()
        if library is not None:
            counts = np.empty(2, np.int64)
            library.kv_seen(min(most, FOLDED), cells, *self._taken_at, address_of(counts))
            folded, seen = counts.tolist()
            late_cells, bins, through, returned, estimates = self._taken
            return folded, Seen(late_cells[:seen], bins[:seen], through[:seen], returned[:seen], estimates[:seen])
        is_late = self.flags(cells)
        late_cells = np.flatnonzero(is_late)[: min(most, FOLDED)]
        is_late[late_cells] = 0
        late = self._late[late_cells]
        self._late[late_cells] = 0.0
        at, bins = np.nonzero(late.any(axis=1))
        folded, late_cells = len(late_cells), late_cells[at]
        estimates = self._estimates[late_cells, :, bins]
        return folded, Seen(late_cells, bins, late[at, 0, bins], late[at, 1, bins], estimates)

    def copied(self) -> Iterator[Array]:
        """Yield the observations in small arrays of dtype LATE."""
        late = np.flatnonzero(np.frombuffer(self._is_late, np.uint8))
        for first in range(0, len(late), COPIED):
            part = np.empty(len(late[first : first + COPIED]), LATE)
            part["cell"] = late[first : first + COPIED]
            part["seen"] = self._late[part["cell"]]
            yield part

    def restore(self, cells: Ints, seen: Array) -> None:
        """Add the numbers `seen` of the classes `cells`."""
        np.add.at(self._late, cells, seen)
        np.frombuffer(self._is_late, np.uint8)[cells] = 1
