"""The half of the index that takes blocks and copies away, and tells the listeners.

Owns the rules of leaving: leaf-first by choice, everything by force, and what becomes of a row that is left empty. See
`index` for the invariants. Never frees a slot: whoever takes a copy does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from kvstore_tiers.base import Slot
from kvstored.lifecycle import BY_CHOICE, Cause, CopyState, Step, advance
from kvstored.store.blocks.events import NobodyListens, PresenceListener, TierListener
from kvstored.store.blocks.temperature import Temperature

_FILLING = int(CopyState.FILLING)  # plain ints: half the time of a comparison with a member
_RESIDENT = int(CopyState.RESIDENT)
_RETIRED = int(advance(CopyState.RESIDENT, Step.RETIRE))
_IS_BY_CHOICE = [cause in BY_CHOICE for cause in range(max(Cause) + 1)]  # a set of members hashes their names


class TakenCopy(NamedTuple):
    """A copy that has left the index. The caller frees the slot: at once, or through limbo if readers may remain."""

    tier: int
    slot: Slot


class Removal(Temperature):
    """A base of `Residency`."""

    def __init__(self, tiers: Sequence[str], durable: int | None, in_memory: int | None) -> None:
        super().__init__(tiers, durable, in_memory)
        self._listeners: list[TierListener] = [NobodyListens() for _ in tiers]
        self._presence: PresenceListener | None = None
        self.changes = 0  # differs whenever a row or a copy came, went or changed its state; uses and pins do not count

    def remove(self, row: int, cause: Cause, now_ns: int) -> list[TakenCopy]:
        """Take every copy of a block and remember why. The row ends, or stays as a placeholder under its
        children.

        By choice (EVICTED, EXPIRED, QUOTA) raises RuntimeError unless `may_forget(row)`. By force (the other
        causes) leases end too: pins are dropped, and the caller sees to it that readers keep their bytes
        (limbo).
        """
        if _IS_BY_CHOICE[cause] and not self.may_forget(row):
            raise RuntimeError(f"row {row} cannot be {cause.name.lower()}: pinned, parent of a block, or being filled")
        rows = self.rows
        if rows.keys[row] is None:
            self._wake(row)
        key = rows.keys[row]
        if key is None:
            raise RuntimeError(f"row {row} removed twice")
        self.pins.pop(row, None)
        taken: list[TakenCopy] = []
        held = rows.mask[row] | rows.filling[row]
        while held:
            tier = held.bit_length() - 1
            held ^= 1 << tier
            taken.append(self._take_copy(row, tier))
        index = self.tenants[self._kind_tenant[rows.kind[row]]]
        index.ghost.remember(key, cause, now_ns, rows.accesses[row])
        rows.renew(row)
        self.forget_empty(row)
        return taken

    def remove_chosen(
        self, tier: int, choose: Callable[[int], int], count: int, cause: Cause, now_ns: int
    ) -> list[Slot]:
        """`remove` the row that `choose(now_ns)` names, `count` times or until it names none (-1); their slots.
        Raises RuntimeError for a block with a copy in another tier.

        What nearly every eviction is about goes the short way: a block with one readable copy and nothing on it.
        """
        rows, copies, pins, bit = self.rows, self.copies[tier], self.pins, 1 << tier
        keys, kinds, parents, links, accesses = rows.keys, rows.kind, rows.parent, rows.links, rows.accesses
        mask, filling, state, kids, kind_tenant = rows.mask, rows.filling, copies.state, copies.kids, self._kind_tenant
        removed, released = self._listeners[tier].removed, self._listeners[tier].released
        self.changes += 1
        freed: list[Slot] = []
        ended: list[int] = []
        for _ in range(count):
            row = choose(now_ns)
            if row < 0:
                break
            is_plain = mask[row] == bit and state[row] == _RESIDENT and keys[row] is not None
            if not is_plain or links[row] or filling[row] or row in pins:
                if mask[row] & ~bit:
                    raise RuntimeError(f"row {row} has a copy in another tier: detach it instead")
                freed.extend(taken.slot for taken in self.remove(row, cause, now_ns))
                continue
            tenant = kind_tenant[kinds[row]]
            index = self.tenants[tenant]
            key: bytes = keys[row]  # type: ignore[assignment]  # a live row has a key
            parent = parents[row]
            state[row] = _RETIRED
            freed.append(copies.take(row, tenant))
            mask[row] = 0
            del index.readable[key]
            removed(row)
            if self._presence is not None:
                self._tell_presence(row)
            index.ghost.remember(key, cause, now_ns, accesses[row])
            keys[row] = None
            ended.append(row)
            if parent < 0:
                continue
            parents[row] = -1
            kids[parent] -= 1
            links[parent] -= 1
            above = mask[parent]
            if above == bit:
                if not kids[parent]:
                    released(parent)
            elif not above:
                self.forget_empty(parent)
            elif not links[parent]:
                self._release(parent, above)
            elif not kids[parent] and above & bit:
                released(parent)
        rows.give_back_run(ended)
        return freed

    def remove_run(self, run: Sequence[int], tier: int, cause: Cause, now_ns: int) -> list[Slot]:
        """`remove` each of `run`, a piece of one chain, its end first, that has no copies but in `tier`; their slots.
        The listener hears of them together. Raises as `remove` does, for the first that may not go, once those before
        it have.
        """
        rows, copies, pins, bit = self.rows, self.copies[tier], self.pins, 1 << tier
        keys, parents, links, accesses = rows.keys, rows.parent, rows.links, rows.accesses
        mask, filling, state, kids = rows.mask, rows.filling, copies.state, copies.kids
        self.changes += 1
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
            tenant = self._kind_tenant[rows.kind[below]]
            index = self.tenants[tenant]
            parent = parents[below]
            freed = copies.take_run(gone, tenant)
            for row in gone:
                state[row] = _RETIRED
                mask[row] = 0
            self._listeners[tier].removed_run(gone)
            readable = index.readable
            for row in gone:
                if self._presence is not None:
                    self._tell_presence(row)
                key: bytes = keys[row]  # type: ignore[assignment]  # a live row has a key
                del readable[key]
                keys[row] = None
                parents[row] = -1
                links[row] = kids[row] = 0
                index.ghost.remember(key, cause, now_ns, accesses[row])
            if parent >= 0:
                kids[parent] -= 1
                links[parent] -= 1
                above = mask[parent]
                if not above:
                    self.forget_empty(parent)
                elif not links[parent]:
                    self._release(parent, above)
                elif not kids[parent] and above & bit:
                    self._listeners[tier].released(parent)
            rows.give_back_run(gone)
        for row in rest:
            freed.extend(taken.slot for taken in self.remove(row, cause, now_ns))
        return freed

    def detach(self, row: int, tier: int) -> Slot:
        """Take one copy. The caller frees its slot.

        A FILLING copy may always go (the transfer failed); a row left without any copy ends as in
        `forget_empty`. A readable one may go only while another tier has one, else RuntimeError: that is
        `remove`, with a cause.
        """
        state = self.copies[tier].state[row]
        if state != _FILLING and not self.rows.mask[row] & ~(1 << tier):
            raise RuntimeError(f"the last readable copy of row {row} cannot be detached from {self.tiers[tier]}")
        if self.rows.keys[row] is None:
            self._wake(row)
        taken = self._take_copy(row, tier)
        if not self.rows.mask[row]:
            self.forget_empty(row)
        else:
            self._cool(row)
        return taken.slot

    def forget_empty(self, row: int) -> None:
        """End a row that has no copy, unless children hang on it; then its placeholder ancestors, likewise."""
        rows = self.rows
        self.changes += 1
        while row >= 0 and not (rows.links[row] or rows.mask[row] or rows.filling[row]):
            key = rows.keys[row]
            if key is None:
                raise RuntimeError(f"row {row} ended twice")
            del self.tenants[self._kind_tenant[rows.kind[row]]].unreadable[key]
            parent = self._unlink(row)
            rows.give_back(row)
            row = parent

    # Inside

    def _take_copy(self, row: int, tier: int) -> TakenCopy:
        """Books only: the rules are the caller's."""
        copies, rows, bit = self.copies[tier], self.rows, 1 << tier
        self.changes += 1
        before = copies.state[row]
        copies.state[row] = advance(before, Step.ABORT if before == _FILLING else Step.RETIRE)
        tenant = self._kind_tenant[rows.kind[row]]
        slot = copies.take(row, tenant)
        if before == _FILLING:
            rows.filling[row] &= ~bit
        else:
            rows.mask[row] &= ~bit
            if not rows.mask[row]:
                index = self.tenants[tenant]
                key = rows.keys[row]
                index.unreadable[key] = index.readable.pop(key)  # type: ignore[index, arg-type]
            self._listeners[tier].removed(row)
            if self._presence is not None:
                self._tell_presence(row)
        parent = rows.parent[row]
        if parent >= 0:
            self._child_leaves(parent, tier)
        return TakenCopy(tier, slot)

    def _tell_presence(self, row: int) -> None:
        rows = self.rows
        key, tenant = rows.keys[row], self._kind_tenant[rows.kind[row]]
        self._presence.changed(tenant, key, rows.mask[row])  # type: ignore[union-attr, arg-type]  # a live row has a key

    def _child_leaves(self, parent: int, tier: int) -> None:
        """One child less of `parent` is in `tier`."""
        kids = self.copies[tier].kids
        kids[parent] -= 1
        if not kids[parent] and self.rows.mask[parent] >> tier & 1:
            self._listeners[tier].released(parent)

    def _unlink(self, row: int) -> int:
        """Cut `row` from its parent and return that parent, or -1."""
        rows = self.rows
        parent = rows.parent[row]
        if parent >= 0:
            rows.parent[row] = -1
            rows.links[parent] -= 1
            if not rows.links[parent]:
                self._release(parent, rows.mask[parent])
        return parent

    def _release(self, row: int, tiers: int) -> None:
        for tier, listener in enumerate(self._listeners):
            if tiers >> tier & 1:
                listener.released(row)
