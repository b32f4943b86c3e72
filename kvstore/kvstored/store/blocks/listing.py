"""Listings over the index: pages of blocks for operators, all blocks of a fingerprint, the blocks in a container. Each
is a scan, off the hot path.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvstored.store.blocks.rows import ROW_BITS, as_array
from kvstored.store.blocks.view import ResidencyView
from kvstored.tier_set import holding

_SCAN_ROWS = 20_000  # a page looks at no more rows than this: about 2 ms
_SCAN_SLOW_ROWS = 2_000  # the same where each row is asked one by one

Int64Array = npt.NDArray[np.int64]


class Page(NamedTuple):
    """A page of a listing of blocks. `next` is the cursor for the next page, 0 on the last page. A page may have fewer
    rows than the caller wanted, even none.
    """

    rows: list[int]
    next: int


class Selection(NamedTuple):
    """A filter of readable blocks. Without any field it selects all of them.

    `tenant` and `prints` select by the number of the tenant and the numbers of fingerprints; `tier` selects blocks with
    a readable copy in the tier at this position; `key_prefix` selects keys whose hex digits begin with it. `matches`
    gets a row and returns True when the row is selected; it is called last."""

    tenant: int | None = None
    tier: int | None = None
    prints: frozenset[int] | None = None
    key_prefix: str = ""
    matches: Callable[[int], bool] | None = None

    @property
    def slice_rows(self) -> int:
        """The number of rows that one scan of the index may cover, so that it does not hold up other tasks."""
        return _SCAN_ROWS if self.matches is None and not self.key_prefix else min(_SCAN_ROWS, _SCAN_SLOW_ROWS)


ALL_BLOCKS = Selection()


def select(residency: ResidencyView, selection: Selection, first: int, end: int) -> Int64Array:
    """Return the rows from `first` to `end` (excluded) whose blocks `selection` selects, in ascending order. It looks
    at every row of that range, so keep the range short."""
    columns = residency.rows
    mask = np.frombuffer(columns.mask, np.uint8, end - first, first)
    is_chosen = mask != 0 if selection.tier is None else holding(mask, selection.tier)
    if selection.tenant is not None or selection.prints is not None:
        kinds = [
            number
            for number, kind in enumerate(residency.kinds)
            if selection.tenant in (None, kind.tenant)
            and (selection.prints is None or kind.fingerprint_id in selection.prints)
        ]
        is_chosen &= np.isin(as_array(columns.kind)[first:end], kinds)
    rows: Int64Array = np.flatnonzero(is_chosen) + first
    if selection.key_prefix:
        rows = _filtered(rows, lambda row: residency.key(row).hex().startswith(selection.key_prefix))
    return rows if selection.matches is None else _filtered(rows, selection.matches)


async def select_all(residency: ResidencyView, selection: Selection) -> AsyncIterator[Int64Array]:
    """Yield the selected rows of the whole index in parts, and let other tasks run after each. Their changes may be
    included or not.
    """
    first = 0
    while first < residency.rows.capacity:
        end = min(first + selection.slice_rows, residency.rows.capacity)
        yield select(residency, selection, first, end)
        first = end
        await asyncio.sleep(0)


def column_of(residency: ResidencyView, name: str, rows: Int64Array) -> Int64Array:
    """Return the values of the column `name` of the block table, as an array with one entry for each of `rows`."""
    return np.asarray(getattr(residency.rows, name))[rows].astype(np.int64)


def tokens_of(residency: ResidencyView, rows: Int64Array) -> npt.NDArray[np.uint64]:
    """Return the token of each of `rows`, as an array. An async caller keeps tokens, not rows."""
    return _named(np.frombuffer(residency.rows.generation, np.uint32), rows)


def _named(generations: npt.NDArray[np.uint32], rows: Int64Array) -> npt.NDArray[np.uint64]:
    tokens: npt.NDArray[np.uint64] = generations[rows].astype(np.uint64) << np.uint64(ROW_BITS) | rows.astype(np.uint64)
    return tokens


def pin_counts(residency: ResidencyView, rows: Int64Array) -> Int64Array:
    """Return the number of pins of each of `rows`, as an array."""
    return np.fromiter(map(residency.pin_count, rows.tolist()), np.int64, len(rows))


def page(residency: ResidencyView, selection: Selection = ALL_BLOCKS, *, after: int = 0, limit: int = 100) -> Page:
    """Return a page of at most `limit` blocks that `selection` selects, in row order, from the cursor `after` on (0 for
    the first page). A block that is stored or removed between two pages may be missed; none is listed twice while it is
    stored."""
    if limit < 1:
        raise ValueError("a page holds at least one block")
    end = min(residency.rows.capacity, after + selection.slice_rows)
    rows = select(residency, selection, after, end).tolist() if after < end else []
    after = end if len(rows) <= limit else rows[limit]
    return Page(rows[:limit], after if after < residency.rows.capacity else 0)


def _filtered(rows: Int64Array, keep: Callable[[int], bool]) -> Int64Array:
    is_kept = np.fromiter(map(keep, rows.tolist()), bool, len(rows))
    return np.compress(is_kept, rows)


def rows_of_fingerprint(residency: ResidencyView, fingerprint_id: int, tenant: int | None = None) -> list[int]:
    """Return the rows of all readable blocks of the fingerprint with the number `fingerprint_id`, the deepest in its
    chain first. Removing them in this order leaves no hole in a chain. If `tenant` is given, only its blocks count."""
    chosen = Selection(tenant, prints=frozenset({fingerprint_id}))
    rows = select(residency, chosen, 0, residency.rows.capacity)
    depth = column_of(residency, "depth", rows)
    found: list[int] = rows[np.argsort(depth, kind="stable")[::-1]].tolist()
    return found


def rows_in(residency: ResidencyView, tier: int, container: int) -> list[int]:
    """Return the rows with a copy (in any state) in `container`, an arena or slab of `tier`, sorted by offset. The scan
    takes about 1 ms for a million rows.
    """
    copies = residency.copies[tier]
    here = as_array(copies.container) == container
    rows = np.flatnonzero(here & (np.frombuffer(copies.state, np.uint8) != 0))
    found: list[int] = rows[np.argsort(as_array(copies.offset)[rows], kind="stable")].tolist()
    return found


async def tokens_below(residency: ResidencyView, tier: int, rows: Sequence[int]) -> list[int]:
    """Return tokens of the blocks at `rows`, which have a copy in `tier`, and of all blocks that continue their chains
    in that tier without a gap, children before parents. A thread does the search."""
    columns, copies = residency.rows, residency.copies[tier]
    is_here = np.frombuffer(copies.state, np.uint8) != 0
    parents = np.where(is_here, as_array(columns.parent)[: len(is_here)], -1)
    depths, generations = np.array(columns.depth), np.array(columns.generation)

    def find() -> list[int]:
        is_found = np.zeros(len(parents), bool)
        is_found[rows] = True
        is_found[descendants(parents, rows)] = True
        found = np.flatnonzero(is_found)
        found = found[np.argsort(depths[found], kind="stable")[::-1]]
        tokens: list[int] = _named(generations, found).tolist()
        return tokens

    return await asyncio.to_thread(find)


def descendants(parents: npt.NDArray[np.int32], rows: Sequence[int]) -> Int64Array:
    """Return the rows that have one of `rows` among their ancestors. `parents` has the parent of each row, -1: none."""
    above = np.append(np.where(parents < 0, len(parents), parents), len(parents))
    is_named = np.zeros(len(above), bool)
    is_named[rows] = True
    is_below = is_named[above]
    while (above != len(parents)).any():  # twice as far with each pass
        is_below |= is_below[above]
        above = above[above]
    return np.flatnonzero(is_below[:-1])


def row_at(residency: ResidencyView, tier: int, container: int, offset: int) -> int:
    """Return the row with a copy (in any state) at `offset` of `container` in `tier`, or -1. It scans all rows."""
    offsets = residency.copies[tier].offset
    return next((row for row in rows_in(residency, tier, container) if offsets[row] == offset), -1)
