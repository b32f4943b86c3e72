"""Entering blocks and copies into the block index. The module owns the numbers of tenants and of row kinds. See `index`
for the invariants.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvstore_proto.identity import NO_PARENT
from kvstore_tiers.base import Slot
from kvstored.lifecycle import CopyState, Step, advance
from kvstored.store.blocks.events import Listeners, NullListener
from kvstored.store.blocks.keys import TenantIndex
from kvstored.store.blocks.rows import counted
from kvstored.store.blocks.tree import ChainTree, CyclicChainError
from kvstored.store.blocks.view import ResidencyView, RowKind
from kvstored.tier_set import ONLY

_FILLING = int(CopyState.FILLING)  # a plain int: half the time of a comparison with a member
_STORED = int(advance(CopyState.ABSENT, Step.RECOVER))  # what a copy is that comes whole


class Arrival:
    """The part of the block index that enters blocks: one at a time (`insert`, `attach`, `publish`), or consecutive
    blocks of a chain at once (`store_run`).
    """

    def __init__(self, view: ResidencyView, tree: ChainTree, listeners: Listeners, ghost_keys: int) -> None:
        self._view = view
        self._tree = tree
        self._listeners = listeners
        self._ghost_keys = ghost_keys
        self._tenant_numbers: dict[str, int] = {}
        self._kind_numbers: dict[tuple[int, int, int], int] = {}

    def tenant(self, name: str) -> int:
        """Return the number of the tenant `name`. A name that was not seen before gets the next number."""
        number = self._tenant_numbers.get(name)
        if number is None:
            number = self._tenant_numbers[name] = len(self._view.tenants)
            self._view.tenants.append(TenantIndex(name, self._ghost_keys))
            for copies in self._view.copies:
                copies.bytes_by_tenant.append(0)
        return number

    def insert(
        self,
        tenant: int,
        key: bytes,
        parent_key: bytes,
        *,
        fingerprint_id: int,
        group: int,
        depth: int,
        payload_bytes: int,
        now_ns: int,
    ) -> int:
        """Return a row of the block index for the block `key` at `depth` in its chain; it has no copies yet. Call
        `attach` next to give it one, or `forget_empty` to end it.

        `parent_key` is 16 zero bytes for the first block of a chain; a parent that is not stored gets a row as a
        placeholder. If the block was stored and removed before, its former number of uses is its first count. Raises
        CyclicChainError for a block that would be its own ancestor, RuntimeError when the block is readable or being
        filled already."""
        index = self._view.tenants[tenant]
        self._view.changes += 1
        if key == parent_key:
            raise CyclicChainError(f"block {key.hex()} names itself as its parent")
        kind = self.kind_number((tenant, fingerprint_id, group))
        parent = index.row(parent_key) if parent_key != NO_PARENT else -1
        row = index.row(key)
        before = -1
        if row < 0:
            row = self._tree.take(key, kind, depth, payload_bytes)
            index.unreadable[key] = row
        else:
            self._tree.check_revivable(row, parent)
            before = self._tree.unlink(row)
            self._view.rows.optional.reset((row,))
            self._view.rows.fit(kind, depth)
            self._view.rows.kind[row] = kind
            self._view.rows.depth[row] = depth
            self._view.rows.payload_bytes[row] = payload_bytes
        if parent < 0 and parent_key != NO_PARENT:
            parent = self._tree.parent_or_placeholder(tenant, parent_key, kind, depth, payload_bytes)
        if parent >= 0:
            self._view.rows.parent[row] = parent
            self._view.rows.links = counted(self._view.rows.links, parent)
        if before >= 0:
            self._tree.forget_empty(before)
        index.fingerprints.add(fingerprint_id)
        self._view.rows.last_access_ns[row] = now_ns
        self._view.rows.accesses[row] = index.ghost.accesses(key)
        return row

    def store_run(
        self,
        tenant: int,
        keys: Sequence[bytes],
        parent: int,
        tier: int,
        slots: Sequence[Slot],
        *,
        fingerprint_id: int,
        group: int,
        payload_bytes: int,
        now_ns: int,
        filling: bool = False,
    ) -> list[int]:
        """Enter the blocks `keys`, readable in `tier` at once, as `insert` and `attach` would do for each. They
        continue the chain of the row `parent` (-1: they begin a chain), and take `slots` in order. Return their rows.
        With `filling` they are readable only after `publish_run`. Raises RuntimeError for a key that has a row already.
        """
        rows, copies, index = self._view.rows, self._view.copies[tier], self._view.tenants[tenant]
        kind = self.kind_number((tenant, fingerprint_id, group))
        depth = rows.depth[parent] + 1 if parent >= 0 else 0
        free = rows.reserve(len(keys))
        rows.fit(kind, depth + len(keys))
        if rows.capacity > len(copies.state):
            for each in self._view.copies:
                each.grow(rows.capacity)
        row_keys, parents, kinds, depths = rows.keys, rows.parent, rows.kind, rows.depth
        sizes, last, accesses, mask = rows.payload_bytes, rows.last_access_ns, rows.accesses, rows.mask
        state, recall = copies.state, index.ghost.accesses
        entered = index.unreadable if filling else index.readable
        where, is_now, bit = rows.filling if filling else mask, _FILLING if filling else _STORED, ONLY[tier]
        self._view.changes += 1
        found: list[int] = []
        stored = [] if index.has_none_of(keys) else [key for key in keys if index.row(key) >= 0]
        if stored or len(set(keys)) < len(keys):
            raise RuntimeError(f"block {(*stored, keys[0])[0].hex()} is stored already")
        if parent >= 0:
            rows.links, copies.kids = counted(rows.links, parent), counted(copies.kids, parent)
        links, kids = rows.links, copies.kids
        for key in keys:
            row = free.pop()
            row_keys[row] = key
            parents[row] = parent
            kinds[row], depths[row] = kind, depth
            sizes[row], last[row] = payload_bytes, now_ns
            accesses[row] = recall(key)
            where[row] = bit
            state[row] = is_now
            entered[key] = row
            if found:
                links[parent] = kids[parent] = 1
            parent = row
            depth += 1
            found.append(row)
        rows.live += len(found)
        copies.put_run(found, slots, tenant)
        index.fingerprints.add(fingerprint_id)
        if not filling:
            self._arrived(found, tier, now_ns)
        return found

    def _arrived(self, rows: Sequence[int], tier: int, now_ns: int) -> None:
        self._listeners.by_tier[tier].inserted(rows, now_ns)
        if self._listeners.is_followed:
            self._listeners.presence_of_run(rows)

    def attach(self, row: int, tier: int, slot: Slot, now_ns: int, *, filling: bool = False) -> None:
        """Give the block at `row` a copy in `tier`, in `slot`. The copy is readable at once; with `filling`, only after
        a call of `publish`."""
        self.attach_run((row,), tier, (slot,), Step.RESERVE if filling else Step.RECOVER)
        if not filling:
            self.publish(row, tier, now_ns)

    def attach_run(self, run: Sequence[int], tier: int, slots: Sequence[Slot], step: Step = Step.RESERVE) -> None:
        """Give each block of `run`, which are of one tenant, a copy in `tier`, in the slot of `slots` at the same
        position. The copies are readable after a call of `publish_run`."""
        rows, copies, bit = self._view.rows, self._view.copies[tier], ONLY[tier]
        self._view.changes += 1
        for row in run:
            if rows.keys[row] is None:
                self._tree.to_dictionary(row)
            advance(copies.state[row], step)
            copies.state[row] = _FILLING
            if (parent := rows.parent[row]) >= 0:
                copies.kids = counted(copies.kids, parent)
            rows.filling[row] |= bit
        copies.put_run(run, slots, self._view.kind_tenant[rows.kind[run[0]]])

    def publish(self, row: int, tier: int, now_ns: int) -> None:
        """Make the copy of the block at `row` in `tier`, which was being filled and is complete, readable."""
        self.publish_run((row,), tier, now_ns)

    def publish_run(self, run: Sequence[int], tier: int, now_ns: int) -> None:
        """Make the copies in `tier` of the blocks `run`, which follow one another in a chain, readable. They were being
        filled and are complete."""
        rows, state, bit = self._view.rows, self._view.copies[tier].state, ONLY[tier]
        mask, filling, keys = rows.mask, rows.filling, rows.keys
        index = self._view.tenants[self._view.kind_tenant[rows.kind[run[0]]]]
        readable, unreadable = index.readable, index.unreadable
        self._view.changes += 1
        elsewhere: list[tuple[int, int]] = []
        for row in run:
            state[row] = _STORED if state[row] == _FILLING else advance(state[row], Step.PUBLISH)
            if others := mask[row]:
                elsewhere.append((row, others))
            else:
                key = keys[row]
                readable[key] = unreadable.pop(key)  # type: ignore[index, arg-type]  # a live row has a key
            mask[row] |= bit
            filling[row] &= ~bit
        self._arrived(run, tier, now_ns)
        for row, others in elsewhere:
            self._listeners.release(row, others)

    def note_stored(self, row: int, tier: int, codec: int, stored_bytes: int, error: float = 0.0) -> None:
        """Note the form of the copy in `tier`, before it is published: the number of its codec, 0 for the payload as it
        is, its length, and the error bound of a lossy copy."""
        optional = self._view.copies[tier].optional
        if codec:
            optional.set("codec", row, codec)
            optional.set("stored_bytes", row, stored_bytes)
        if error:
            self._view.exactness.note(row, tier, error)

    def move(self, row: int, tier: int, slot: Slot) -> Slot:
        """Note that the readable copy of the block at `row` in `tier` is in `slot` now, to which the caller has copied
        its bytes. Return the former slot. Raises RuntimeError for a copy that is not readable, or a slot of another
        size."""
        copies = self._view.copies[tier]
        left = self._view.slot(row, tier)
        if copies.state[row] != _STORED or left.nbytes != slot.nbytes:
            raise RuntimeError(f"row {row} cannot move from {left} to {slot}: it is {self._view.state(row, tier).name}")
        self._view.changes += 1
        copies.place(row, slot)
        return left

    def kind_number(self, kind: tuple[int, int, int]) -> int:
        """Return the number of the row kind `kind`, a tuple of tenant, fingerprint and layer group that a block belongs
        to. A kind that was not seen before gets the next number."""
        number = self._kind_numbers.get(kind)
        if number is None:
            number = self._kind_numbers[kind] = len(self._view.kinds)
            self._view.kinds.append(RowKind(*kind))
            self._view.kind_tenant.append(kind[0])
            self._view.kind_window.append(self._view.window_of(kind[1], kind[2]))
        return number

    def notify_adopted(self, rows: Iterable[int], tier: int, now_ns: int) -> None:
        """Notify the listeners that the blocks `rows`, which an earlier process stored, have been entered in `tier` at
        the start of the daemon."""
        listener, is_followed = self._listeners.by_tier[tier], self._listeners.is_followed
        if isinstance(listener, NullListener) and not is_followed:
            return
        for row in rows:
            listener.inserted((row,), now_ns)
            if is_followed:
                self._listeners.presence_changed(row)
