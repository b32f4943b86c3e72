"""Bulk rows and others: whether the key of a row is in a dictionary, or packed as it was taken over (see `bulk_keys`).

Invariant: a bulk row is as it was taken over: one readable copy, in the slowest tier. A row moves to the dictionary
before it changes.
"""

from __future__ import annotations

from kvstored.store.blocks.view import ResidencyView


def to_dictionary(view: ResidencyView, row: int) -> None:
    """A row that was taken over in bulk is about to change: from now on its key is in the dictionary."""
    rows = view.rows
    key = rows.key(row)
    if key is None:
        return  # it is free, which is for the caller to find out
    index = view.tenants[view.kind_tenant[rows.kind[row]]]
    rows.keys[row] = key
    index.readable[key] = row
    index.bulk_blocks -= 1


def to_bulk(view: ResidencyView, row: int) -> None:
    """The row may again be as it was when it was taken over: its key is not needed in the dictionary any more."""
    rows = view.rows
    index = view.tenants[view.kind_tenant[rows.kind[row]]]
    slowest_only = rows.mask[row] == 1 << len(view.copies) - 1 and not rows.filling[row]
    key = rows.keys[row]
    if index.bulk is None or not slowest_only or key is None or not index.bulk.has_place(key, row):
        return
    del index.readable[key]
    rows.keys[row] = None
    index.bulk_blocks += 1
