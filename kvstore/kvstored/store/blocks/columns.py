"""The optional columns of the index hold facts that most blocks do not have; a column takes no memory until a block has
the fact.

`OF_BLOCKS` and `OF_COPIES` are the tables of definitions: one line makes a column, which grows, is reset and is shown
with the others. A reader gets the default when the column, or the value of a row, was never set. The module decides
nothing.

Invariant: a row that ends, or a copy that is taken, leaves the defaults behind for the next one.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt


class Column(NamedTuple):
    """The definition of an optional column of the block table, a fact that only few blocks have. `typecode` is a
    typecode of array.array; it sets the bytes for each row once the column is used."""

    name: str
    typecode: str
    default: int = 0


OF_BLOCKS = (
    Column("expires_s", "I"),  # when the block expires, in whole seconds of the monotonic clock; 0: never
    Column("priority", "b"),  # a lower one leaves a tier first
    Column("pinned_by", "I"),  # who pinned it: one bit for each of its tenant's owners of pins
    Column("later_terms", "B"),  # which of its terms no header has, and small state does (later_terms.py)
    Column("takes_lossy", "B"),  # 1: its tenant and whoever put it accept lossy copies
)
OF_COPIES = (
    Column("codec", "B"),  # the number of the codec that made the stored bytes; 0: they are the payload
    Column("stored_bytes", "I"),  # how many they are; 0: as many as the payload has
    Column("error", "I"),  # the bits of a float32, the error bound of a lossy copy; 0: its payload is what was put
)


class OptionalColumns:
    """The optional columns of the block table, which take memory only when used. `used` maps names to the columns that
    have memory; it is empty until `set` stores a first value, so a hot path only has to test whether it is empty."""

    __slots__ = ("_rows", "_table", "used")

    def __init__(self, table: Sequence[Column]) -> None:
        self._table = {column.name: column for column in table}
        self._rows = 0
        self.used: dict[str, array[int]] = {}

    def get(self, name: str, row: int) -> int:
        """Return the value of `row` in the column `name`. Raises KeyError for a column that is not defined."""
        column = self.used.get(name)
        return self._table[name].default if column is None else column[row]

    def set(self, name: str, row: int, value: int) -> None:
        """Set the value of `row` in the column `name`. The first value that is not the default allocates the column.
        Raises KeyError for a column that is not defined, OverflowError for a value beyond its type."""
        column = self.used.get(name)
        if column is None:
            definition = self._table[name]
            if value == definition.default:
                return
            column = self.used[name] = array(definition.typecode, [definition.default]) * self._rows
        column[row] = value

    def default(self, name: str) -> int:
        """Return the default of the column `name`, which a row has until a value is set."""
        return self._table[name].default

    def fill(self, name: str, rows: npt.NDArray[np.int64], values: npt.NDArray[Any]) -> None:
        """Set the value of each of `rows` in the column `name` to the entry of `values` at the same position."""
        if len(rows):
            self.set(name, int(rows[0]), int(values[0]))
            if name not in self.used:
                self.used[name] = array(self._table[name].typecode, [self._table[name].default]) * self._rows
            np.frombuffer(self.used[name], np.dtype(self._table[name].typecode))[rows] = values

    def view(self, name: str) -> npt.NDArray[Any] | None:
        """Return the column `name` as an array with one value for each row, or None while all rows have the default.
        Drop the array before a row is added, since it keeps the column from growing.
        """
        column = self.used.get(name)
        return None if column is None else np.frombuffer(column, np.dtype(self._table[name].typecode))

    def grow(self, rows: int) -> None:
        """Extend every column to `rows` rows."""
        more, self._rows = rows - self._rows, rows
        for name, column in self.used.items():
            definition = self._table[name]
            column.extend(array(definition.typecode, [definition.default]) * more)

    def reset(self, rows: Sequence[int]) -> None:
        """Set the values of `rows` to the default in every column."""
        for name, column in self.used.items():
            default = self._table[name].default
            for row in rows:
                column[row] = default
