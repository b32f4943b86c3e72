"""Listings over the index for operators: pages of blocks, and all blocks of a fingerprint. Scans, off the hot
path.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from kvstored.residency.view import ResidencyView

_SCAN_ROWS = 20_000  # a page looks at no more rows than this: about 2 ms


class Page(NamedTuple):
    """`after` of the next page, or 0 at the end. A page may hold fewer rows than asked for, even none."""

    rows: list[int]
    next: int


def page(
    residency: ResidencyView,
    *,
    after: int = 0,
    limit: int = 100,
    tenant: int | None = None,
    tier: int | None = None,
    key_prefix: str = "",
) -> Page:
    """Readable blocks from cursor `after` on, in row order. A block stored or removed between two pages may
    be missed; none is listed twice while it stays.
    """
    if limit < 1:
        raise ValueError("a page holds at least one block")
    columns = residency.rows
    wanted = 0xFF if tier is None else 1 << tier
    found: list[int] = []
    end = min(columns.capacity, after + _SCAN_ROWS)
    row = after
    while row < end and len(found) < limit:
        if (
            columns.mask[row] & wanted
            and (tenant is None or residency.tenant_of(row) == tenant)
            and (not key_prefix or residency.key(row).hex().startswith(key_prefix))
        ):
            found.append(row)
        row += 1
    return Page(found, row if row < columns.capacity else 0)


def rows_of_fingerprint(residency: ResidencyView, fingerprint_id: int, tenant: int | None = None) -> list[int]:
    """Every readable row of a fingerprint, deepest first, so that removing them in order leaves no hole on
    the way.
    """
    kinds = [
        number
        for number, kind in enumerate(residency.kinds)
        if kind.fingerprint_id == fingerprint_id and (tenant is None or kind.tenant == tenant)
    ]
    columns = residency.rows
    if not kinds or not columns.capacity:
        return []
    ours = np.isin(np.frombuffer(columns.kind, dtype=np.uint32), kinds)
    rows = np.flatnonzero(ours & (np.frombuffer(columns.mask, dtype=np.uint8) != 0))
    depth = np.frombuffer(columns.depth, dtype=np.uint32)[rows]
    found: list[int] = rows[np.argsort(depth, kind="stable")[::-1]].tolist()
    return found
