"""Cold rows and warm ones: where the key of a row is, in a dictionary or packed as it was taken over (see `cold`).

Invariant: a cold row is as it was taken over: one readable copy, in the slowest tier. A row is woken before it
changes.
"""

from __future__ import annotations

from kvstored.store.blocks.view import ResidencyView


def wake(view: ResidencyView, row: int) -> None:
    """A row that was taken over in bulk is about to change: from now on its key is in the dictionary."""
    rows = view.rows
    key = rows.key(row)
    if key is None:
        return  # it is free, which is for the caller to find out
    index = view.tenants[view.kind_tenant[rows.kind[row]]]
    rows.keys[row] = key
    index.readable[key] = row
    index.cold_blocks -= 1


def cool(view: ResidencyView, row: int) -> None:
    """The row may again be as it was when it was taken over: its key is not needed in the dictionary any more."""
    rows = view.rows
    index = view.tenants[view.kind_tenant[rows.kind[row]]]
    slowest_only = rows.mask[row] == 1 << len(view.copies) - 1 and not rows.filling[row]
    key = rows.keys[row]
    if index.cold is None or not slowest_only or key is None or not index.cold.has_place(key, row):
        return
    del index.readable[key]
    rows.keys[row] = None
    index.cold_blocks += 1
