"""Taking over a great many blocks at once: what `insert` and `attach` would do to each, done to columns.

For the start of a daemon. The new rows are cold (see `cold`), one after another in the order of the blocks. Owns
nothing; never decides: what it cannot be sure of it leaves out.

Invariant: a block that is adopted is deeper than its parent if that is adopted too, so no chain closes on itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kvstore_tiers.recovered import RecoveredBlocks, as_words
from kvstored.lifecycle import CopyState, Step, advance
from kvstored.residency.cold import ColdKeys

if TYPE_CHECKING:
    from kvstored.residency.index import Residency
    from kvstored.residency.view import Kind

_STORED = int(advance(CopyState.ABSENT, Step.RECOVER))
_NONE = -1

Column = npt.NDArray[Any]


def adopt(residency: Residency, tier: int, blocks: RecoveredBlocks, kinds: Sequence[Kind], now_ns: int) -> list[int]:
    """See `Residency.adopt`."""
    tenants = np.array([kind.tenant for kind in kinds], np.int64)[blocks.origin] if kinds else np.empty(0, np.int64)
    fits = np.ones(len(blocks), dtype=bool)
    fits[_known(residency, blocks, tenants)] = False
    while True:
        chosen = np.flatnonzero(fits)
        ours = blocks if len(chosen) == len(blocks) else blocks.take(chosen)
        parents = _parents(ours, tenants[chosen])
        linked = np.flatnonzero(parents >= 0)
        twisted = linked[ours.depth[linked] <= ours.depth[parents[linked]]]
        if not len(twisted):
            break
        fits[chosen[twisted]] = False
    if len(ours):
        _enter(residency, tier, ours, kinds, parents, tenants[chosen], now_ns)
    left_out: list[int] = np.flatnonzero(~fits).tolist()
    return left_out


def _known(residency: Residency, blocks: RecoveredBlocks, tenants: Column) -> Column:
    """Positions of blocks that have a row already."""
    found = [np.empty(0, np.int64)]
    for number, index in enumerate(residency.tenants):
        if not (index.readable or index.unreadable or index.cold_blocks):
            continue
        ours = np.flatnonzero(tenants == number)
        keys = blocks.key[ours]
        there = _matches(keys, ours, as_words(b"".join((*index.readable, *index.unreadable))))
        found.append(there[there >= 0])
        if index.cold is not None:
            found.append(ours[index.cold.find_each(keys) >= 0])
    return np.concatenate(found)


def _parents(blocks: RecoveredBlocks, tenants: Column) -> Column:
    """The position of each block's parent, or -1."""
    found = np.full(len(blocks), _NONE, np.int32)
    if not len(blocks):
        return found
    follows = (blocks.parent[1:] == blocks.key[:-1]).all(axis=1) & (tenants[1:] == tenants[:-1])
    found[1:][follows] = np.flatnonzero(follows)  # blocks of a chain mostly lie one behind the other
    left = np.flatnonzero((found < 0) & blocks.parent.any(axis=1))
    for tenant in _distinct(tenants[left]):
        ours, asked = np.flatnonzero(tenants == tenant), left[tenants[left] == tenant]
        found[asked] = _matches(blocks.key[ours], ours, blocks.parent[asked])
    return found


def _matches(keys: Column, positions: Column, wanted: Column) -> Column:
    """The position of each wanted key, or -1."""
    heads, order = _by_head(keys)
    asked_heads, asked = _by_head(wanted)
    first = np.empty(len(wanted), np.int64)
    bits = max(len(keys), len(wanted)).bit_length()
    first[asked] = np.searchsorted(heads >> np.uint64(bits), asked_heads >> np.uint64(bits))  # walks memory once
    heads, wanted_heads = heads >> np.uint64(bits), wanted[:, 0] >> np.uint64(bits)
    found = np.full(len(wanted), _NONE, np.int64)
    left = np.arange(len(wanted))
    while len(left):  # one turn, but for keys that begin alike
        left = left[first[left] < len(order)]
        left = left[heads[first[left]] == wanted_heads[left]]
        there = order[first[left]]
        equal = (keys[there] == wanted[left]).all(axis=1)
        found[left[equal]] = positions[there[equal]]
        left = left[~equal]
        first[left] += 1
    return found


def _by_head(keys: Column) -> tuple[Column, Column]:
    """The first words of keys but for some low bits, in order, and the positions they come from.

    Positions travel in the low bits: sorting numbers is eight times as fast as sorting positions by numbers.
    """
    bits = np.uint64(len(keys).bit_length())
    ordered = np.sort(keys[:, 0] >> bits << bits | np.arange(len(keys), dtype=np.uint64))
    return ordered, (ordered & (np.uint64(1) << bits) - np.uint64(1)).astype(np.int64)


def _distinct(numbers: Column) -> list[int]:
    """The small numbers that are there."""
    found: list[int] = np.flatnonzero(np.bincount(numbers)).tolist() if len(numbers) else []
    return found


def _enter(
    residency: Residency,
    tier: int,
    blocks: RecoveredBlocks,
    kinds: Sequence[Kind],
    parents: Column,
    tenants: Column,
    now_ns: int,
) -> None:
    rows, copies = residency.rows, residency.copies[tier]
    count = len(blocks)
    first = rows.take_cold(blocks.key.tobytes())
    for each in residency.copies:
        each.grow(rows.capacity)
    ours = slice(first, first + count)
    numbers = np.array([residency.kind_number(kind) for kind in kinds], np.uint32)

    def fill(column: Any, kind: type[Any], values: Any) -> None:
        np.frombuffer(column, kind)[ours] = values

    fill(rows.kind, np.uint32, numbers[blocks.origin])
    fill(rows.depth, np.uint32, blocks.depth)
    fill(rows.payload_bytes, np.uint32, blocks.payload_bytes)
    fill(rows.last_access_ns, np.uint64, now_ns)
    fill(rows.mask, np.uint8, 1 << tier)
    fill(copies.state, np.uint8, _STORED)
    fill(copies.container, np.uint32, blocks.container)
    fill(copies.offset, np.uint64, blocks.offset)
    fill(copies.nbytes, np.uint32, blocks.nbytes)
    fill(copies.generation, np.uint32, blocks.generation.astype(np.uint32))
    copies.blocks += count
    linked = parents >= 0
    children = np.bincount(parents[linked], minlength=count)
    fill(rows.parent, np.int32, np.where(linked, parents + first, _NONE))
    fill(rows.links, np.uint32, children)
    fill(copies.kids, np.uint32, children)
    for origin in _distinct(blocks.origin):
        residency.tenants[kinds[origin].tenant].fingerprints.add(kinds[origin].fingerprint_id)
    for tenant in _distinct(tenants):
        held = np.flatnonzero(tenants == tenant)
        copies.bytes_by_tenant[tenant] += int(blocks.nbytes[held].sum())
        _make_findable(residency, tenant, (held + first).astype(np.int32))
    _link_to_others(residency, tier, blocks, parents, tenants, first)
    residency.tell_adopted(range(first, first + count), tier, now_ns)


def _make_findable(residency: Residency, tenant: int, members: Column) -> None:
    rows, index = residency.rows, residency.tenants[tenant]
    index.cold_blocks += len(members)
    before = [] if index.cold is None else [index.cold.members()]
    index.cold = ColdKeys(rows, np.concatenate([*before, members]))
    if len(index.ghost):
        for row in members.tolist():
            rows.accesses[row] = index.ghost.accesses(rows.cold_key(row))


def _link_to_others(
    residency: Residency, tier: int, blocks: RecoveredBlocks, parents: Column, tenants: Column, first: int
) -> None:
    """Blocks whose parents are not among them: those hang on rows that were there before, or on placeholders."""
    rows, kids = residency.rows, residency.copies[tier].kids
    for position in np.flatnonzero((parents < 0) & blocks.parent.any(axis=1)).tolist():
        row = first + position
        parent = residency.row_to_hang_on(int(tenants[position]), blocks.parent_of(position), row)
        rows.parent[row] = parent
        rows.links[parent] += 1
        kids[parent] += 1
