"""Doubly linked queues of rows over two shared arrays: 8 bytes a row, O(1) at both ends and in the middle.

A row is in at most one queue of a `QueueArrays`. Queues do not know which rows they hold: unlinking a row from a
queue that does not hold it corrupts both, so owners keep a state a row.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from kvstore_cuda.host_copies import address_of, native
from kvstored.store.blocks.rows import add_zeros

_NONE = -1


class QueueArrays:
    """The two arrays of links (to the row before and the row after) that several queues of rows share. A row is in at
    most one of the queues."""

    __slots__ = ("after", "before")

    def __init__(self) -> None:
        self.before = array("i")
        self.after = array("i")

    def grow(self, rows: int) -> None:
        more = rows - len(self.before)
        add_zeros(self.before, more)
        add_zeros(self.after, more)


class RowQueue:
    """A doubly linked queue of rows. The front is evicted next; the back is the newest."""

    __slots__ = ("_after", "_before", "back", "front")

    def __init__(self, links: QueueArrays) -> None:
        self._before = links.before
        self._after = links.after
        self.front = _NONE
        self.back = _NONE

    def push_back(self, row: int) -> None:
        back = self.back
        self._before[row] = back
        self._after[row] = _NONE
        if back >= 0:
            self._after[back] = row
        else:
            self.front = row
        self.back = row

    def extend(self, rows: npt.NDArray[np.int64]) -> None:
        """Append `rows`, at least one, in their order."""
        first, last, back = int(rows[0]), int(rows[-1]), self.back
        before, after = np.frombuffer(self._before, np.int32), np.frombuffer(self._after, np.int32)
        if (library := native.library) is not None:
            rows = np.ascontiguousarray(rows, np.int64)
            library.kv_link_rows(len(rows), address_of(rows), address_of(before), address_of(after))
        else:
            numbers = rows.astype(np.int32)  # which are scattered twice as fast as what has to be cast on the way
            before[rows[1:]], after[rows[:-1]] = numbers[:-1], numbers[1:]
        self._before[first] = back
        self._after[last] = _NONE
        if back >= 0:
            self._after[back] = first
        else:
            self.front = first
        self.back = last

    def neighbours_to_back(self, rows: Sequence[int]) -> bool:
        """Move `rows`, consecutive rows that are all in the queue, to the back, the last of them first. Return False,
        and leave all as it is, if they do not follow one another in the queue, in either order."""
        before, after, back, first, end = self._before, self._after, self.back, rows[0], rows[-1] + 1
        inner, others = slice(first, end - 1), array("i", rows[1:])
        if before[inner] == others:
            head, tail = end - 1, first
        elif after[inner] == others:
            head, tail = first, end - 1
        else:
            return False
        if (behind := after[tail]) >= 0:
            if (ahead := before[head]) >= 0:
                after[ahead] = behind
            else:
                self.front = behind
            before[behind] = ahead
        else:  # they are at the back already
            back = before[head]
        if head == first:
            before[inner] = others
            after[first + 1 : end] = array("i", rows[:-1])
        before[end - 1], after[first], self.back = back, _NONE, first
        if back >= 0:
            after[back] = end - 1
        else:
            self.front = end - 1
        return True

    def push_front(self, row: int) -> None:
        front = self.front
        self._after[row] = front
        self._before[row] = _NONE
        if front >= 0:
            self._before[front] = row
        else:
            self.back = row
        self.front = row

    def unlink(self, row: int) -> None:
        before, after = self._before[row], self._after[row]
        if before >= 0:
            self._after[before] = after
        else:
            self.front = after
        if after >= 0:
            self._before[after] = before
        else:
            self.back = before

    def to_back(self, row: int) -> None:
        """Move `row`, which must be in this queue, to its back."""
        befores, afters = self._before, self._after
        after = afters[row]
        if after < 0:
            return
        before = befores[row]
        if before >= 0:
            afters[before] = after
        else:
            self.front = after
        befores[after] = before
        back = self.back
        afters[back] = row
        befores[row] = back
        afters[row] = _NONE
        self.back = row

    def __iter__(self) -> Iterator[int]:
        """Iterate from front to back; the row just yielded may be unlinked."""
        row = self.front
        while row >= 0:
            following = self._after[row]
            yield row
            row = following

    def __bool__(self) -> bool:
        return self.front >= 0


class TenantQueues:
    """A set of row queues, one for each tenant, over shared arrays of links."""

    __slots__ = ("links", "of")

    def __init__(self) -> None:
        self.links = QueueArrays()
        self.of: list[RowQueue] = []  # by tenant

    def add(self) -> None:
        """Add an empty queue for the next tenant number to this set of queues."""
        self.of.append(RowQueue(self.links))
