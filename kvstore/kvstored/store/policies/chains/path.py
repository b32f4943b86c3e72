"""The path of a request's blocks, and what was known of them before it came. Changes nothing."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

from kvstored.store.blocks.rows import RowColumns
from kvstored.store.policies.chains.ghost import FAN_BITS, FAN_MAX, ChainGhost

_UNOWNED = -1
_END_BLOCKS, _END_SHARE = 2, 0.05  # of a chain, which may be left out
_GAP_MAX = 64  # blocks that are not in the tier


class Path(NamedTuple):
    """Rows, then blocks that are missing. The first `known` had an owner; where they end, `chain` owned the block,
    which `fan` others follow. `pivot` is its row, or -1.
    """

    before: list[int]  # owners
    fans: list[int]  # what the ghost knows of those that are missing: how many others follow each
    known: int
    first: int  # depth of the first
    pivot: int
    chain: int
    fan: int


def path_of(
    rows: Sequence[int],
    missing: Sequence[bytes],
    parent: int,
    columns: RowColumns,
    owner: array[int],
    fans: bytearray,
    ghost: ChainGhost,
) -> Path:
    """What is known of a request's blocks before it came."""
    here = len(rows)
    before = [owner[row] for row in rows]
    lost: list[int] = []
    if missing:
        lost = ghost.recall_run(missing)
        before += [packed >> FAN_BITS for packed in lost]
        lost = [packed & FAN_MAX if packed >= 0 else 0 for packed in lost]
    known = before.index(_UNOWNED) if _UNOWNED in before else len(before)
    if here:
        first, parent = columns.depth[rows[0]], columns.parent[rows[0]]
    else:
        first = columns.depth[parent] + 1 if parent >= 0 else 0
    pivot = rows[min(known, here) - 1] if known and here else -1
    if not known and first:
        pivot = parent
        if pivot >= len(owner) or (pivot >= 0 and owner[pivot] < 0):
            pivot = -1
    if known > here:  # where the known part ends there is no row any more
        chain, fan = before[known - 1], lost[known - here - 1]
    else:
        chain, fan = (owner[pivot], fans[pivot]) if pivot >= 0 else (-1, 0)
    return Path(before, lost, known, first, pivot, chain, fan)


def next_above(row: int, chain: int, columns: RowColumns, owner: array[int]) -> int:
    """The chain's next row towards the head, across rows that are not in the tier; or -1."""
    parents, known = columns.parent, len(owner)
    row = parents[row]
    for _ in range(_GAP_MAX):
        if row < 0 or row >= known:
            return -1
        if owner[row] != _UNOWNED:
            return row if owner[row] == chain else -1
        row = parents[row]
    return -1


def is_near_end(reach: int, length: int) -> bool:
    """Whether a request that goes `reach` blocks down a chain has used it nearly as a whole."""
    missing = length - reach
    return missing <= 1 or (missing < reach and missing <= max(_END_BLOCKS, _END_SHARE * length))
