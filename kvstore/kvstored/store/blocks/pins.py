"""Pins: reasons why no copy of a block may be evicted. A lease pins what it covers, and so does a transfer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvstored.store.blocks.events import Listeners
from kvstored.store.blocks.view import ResidencyView


class Pins:
    """Counts in `ResidencyView.pins`, by row."""

    def __init__(self, view: ResidencyView, listeners: Listeners) -> None:
        self._view = view
        self._listeners = listeners

    def pin(self, row: int) -> None:
        """One more reason why no copy of the block may be evicted."""
        self._view.pins[row] = self._view.pins.get(row, 0) + 1

    def pin_run(self, rows: Sequence[int]) -> None:
        """`pin` for each of `rows`."""
        pins = self._view.pins
        for row in rows:
            pins[row] = pins.get(row, 0) + 1

    def unpin_run(self, tokens: Iterable[int]) -> None:
        """`unpin` for each block that is still there: one that was found damaged lost its pins with it."""
        for row in map(self._view.current, tokens):
            if row >= 0:
                self.unpin(row)

    def unpin(self, row: int) -> None:
        """One reason less. Raises RuntimeError when the block is not pinned."""
        left = self._view.pins.get(row, 0) - 1
        if left < 0:
            raise RuntimeError(f"row {row} unpinned more often than pinned")
        if left:
            self._view.pins[row] = left
            return
        del self._view.pins[row]
        self._listeners.release(row, self._view.rows.mask[row])
