"""Times to live that become shorter where chains part: a block is kept until the last of the blocks that continue it
expires.

The index knows the parent of a block, not its children: they are found by a look at every row. A touch must not take
that long, so what it wants is put down here, and the rows are looked at in slices (`step`). Until the look is over, a
block lives as before. Invariants: no block expires before a block that continues it; a later change of a block's time
to live takes the place of what is put down.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from kvstored.store.blocks import Residency
from kvstored.store.blocks.rows import as_array

PART_ROWS = 1 << 16  # one slice: 0.1 ms
NEVER = 1 << 40  # later than every expiry, in place of the column's 0


class Shortening:
    """The blocks of `residency` that are to expire sooner. `changed(row)` is called for each one whose time to live has
    changed. `step` looks at `part_rows` rows. Times are seconds of the monotonic clock."""

    def __init__(self, residency: Residency, changed: Callable[[int], None]) -> None:
        self._residency, self._changed, self.part_rows = residency, changed, PART_ROWS
        self._wanted: dict[int, tuple[int, int]] = {}  # by row: token and wanted expiry, in the look under way
        self._next: dict[int, tuple[int, int]] = {}  # of the look after it
        self._needs: dict[int, int] = {}  # by row of `_wanted`: until when the blocks that continue it live
        self._is_wanted = np.zeros(0, np.bool_)  # by row
        self._hand = 0

    @property
    def is_pending(self) -> bool:
        return bool(self._wanted or self._next)

    def wanted(self, row: int) -> int:
        """Return the expiry that is put down for the block at `row`, 0 for none."""
        return (self._next.get(row) or self._wanted.get(row) or (0, 0))[1]

    def put_down(self, row: int, expires_s: int) -> None:
        """Let the block at `row` expire at `expires_s`, or with the last block that continues it."""
        self.forget((row,))
        self._next[row] = (self._residency.token(row), expires_s)

    def forget(self, rows: Iterable[int]) -> None:
        """Leave the blocks at `rows` as they are: they have got another time to live."""
        if self.is_pending:
            for row in rows:
                self._next.pop(row, None)
                if self._wanted.pop(row, None) is not None:
                    self._is_wanted[row] = False

    def needed(self, row: int, until_s: int) -> None:
        """Note that a block that continues the one at `row` lives until `until_s`."""
        if row in self._wanted:
            self._needs[row] = max(self._needs.get(row, 0), until_s)

    def step(self, now_s: int) -> None:
        """Look at one slice of the rows. After the last one, give the blocks their times to live."""
        if not self._wanted:
            self._wanted, self._next, self._needs, self._hand = self._next, {}, {}, 0
            self._mark()
        capacity = self._residency.rows.capacity
        if len(self._is_wanted) <= capacity:
            self._mark()
        self._look(slice(self._hand, min(self._hand + self.part_rows, capacity)), now_s)
        self._hand += self.part_rows
        if self._hand >= capacity:
            self._apply()

    def _mark(self) -> None:
        self._is_wanted = np.zeros(self._residency.rows.capacity + 1, np.bool_)  # the last one is of no parent, -1
        self._is_wanted[list(self._wanted)] = True

    def _look(self, part: slice, now_s: int) -> None:
        """Add the needs of blocks that continue those in `_wanted`. One that is in there itself adds its own later."""
        rows = self._residency.rows
        parents = np.frombuffer(rows.parent, np.int32)[part]
        continues = self._is_wanted[parents] & (as_array(rows.mask)[part] != 0) & ~self._is_wanted[part]
        children = np.flatnonzero(continues)
        column = rows.optional.view("expires_s")
        until_s = np.zeros(len(children), np.int64) if column is None else column[part][children].astype(np.int64)
        until_s[until_s == 0] = NEVER
        until_s[until_s <= now_s] = 0
        above, at = np.unique(parents[children], return_inverse=True)
        most_s = np.zeros(len(above), np.int64)
        np.maximum.at(most_s, at, until_s)
        for row, needed_s in zip(above.tolist(), most_s.tolist(), strict=True):
            self.needed(row, needed_s)

    def _apply(self) -> None:
        residency, wanted = self._residency, self._wanted
        stored = [row for row, (token, _) in wanted.items() if residency.current(token) == row]
        for row in sorted(stored, key=lambda each: residency.rows.depth[each], reverse=True):
            before_s = residency.expires_s(row) or NEVER
            until_s = min(before_s, max(wanted[row][1], self._needs.get(row, 0)))
            if until_s < before_s:
                residency.rows.optional.set("expires_s", row, until_s % NEVER)
                self._changed(row)
            if (parent := residency.parent(row)) >= 0 and not residency.stands_alone(parent):
                self.needed(parent, until_s)
        self._wanted = {}
