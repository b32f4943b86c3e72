"""Orphans: stored blocks that cannot be reached, because one before them in their chain is not stored.

They remain after a block that was found damaged or removed by force, and from a crash between a parent and its child.
They are whole: putting the missing block again makes them reachable at once. Until then they are the first to be
evicted. Finding them means walking every chain; `snapshot` is cheap and for the control thread, `find` is for any
other.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvstored.store.blocks.rows import ROW_BITS, as_array
from kvstored.store.blocks.view import ResidencyView
from kvstored.tier_set import holding

Tokens = npt.NDArray[np.uint64]


class ChainColumns(NamedTuple):
    """A copy of some columns of the block table, in which `find` looks for orphans. Each has one entry for each row:
    the parent's row (-1: none), the tiers with a readable copy, the depth, and the generation."""

    parent: bytes
    mask: bytes
    depth: bytes
    generation: bytes


class Orphans(NamedTuple):
    """The orphans that a search has found, the deepest in their chains first. An orphan is a stored block that no
    client can reach, because a block before it in its chain is gone. `tokens` are numbers that name the orphans in the
    block index; `by_tier` has, for each tier, the tokens of those with a readable copy in it."""

    tokens: Tokens
    by_tier: list[Tokens]  # those of them with a readable copy there


def snapshot(residency: ResidencyView) -> ChainColumns | None:
    """Return a copy of the chains' columns, some 13 bytes for each row, in which `find` can look for orphans. Return
    None when no block's parent is missing, so that there are none. Blocks of sliding-window and recurrent layer groups,
    which need no parent, are left out."""
    rows, windows = residency.rows, residency.kind_window
    missing = (row for tenant in residency.tenants for row in tenant.unreadable.values() if rows.links[row])
    if not any(not windows[rows.kind[row]] for row in missing):
        return None
    mask = bytes(rows.mask)
    if any(windows):
        needs_parent = np.array(windows)[as_array(rows.kind)] == 0
        mask = (np.frombuffer(mask, np.uint8) * needs_parent).astype(np.uint8).tobytes()
    return ChainColumns(
        rows.parent.tobytes(), mask, as_array(rows.depth).astype(np.uint32).tobytes(), rows.generation.tobytes()
    )


def find(chains: ChainColumns, tiers: int) -> Orphans:
    """Return the orphans (blocks whose chain has a hole before them) in the snapshot `chains`; `tiers` is the number of
    tiers. Each orphan is named by row and generation, since its row may hold another block by now. The time grows with
    the logarithm of the longest chain's length."""
    parent = np.frombuffer(chains.parent, np.int32).astype(np.int64)
    mask = np.frombuffer(chains.mask, np.uint8)
    readable = mask != 0
    no_parent = len(parent)  # the parent of the first of a chain: never missing, its own parent
    above = np.append(np.where(parent < 0, no_parent, parent), no_parent)
    missing = np.append(~readable, False)
    is_orphan = missing[above]
    while (above != no_parent).any():
        is_orphan = is_orphan | is_orphan[above]
        above = above[above]
    rows = np.flatnonzero(is_orphan[:no_parent] & readable)
    depth = np.frombuffer(chains.depth, np.uint32)[rows]
    rows = rows[np.argsort(depth, kind="stable")[::-1]]
    generation = np.frombuffer(chains.generation, np.uint32)[rows].astype(np.uint64)
    tokens = generation << np.uint64(ROW_BITS) | rows.astype(np.uint64)
    return Orphans(tokens, [tokens[holding(mask[rows], tier)] for tier in range(tiers)])


def none_of(tiers: int) -> Orphans:
    nothing = np.empty(0, np.uint64)
    return Orphans(nothing, [nothing] * tiers)
