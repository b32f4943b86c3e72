"""Takes over very many blocks at once: the effects of `insert` and `attach` for each, done to columns.

It is for the start of a daemon. The new rows are bulk rows (see `keys`), one after another in the order of the blocks.
A block whose state is not certain is left out.

Invariant: a block that is adopted is deeper than its parent if that is adopted too, so no chain closes on itself.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore_tiers.key_table import KeyTable
from kvstore_tiers.recovered import RecoveredBlocks, as_words
from kvstored.clock import NS_PER_S
from kvstored.lifecycle import CopyState, Step, advance
from kvstored.store.blocks.index import Residency
from kvstored.store.blocks.keys import BulkKeys
from kvstored.store.blocks.rows import as_array, counted, widened
from kvstored.store.blocks.view import RowKind
from kvstored.tier_set import ONLY

_EXPIRY_MASK = (1 << 32) - 1
_STORED = int(advance(CopyState.ABSENT, Step.RECOVER))
_NONE = -1

Column = npt.NDArray[Any]


def keep(residency: Residency, rows: Column, kept: Column, now_ns: int, wall_ns: int) -> None:
    """Set the expiry and the priority of the blocks at `rows` from `kept`: for each block a word of its header that
    encodes both; a word of 0 sets neither. A block that expired while no daemon ran counts as expired now."""
    rows, words = rows[kept != 0], kept[kept != 0]
    columns, expires_s = residency.rows.optional, (words & np.uint64(_EXPIRY_MASK)).astype(np.int64)
    ends = np.flatnonzero(expires_s)
    later_s = np.maximum(expires_s[ends] - wall_ns // NS_PER_S + now_ns // NS_PER_S, 1)
    columns.fill("expires_s", rows[ends], np.minimum(later_s, _EXPIRY_MASK))
    priority = (words >> np.uint64(32)).astype(np.uint8).view(np.int8)
    columns.fill("priority", rows[priority != 0], priority[priority != 0])


def adopt(residency: Residency, tier: int, blocks: RecoveredBlocks, kinds: Sequence[RowKind], now_ns: int) -> list[int]:
    """Enter all `blocks` into the index as readable in `tier`, as `insert` and `attach` would do one by one, but some
    hundred times as fast. Entry i of `kinds` is the row kind (tenant, fingerprint and layer group) of
    `blocks.origins[i]`. Return the positions in `blocks` that were left out and must be inserted one by one: a key that
    has a row already, or a block that is no deeper than its parent, which may close a cycle."""
    residency.changes += 1
    fits = np.ones(len(blocks), dtype=bool)
    fits[_known(residency, blocks, kinds)] = False
    ours = blocks if fits.all() else blocks.take(fits)
    while len(ours):
        crowds = _by_tenant(ours, kinds, residency.rows.capacity)
        parents, hanging = _parents(ours, crowds)
        would_cycle = parents >= 0
        would_cycle &= (
            ours.depth <= ours.depth[parents]
        )  # of no parent: that of the last block, which counts for nothing
        if not would_cycle.any():
            _enter(residency, tier, ours, kinds, crowds, parents, hanging, now_ns)
            break
        fits[np.flatnonzero(fits)[would_cycle]] = False
        ours = blocks.take(fits)
    left_out: list[int] = np.flatnonzero(~fits).tolist()
    return left_out


class _Crowd:
    """The blocks of one tenant, by position (None: all there are), to be found by key."""

    def __init__(self, tenant: int, members: Column | None, table: KeyTable) -> None:
        self.tenant = tenant
        self.members = members
        self.table = table


def _by_tenant(blocks: RecoveredBlocks, kinds: Sequence[RowKind], first: int) -> list[_Crowd]:
    """Return the tenants that have blocks here, which will be in rows from number `first` on."""
    present = _distinct(blocks.origin)
    tenants = sorted({kinds[origin].tenant for origin in present})
    if len(tenants) == 1:
        made = None if first else blocks.table  # its entries have no bits for rows before these
        return [_Crowd(tenants[0], None, made or KeyTable(blocks.key, None, first))]
    owner = np.array([kind.tenant for kind in kinds], np.int32)[blocks.origin]
    members = [np.flatnonzero(owner == tenant) for tenant in tenants]
    return [
        _Crowd(tenant, ours, KeyTable(blocks.key, ours, first)) for tenant, ours in zip(tenants, members, strict=True)
    ]


def _known(residency: Residency, blocks: RecoveredBlocks, kinds: Sequence[RowKind]) -> Column:
    """Return the positions of blocks that have a row already."""
    found = [np.empty(0, np.int64)]
    for number, index in enumerate(residency.tenants):
        if not (index.readable or index.unreadable or index.bulk_blocks):
            continue
        theirs = np.array([kind.tenant == number for kind in kinds], bool)
        ours = np.flatnonzero(theirs[blocks.origin])
        keys, hot = blocks.key[ours], as_words(b"".join((*index.readable, *index.unreadable)))
        found.append(ours[KeyTable(hot).find_each(hot, keys) >= 0])
        if index.bulk is not None:
            found.append(ours[index.bulk.find_each(keys) >= 0])
    return np.concatenate(found)


def _parents(blocks: RecoveredBlocks, crowds: Sequence[_Crowd]) -> tuple[Column, Column]:
    """Return the position of each block's parent, or -1; and the positions of blocks whose parent is not here."""
    keys, wanted, count = blocks.key, blocks.parent, len(blocks)
    found = np.full(count, _NONE, np.int32)
    follows = wanted[1:, 0] == keys[:-1, 0]  # blocks of a chain are mostly one behind the other
    follows &= wanted[1:, 1] == keys[:-1, 1]
    if len(crowds) > 1:
        owner = np.empty(count, np.int32)
        for crowd in crowds:
            owner[crowd.members] = crowd.tenant
        follows &= owner[1:] == owner[:-1]
    np.copyto(found[1:], np.arange(count - 1, dtype=np.int32), where=follows)
    left = np.flatnonzero(found < 0)
    left = left[(wanted[left, 0] | wanted[left, 1]) != 0]
    for crowd in crowds:
        asked = left if crowd.members is None else left[owner[left] == crowd.tenant]
        found[asked] = crowd.table.find_each(keys, wanted[asked])
    return found, left[found[left] < 0]


def _distinct(numbers: Column) -> list[int]:
    """Return the distinct numbers, which are small."""
    if (numbers[1:] == numbers[:-1]).all():  # as a rule; counting them takes more memory than they have
        return [int(number) for number in numbers[:1]]
    found: list[int] = np.flatnonzero(np.bincount(numbers)).tolist()
    return found


def _enter(
    residency: Residency,
    tier: int,
    blocks: RecoveredBlocks,
    kinds: Sequence[RowKind],
    crowds: Sequence[_Crowd],
    parents: Column,
    hanging: Column,
    now_ns: int,
) -> None:
    rows, copies = residency.rows, residency.copies[tier]
    count = len(blocks)
    first = rows.take_bulk(blocks.key.tobytes())
    copies.grow(rows.capacity, are_filled=True)  # first: in memory that the process has already
    for each in residency.copies:
        if each is not copies:
            each.grow(rows.capacity)
    ours = slice(first, first + count)
    kind_numbers = np.array([residency.kind_number(kind) for kind in kinds], np.uint32)
    rows.fit(int(kind_numbers.max()), int(blocks.depth.max()))
    copies.widen(int(blocks.container.max()), int(blocks.offset.max()), int(blocks.generation.max()))

    def fill(column: array[int] | bytearray, values: Any) -> None:
        as_array(column)[ours] = values

    fill(rows.kind, kind_numbers if len(kinds) == 1 else kind_numbers[blocks.origin])
    fill(rows.depth, blocks.depth)
    fill(rows.payload_bytes, blocks.payload_bytes)
    fill(rows.last_access_ns, now_ns)
    fill(rows.mask, ONLY[tier])
    fill(copies.state, _STORED)
    fill(copies.container, blocks.container)
    fill(copies.offset, blocks.offset)
    fill(copies.nbytes, blocks.nbytes)
    fill(copies.generation, blocks.generation)
    copies.blocks += count
    noted = [column for column in (blocks.codec, blocks.error) if column is not None]
    for block in np.flatnonzero(np.logical_or.reduce(noted)).tolist() if noted else ():
        residency.note_stored(first + block, tier, *blocks.form_of(block))
    children = _children(parents)
    fill(rows.parent, np.where(parents >= 0, parents + first, _NONE) if first else parents)
    most = int(children.max())
    rows.links, copies.kids = widened(rows.links, most), widened(copies.kids, most)
    fill(rows.links, children)
    fill(copies.kids, children)
    for origin in _distinct(blocks.origin):
        residency.tenants[kinds[origin].tenant].fingerprints.add(kinds[origin].fingerprint_id)
    for crowd in crowds:
        sizes = blocks.nbytes if crowd.members is None else blocks.nbytes[crowd.members]
        copies.bytes_by_tenant[crowd.tenant] += int(sizes.sum())
        _make_findable(residency, crowd, first, count)
    _link_to_others(residency, tier, blocks, kinds, hanging, first)
    residency.notify_adopted(range(first, first + count), tier, now_ns)


def _children(parents: Column) -> Column:
    """Return how many children each block has, by `parents`, the position of each block's parent, or -1."""
    follows = parents[1:] == np.arange(len(parents) - 1, dtype=parents.dtype)  # as a rule
    children = np.zeros(len(parents), np.uint32)
    children[:-1] = follows
    others = np.concatenate([parents[:1], parents[1:][~follows]])
    others = np.sort(others[others >= 0])
    begins = np.flatnonzero(np.concatenate([others[:1] >= 0, others[1:] != others[:-1]]))
    children[others[begins]] += np.diff(begins, append=len(others)).astype(np.uint32)
    return children


def _make_findable(residency: Residency, crowd: _Crowd, first: int, count: int) -> None:
    rows, index = residency.rows, residency.tenants[crowd.tenant]
    members = np.arange(count) if crowd.members is None else crowd.members
    index.bulk_blocks += len(members)
    if index.bulk is None:
        crowd.table.move(first)
        index.bulk = BulkKeys(rows, crowd.table)
    else:
        every = np.concatenate([index.bulk.members(), (members + first).astype(np.int32)])
        index.bulk = BulkKeys(rows, KeyTable(as_words(rows.bulk_keys), every))
    if len(index.ghost):
        for row in (members + first).tolist():
            rows.accesses[row] = index.ghost.accesses(rows.bulk_key(row))


def _link_to_others(
    residency: Residency, tier: int, blocks: RecoveredBlocks, kinds: Sequence[RowKind], hanging: Column, first: int
) -> None:
    """Link the blocks whose parents are not among them: under rows that were there before, or under placeholders."""
    rows, copies = residency.rows, residency.copies[tier]
    for position in hanging.tolist():
        row, tenant = first + position, kinds[int(blocks.origin[position])].tenant
        parent = residency.parent_or_placeholder(
            tenant, blocks.parent_of(position), rows.kind[row], rows.depth[row], rows.payload_bytes[row]
        )
        rows.parent[row] = parent
        rows.links, copies.kids = counted(rows.links, parent), counted(copies.kids, parent)
