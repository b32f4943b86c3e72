"""Whether two rows share a slot of a tier: a part of the books' walk that is one sort, so that it can have a thread.

Owns a copy of one tier's columns, made in steps. Reads only; some 13 bytes a row.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from kvstored.store.blocks.copies import TierCopies

_STEP_ROWS = 1 << 16  # copied between two pauses: about 0.1 ms


class Places:
    """`copy` may be paused after each step, as long as nothing changes before it continues; then `shared`, in any
    thread."""

    def __init__(self, copies: TierCopies) -> None:
        self._copies = copies
        rows = len(copies.state)
        self._state = np.empty(rows, np.uint8)
        self._container = np.empty(rows, np.uint32)
        self._offset = np.empty(rows, np.uint64)

    def copy(self) -> Iterator[None]:
        copies = self._copies
        for first in range(0, len(self._state), _STEP_ROWS):
            part = slice(first, first + _STEP_ROWS)
            self._state[part] = np.frombuffer(copies.state, np.uint8)[part]
            self._container[part] = np.frombuffer(copies.container, np.uint32)[part]
            self._offset[part] = np.frombuffer(copies.offset, np.uint64)[part]
            yield

    def shared(self) -> list[str]:
        """What is wrong, in words."""
        rows = np.flatnonzero(self._state)
        container, offset = self._container[rows], self._offset[rows]
        order = np.lexsort((offset, container))
        same = (np.diff(container[order]) == 0) & (np.diff(offset[order]) == 0)
        found = []
        for position in np.flatnonzero(same).tolist():
            one, other = int(rows[order[position]]), int(rows[order[position + 1]])
            where = f"{self._container[one]}:{self._offset[one]}"
            found.append(f"{self._copies.name}: rows {one} and {other} share the slot {where}")
        return found
