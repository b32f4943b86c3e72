"""Orphans: blocks that are stored and cannot be reached, because one before them in their chain is not stored.

They come from a block that was found damaged or taken by force, and from a crash between a parent and its child. They
are whole: putting the missing block again makes them reachable at once. Until then they are the first to leave.
Finding them means walking every chain; `snapshot` is cheap and for the control thread, `find` is for any other.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvstored.residency.view import ResidencyView

Rows = npt.NDArray[np.int64]


class Chains(NamedTuple):
    """A copy of what `find` needs: parent row (-1: none), where it is readable, depth, each by row."""

    parent: bytes
    mask: bytes
    depth: bytes


def snapshot(residency: ResidencyView) -> Chains | None:
    """None when every parent is there, which one look at the tenants tells. Some 10 bytes a row are copied."""
    if not any(residency.rows.links[row] for tenant in residency.tenants for row in tenant.unreadable.values()):
        return None
    rows = residency.rows
    return Chains(rows.parent.tobytes(), bytes(rows.mask), rows.depth.tobytes())


def find(chains: Chains) -> Rows:
    """The orphans, the deepest first: the order in which they may leave. By pointer jumping: as many passes over the
    rows as the longest chain's length has binary digits (Wyllie 1979)."""
    parent = np.frombuffer(chains.parent, np.int32).astype(np.int64)
    readable = np.frombuffer(chains.mask, np.uint8) != 0
    nobody = len(parent)  # what the first of a chain hangs on: never missing, its own parent
    above = np.append(np.where(parent < 0, nobody, parent), nobody)
    missing = np.append(~readable, False)
    cut_off = missing[above]
    while (above != nobody).any():
        cut_off = cut_off | cut_off[above]
        above = above[above]
    rows = np.flatnonzero(cut_off[:nobody] & readable)
    depth = np.frombuffer(chains.depth, np.uint32)[rows]
    found: Rows = rows[np.argsort(depth, kind="stable")[::-1]].astype(np.int64)
    return found
