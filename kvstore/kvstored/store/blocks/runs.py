"""Runs: rows that are read together, and their slots in columns.

A get reads a dozen columns of the same rows. Blocks that were stored together have consecutive rows, which are one
slice of a column and cost a fraction of a value at a time; other rows are picked by one call. Columns give plain ints:
for some dozens of values, arrays of NumPy take longer. No column grows here.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from itertools import repeat
from operator import itemgetter
from typing import Any

from kvstore_tiers.base import Slot

NEIGHBOURS_MIN = 12  # consecutive rows that are worth a look at all of them at once
_new_slot = tuple.__new__  # half the time of Slot's own


class RowRun:
    """Rows of the table, `rows`, that are read together. `of` returns their values in a column: a slice of it, `span`,
    if the rows are consecutive. `generations` are set by `RowColumns.run_of`.
    """

    __slots__ = ("generations", "of", "rows", "span")

    def __init__(self, rows: list[int]) -> None:
        self.rows, self.span = rows, span_of(rows)
        self.of: Callable[[Any], Sequence[int]] = itemgetter(*rows) if self.span is None else itemgetter(self.span)
        self.generations: Sequence[int] = ()


def span_of(rows: Sequence[int]) -> slice | None:
    """Return the slice of a column that is `rows` in their order, or None if they do not follow one another."""
    first, end = (rows[0], rows[0] + len(rows)) if rows else (0, 0)
    if rows and (rows[-1] != end - 1 or (len(rows) > 2 and list(range(first, end)) != _listed(rows))):
        return None
    return slice(first, end)


def _listed(rows: Sequence[int]) -> list[int]:
    return rows if isinstance(rows, list) else [*rows]


def fill(column: array[int], rows: Sequence[int], value: int, span: slice | None = None) -> None:
    """Set the value of each of `rows` in `column` to `value`. `span` is `span_of(rows)`, if it is known."""
    span = span or span_of(rows)
    if span is not None:
        column[span] = array(column.typecode, (value,)) * len(rows)
        return
    for row in rows:
        column[row] = value


def count_each(counts: dict[int, int], rows: Sequence[int]) -> None:
    """Add 1 to the count of each of `rows` in `counts`."""
    new = dict.fromkeys(rows, 1)
    if len(new) == len(rows) and counts.keys().isdisjoint(new):  # as a rule
        counts.update(new)
        return
    for row in rows:
        counts[row] = counts.get(row, 0) + 1


class SlotRun(Sequence[Slot]):
    """A sequence of slots, kept in columns: `containers`, `offsets`, sizes (`nbytes`) and `generations`."""

    __slots__ = ("containers", "generations", "nbytes", "offsets")

    def __init__(
        self, containers: Sequence[int], offsets: Sequence[int], nbytes: Sequence[int], generations: Sequence[int]
    ) -> None:
        self.containers, self.offsets, self.nbytes, self.generations = containers, offsets, nbytes, generations

    @classmethod
    def of(cls, slots: Sequence[Slot]) -> SlotRun:
        """Return `slots` in columns."""
        return slots if isinstance(slots, cls) else cls(*zip(*slots, strict=True)) if slots else cls((), (), (), ())

    def __len__(self) -> int:
        return len(self.offsets)

    def __iter__(self) -> Iterator[Slot]:
        columns = zip(self.containers, self.offsets, self.nbytes, self.generations, strict=True)
        return map(_new_slot, repeat(Slot), columns)

    def __getitem__(self, at: Any) -> Any:
        return list(self)[at]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)
