"""Removing blocks and copies from the index.

The module owns the rules: leaf-first by choice, everything by force. See `index` for the invariants. It does not free a
slot: the caller does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from kvstore_tiers.base import Slot
from kvstored.lifecycle import BY_CHOICE, BY_ORDER, Cause, CopyState, Step, advance
from kvstored.store.blocks.events import Listeners
from kvstored.store.blocks.tree import ChainTree
from kvstored.store.blocks.view import ResidencyView
from kvstored.tier_set import MEMBERS, ONLY, TIER_SETS

_FILLING = int(CopyState.FILLING)  # plain ints: half the time of a comparison with a member
_RESIDENT = int(CopyState.RESIDENT)
_RETIRED = int(advance(CopyState.RESIDENT, Step.RETIRE))
_IS_BY_CHOICE = [cause in BY_CHOICE for cause in range(max(Cause) + 1)]  # a set of members hashes their names
_IS_BY_ORDER = [cause in BY_ORDER for cause in range(max(Cause) + 1)]


class TakenCopy(NamedTuple):
    """A copy that has been removed from the block index. The caller frees its `slot` in `tier`: at once, or later if a
    client may still read there."""

    tier: int
    slot: Slot


class Removal:
    """The part of the block index that removes blocks and copies. To make room (eviction, quota) it removes a copy or a
    block only if nothing needs it; for every other cause it removes the whole block by force."""

    def __init__(self, view: ResidencyView, tree: ChainTree, listeners: Listeners) -> None:
        self._view = view
        self._tree = tree
        self._listeners = listeners

    def remove(self, row: int, cause: Cause, now_ns: int) -> list[TakenCopy]:
        """Remove every copy of the block at `row`, remember `cause` as the reason, and return the removed copies. The
        row becomes free, or a placeholder if it has children.

        For the causes EVICTED and QUOTA it raises RuntimeError unless `may_forget(row)`. Any other cause removes by
        force: pins are dropped, and the caller must not reuse a slot while a reader may still look at it."""
        if _IS_BY_CHOICE[cause] and not self._view.may_forget(row):
            raise RuntimeError(f"row {row} cannot be {cause.name.lower()}: pinned, parent of a block, or being filled")
        rows = self._view.rows
        if rows.keys[row] is None:
            self._tree.to_dictionary(row)
        key = rows.keys[row]
        if key is None:
            raise RuntimeError(f"row {row} removed twice")
        self._view.pins.pop(row, None)
        held = MEMBERS[rows.mask[row] | rows.filling[row]]
        taken = [self._take_copy(row, tier) for tier in reversed(held)]
        tenant = self._view.kind_tenant[rows.kind[row]]
        self._view.tenants[tenant].ghost.remember(key, cause, now_ns, rows.accesses[row])
        if _IS_BY_ORDER[cause]:
            self._listeners.forget(tenant, (key,))
        rows.renew(row)
        self._tree.forget_empty(row)
        return taken

    def forget(self, tenant: int, keys: Sequence[bytes] | None) -> None:
        """Mark the blocks `keys` of `tenant` (None: all of them) that are no longer stored as removed by order, so that
        nothing of them is saved for a later process. Blocks that are stored stay."""
        ghost = self._view.tenants[tenant].ghost
        self._view.changes += 1
        if keys is None:
            ghost.drop_all()
        else:
            for key in keys:
                ghost.drop(key)
        self._listeners.forget(tenant, keys)

    def remove_chosen(
        self, tier: int, choose: Callable[[int], int], count: int, cause: Cause, now_ns: int
    ) -> list[Slot]:
        """Evict up to `count` blocks from `tier`, and return their slots. `choose` is called with `now_ns` and returns
        the next row to evict, or -1 to stop. `cause` is remembered as the reason. Raises RuntimeError for a block with
        a copy in another tier."""
        view, listener, bit = self._view, self._listeners.by_tier[tier], ONLY[tier]
        rows, copies, pins, kind_tenant = view.rows, view.copies[tier], view.pins, view.kind_tenant
        keys, kinds, parents, links, accesses = rows.keys, rows.kind, rows.parent, rows.links, rows.accesses
        mask, filling, state = rows.mask, rows.filling, copies.state
        removed = listener.removed
        view.changes += 1
        freed: list[Slot] = []
        ended: list[int] = []
        for _ in range(count):
            row = choose(now_ns)
            if row < 0:
                break
            is_plain = mask[row] == bit and state[row] == _RESIDENT and keys[row] is not None
            if not is_plain or links[row] or filling[row] or row in pins:
                if TIER_SETS[mask[row]].without(tier):
                    raise RuntimeError(f"row {row} has a copy in another tier: detach it instead")
                freed.extend(taken.slot for taken in self.remove(row, cause, now_ns))
                continue
            tenant = kind_tenant[kinds[row]]
            index = self._view.tenants[tenant]
            key: bytes = keys[row]  # type: ignore[assignment]  # a live row has a key
            parent = parents[row]
            state[row] = _RETIRED
            freed.append(copies.take(row, tenant))
            mask[row] = 0
            del index.readable[key]
            removed((row,))
            if self._listeners.is_followed:
                self._listeners.presence_changed(row)
            index.ghost.remember(key, cause, now_ns, accesses[row])
            if rows.optional.used:
                view.reset_facts(row)
            keys[row] = None
            ended.append(row)
            if parent >= 0:
                parents[row] = -1
                self._child_ended(parent, tier)
        rows.give_back_run(ended)
        return freed

    def remove_run(self, run: Sequence[int], tier: int, cause: Cause, now_ns: int) -> list[Slot]:
        """Remove the blocks `run`, consecutive blocks of a chain with the last one first, which have copies in `tier`
        alone. Return their slots. The tier's listener is notified of them together. When one may not be removed, it
        raises the error of `remove`, and the blocks before it in `run` have been removed.
        """
        rows, copies, pins, bit = self._view.rows, self._view.copies[tier], self._view.pins, ONLY[tier]
        keys, parents, links, accesses = rows.keys, rows.parent, rows.links, rows.accesses
        mask, filling, state, kids = rows.mask, rows.filling, copies.state, copies.kids
        self._view.changes += 1
        below, plain = -1, 0
        for row in run:
            hangs = 1 if below >= 0 else 0
            if mask[row] != bit or state[row] != _RESIDENT or links[row] != hangs or filling[row] or row in pins:
                break
            if keys[row] is None or (hangs and parents[below] != row):
                break
            below = row
            plain += 1
        rest, gone = run[plain:], run[:plain]
        freed: list[Slot] = []
        if gone:
            tenant = self._view.kind_tenant[rows.kind[below]]
            index = self._view.tenants[tenant]
            parent = parents[below]
            freed = copies.take_run(gone, tenant)
            for row in gone:
                state[row] = _RETIRED
                mask[row] = 0
            self._listeners.by_tier[tier].removed(gone)
            readable = index.readable
            for row in gone:
                if self._listeners.is_followed:
                    self._listeners.presence_changed(row)
                key: bytes = keys[row]  # type: ignore[assignment]  # a live row has a key
                del readable[key]
                if rows.optional.used:
                    self._view.reset_facts(row)
                keys[row] = None
                parents[row] = -1
                links[row] = kids[row] = 0
                index.ghost.remember(key, cause, now_ns, accesses[row])
            if parent >= 0:
                self._child_ended(parent, tier)
            rows.give_back_run(gone)
        for row in rest:
            freed.extend(taken.slot for taken in self.remove(row, cause, now_ns))
        return freed

    def detach(self, row: int, tier: int) -> Slot:
        """Remove the copy of the block at `row` in `tier`, and return its slot, which the caller frees.

        A copy that is being filled may always be removed, and a row without any copy then ends unless it has children.
        A readable copy may be removed only while another tier has a copy; for the last one it raises RuntimeError, and
        `remove`, which removes the block, is the call to make."""
        state = self._view.copies[tier].state[row]
        if state != _FILLING and not self._view.tier_mask(row).without(tier):
            raise RuntimeError(f"the last readable copy of row {row} cannot be detached from {self._view.tiers[tier]}")
        if self._view.rows.keys[row] is None:
            self._tree.to_dictionary(row)
        taken = self._take_copy(row, tier)
        if not self._view.rows.mask[row]:
            self._tree.forget_empty(row)
        else:
            self._tree.to_bulk(row)
        return taken.slot

    def detach_run(self, run: Sequence[int], tier: int) -> list[Slot]:
        """Remove the readable copies of `run` in `tier`, as `detach` does for each, and return their slots. The blocks
        are consecutive ones of a chain, the last one first, and each has a readable copy in another tier. The tier's
        listener is notified of them together."""
        rows, copies = self._view.rows, self._view.copies[tier]
        mask, state, parents, kids = rows.mask, copies.state, rows.parent, copies.kids
        below, bit = -1, ONLY[tier]
        for row in run:
            if state[row] != _RESIDENT or mask[row] == bit or (below >= 0 and parents[below] != row):
                raise RuntimeError(f"row {row} is not the next of a run of readable copies, or its last copy")
            below = row
        self._view.changes += 1
        tenant = self._view.kind_tenant[rows.kind[below]]
        taken = copies.take_run(run, tenant)
        for row in run:
            state[row] = _RETIRED
            mask[row] &= ~bit
        self._listeners.by_tier[tier].removed(run)
        if self._listeners.is_followed:
            self._listeners.presence_of_run(run)
        has_bulk = self._view.tenants[tenant].bulk is not None
        for row in run:
            above = parents[row]
            if above >= 0:
                kids[above] -= 1
            if has_bulk:
                self._tree.to_bulk(row)
        if above >= 0 and not kids[above] and self._view.has(above, tier):
            self._listeners.by_tier[tier].released(above)
        return taken

    def _child_ended(self, parent: int, tier: int) -> None:
        """Cut a child, whose only copy was in `tier`, from `parent`."""
        rows, kids = self._view.rows, self._view.copies[tier].kids
        kids[parent] -= 1
        rows.links[parent] -= 1
        above = rows.mask[parent]
        if not above:
            self._tree.forget_empty(parent)
        elif not rows.links[parent]:
            self._listeners.release(parent, above)
        elif not kids[parent] and tier in MEMBERS[above]:
            self._listeners.by_tier[tier].released(parent)

    def _take_copy(self, row: int, tier: int) -> TakenCopy:
        """Take a copy out of the columns only: the caller owns the rules."""
        copies, rows = self._view.copies[tier], self._view.rows
        self._view.changes += 1
        before = copies.state[row]
        copies.state[row] = advance(before, Step.ABORT if before == _FILLING else Step.RETIRE)
        tenant = self._view.kind_tenant[rows.kind[row]]
        slot = copies.take(row, tenant)
        if before == _FILLING:
            rows.filling[row] = TIER_SETS[rows.filling[row]].without(tier)
        else:
            rows.mask[row] = self._view.tier_mask(row).without(tier)
            if not rows.mask[row]:
                index = self._view.tenants[tenant]
                key = rows.keys[row]
                index.unreadable[key] = index.readable.pop(key)  # type: ignore[index, arg-type]
            self._listeners.by_tier[tier].removed((row,))
            if self._listeners.is_followed:
                self._listeners.presence_changed(row)
            if rows.optional.used and not rows.mask[row]:
                self._view.reset_facts(row)
        parent = rows.parent[row]
        if parent >= 0:
            copies.kids[parent] -= 1
            if not copies.kids[parent] and self._view.has(parent, tier):
                self._listeners.by_tier[tier].released(parent)
        return TakenCopy(tier, slot)
