"""The residency index: which blocks exist, in which tiers, who their parents are, and what may leave.

Owns every fact about where a block is; the tiers own the bytes. What is asked of it stands in `view`, how blocks leave
in `removal`, how they come and are used here. Tells each tier's listener (the policy) what happens. Never does I/O,
reads a clock or decides what is worth keeping. Single-threaded: the control thread's alone.

Invariants (walked by `check`)
- A tenant's key has at most one row. A row is *readable* (a RESIDENT copy), *filling* (only
  FILLING copies), or a *placeholder*: no copy at all, kept because children hang on it (the parent has not
  been stored yet, or was taken by force: quarantine, drop, invalidation). Storing that key again revives the
  row, and the chain is whole.
- Leaf-first: by choice (evict, expire, quota) the last copy of a block leaves only when no child row hangs on
  it, so that a stored prefix never gets a hole. A copy may leave a tier at any time while another tier has a
  readable one.
- A pinned block keeps all its copies, except by force; whoever pins keeps a token and asks `current` before
  unpinning.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvstore_proto.identity import NO_PARENT
from kvstore_tiers.base import Slot
from kvstored.lifecycle import Cause, CopyState, Step, advance
from kvstored.store.blocks.events import NobodyListens, PresenceListener, TierListener
from kvstored.store.blocks.removal import Removal
from kvstored.store.blocks.tenant import TenantIndex
from kvstored.store.blocks.view import Kind

DEFAULT_GHOST_KEYS = 65_536
_ACCESSES_MAX = 0xFFFF
_FILLING = int(CopyState.FILLING)  # a plain int: half the time of a comparison with a member
_STORED = int(advance(CopyState.ABSENT, Step.RECOVER))  # what a copy is that comes whole


class CyclicChainError(ValueError):
    """A block was to be stored as its own ancestor: the caller's keys are forged or mixed up."""


class Residency(Removal):
    """The index over `tiers`, fastest first. See the module for the invariants."""

    def __init__(
        self,
        tiers: Sequence[str],
        *,
        ghost_keys: int = DEFAULT_GHOST_KEYS,
        durable: int | None = None,
        in_memory: int | None = None,
    ) -> None:
        super().__init__(tiers, durable, in_memory)
        self._ghost_keys = ghost_keys
        self._tenant_numbers: dict[str, int] = {}
        self._kind_numbers: dict[Kind, int] = {}

    # Names

    def tenant(self, name: str) -> int:
        """The number of a tenant, new when first seen."""
        number = self._tenant_numbers.get(name)
        if number is None:
            number = self._tenant_numbers[name] = len(self.tenants)
            self.tenants.append(TenantIndex(name, self._ghost_keys))
            for copies in self.copies:
                copies.bytes_by_tenant.append(0)
        return number

    def listen(self, tier: int, listener: TierListener) -> None:
        """Tell `listener` of what happens in `tier` from now on; one listener a tier."""
        self._listeners[tier] = listener

    def observe(self, listener: PresenceListener) -> None:
        """Tell `listener` where blocks can be read, from now on; there is one."""
        self._presence = listener

    # Rows

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
        """A row for a block without copies yet: `attach` one next, or `forget_empty` it.

        `parent_key` is 16 zero bytes for the first of a chain; a parent that is not stored becomes a
        placeholder. The new row starts with the access count that the ghost remembers; storing is an access
        of its own only through `touch_run`. Raises CyclicChainError for a block that would be its own ancestor;
        RuntimeError when the block is readable or being filled already.
        """
        index = self.tenants[tenant]
        self.changes += 1
        if key == parent_key:
            raise CyclicChainError(f"block {key.hex()} names itself as its parent")
        kind = self._kind(tenant, fingerprint_id, group)
        parent = -1
        if parent_key != NO_PARENT:
            parent = index.row(parent_key)
        row = index.row(key)
        before = -1
        if row < 0:
            row = self._take(key, kind, depth, payload_bytes)
            index.unreadable[key] = row
        else:
            self._check_revivable(row, parent)
            before = self._unlink(row)
            self.rows.kind[row] = kind
            self.rows.depth[row] = depth
            self.rows.payload_bytes[row] = payload_bytes
        if parent < 0 and parent_key != NO_PARENT:
            parent = self._take(parent_key, kind, max(0, depth - 1), payload_bytes)
            index.unreadable[parent_key] = parent
        if parent >= 0:
            self.rows.parent[row] = parent
            self.rows.links[parent] += 1
        if before >= 0:
            self.forget_empty(before)
        index.fingerprints.add(fingerprint_id)
        self.rows.last_access_ns[row] = now_ns
        self.rows.accesses[row] = index.ghost.accesses(key)
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
    ) -> list[int]:
        """`insert` and `attach` of each of `keys`, which continue the chain of row `parent` (-1: begin one), whole and
        readable in `tier` at once. Raises RuntimeError for a key that has a row already.
        """
        rows, copies, index = self.rows, self.copies[tier], self.tenants[tenant]
        readable, unreadable, ghost = index.readable, index.unreadable, index.ghost
        kind = self._kind(tenant, fingerprint_id, group)
        depth = rows.depth[parent] + 1 if parent >= 0 else 0
        free = rows.reserve(len(keys))
        if rows.capacity > len(copies.state):
            for each in self.copies:
                each.grow(rows.capacity)
        row_keys, parents, links, kinds, depths = rows.keys, rows.parent, rows.links, rows.kind, rows.depth
        sizes, last, accesses, mask = rows.payload_bytes, rows.last_access_ns, rows.accesses, rows.mask
        state, kids, bit, recall = copies.state, copies.kids, 1 << tier, ghost.accesses
        self.changes += 1
        found: list[int] = []
        for key in keys:
            if key in readable or key in unreadable or (index.cold is not None and index.cold.get(key) >= 0):
                raise RuntimeError(f"block {key.hex()} is stored already")
            row = free.pop()
            row_keys[row] = key
            parents[row] = parent
            kinds[row] = kind
            depths[row] = depth
            sizes[row] = payload_bytes
            last[row] = now_ns
            accesses[row] = recall(key)
            mask[row] = bit
            state[row] = _STORED
            readable[key] = row
            if parent >= 0:
                links[parent] += 1
                kids[parent] += 1
            parent = row
            depth += 1
            found.append(row)
        rows.live += len(found)
        copies.put_run(found, slots, tenant)
        index.fingerprints.add(fingerprint_id)
        self._listeners[tier].inserted_run(found, now_ns)
        if self._presence is not None:
            for row in found:
                self._tell_presence(row)
        return found

    # Copies

    def attach(self, row: int, tier: int, slot: Slot, now_ns: int, *, filling: bool = False) -> None:
        """Give `row` a copy in `tier`: readable at once, or (`filling`) after `publish`."""
        copies = self.copies[tier]
        self.changes += 1
        if self.rows.keys[row] is None:
            self._wake(row)
        advance(copies.state[row], Step.RESERVE if filling else Step.RECOVER)
        copies.put(row, slot, self._kind_tenant[self.rows.kind[row]])
        parent = self.rows.parent[row]
        if parent >= 0:
            copies.kids[parent] += 1
        copies.state[row] = _FILLING
        self.rows.filling[row] |= 1 << tier
        if not filling:
            self.publish(row, tier, now_ns)

    def publish(self, row: int, tier: int, now_ns: int) -> None:
        """The copy that was being filled is whole: readable from now on."""
        copies = self.copies[tier]
        self.changes += 1
        copies.state[row] = advance(copies.state[row], Step.PUBLISH)
        rows = self.rows
        others = rows.mask[row]
        if not others:
            index = self.tenants[self._kind_tenant[rows.kind[row]]]
            key = rows.keys[row]
            index.readable[key] = index.unreadable.pop(key)  # type: ignore[index, arg-type]  # a live row has a key
        rows.mask[row] = others | 1 << tier
        rows.filling[row] &= ~(1 << tier)
        self._listeners[tier].inserted(row, now_ns)
        if self._presence is not None:
            self._tell_presence(row)
        if others:
            self._release(row, others)

    def move(self, row: int, tier: int, slot: Slot) -> Slot:
        """The bytes of a readable copy were copied to `slot`, of the same size: the copy is there from now on. Returns
        the slot that it left. Raises RuntimeError for a copy that is not readable or a slot of another size."""
        copies = self.copies[tier]
        left = self.slot(row, tier)
        if copies.state[row] != _STORED or left.nbytes != slot.nbytes:
            raise RuntimeError(f"row {row} cannot move from {left} to {slot}: it is {self.state(row, tier).name}")
        self.changes += 1
        copies.place(row, slot)
        return left

    # Use

    def touch_run(self, rows: Sequence[int], now_ns: int) -> None:
        """An access of `rows` together, in chain order (head first): a hit, or the storing of new blocks."""
        columns = self.rows
        last_access_ns, accesses, mask = columns.last_access_ns, columns.accesses, columns.mask
        everywhere = 0xFF
        somewhere = 0
        for row in rows:
            last_access_ns[row] = now_ns
            if accesses[row] != _ACCESSES_MAX:
                accesses[row] += 1
            tiers = mask[row]
            everywhere &= tiers
            somewhere |= tiers
        for tier, listener in enumerate(self._listeners):
            bit = 1 << tier
            if rows and everywhere & bit:
                listener.accessed(rows, now_ns)
            elif somewhere & bit:
                listener.accessed([row for row in rows if mask[row] & bit], now_ns)

    def request_run(self, tenant: int, rows: Sequence[int], missing: Sequence[bytes], now_ns: int) -> None:
        """`touch_run` of what a request found, which asked for the blocks `missing` after it as well."""
        if not missing:
            self.touch_run(rows, now_ns)
            return
        last_access_ns, accesses, mask = self.rows.last_access_ns, self.rows.accesses, self.rows.mask
        for row in rows:
            last_access_ns[row] = now_ns
            accesses[row] = min(accesses[row] + 1, _ACCESSES_MAX)
        for tier, listener in enumerate(self._listeners):
            listener.requested([row for row in rows if mask[row] >> tier & 1], missing, tenant, now_ns)

    def pass_by(self, tenant: int, key: bytes, now_ns: int) -> None:
        """A block that was to be stored is not worth its room: as if it had been stored, used and evicted at once."""
        ghost = self.tenants[tenant].ghost
        ghost.remember(key, Cause.EVICTED, now_ns, ghost.accesses(key) + 1)

    def touch(self, row: int, now_ns: int) -> None:
        """An access of one block."""
        self.touch_run((row,), now_ns)

    def pin(self, row: int) -> None:
        """One more reason why no copy of the block may leave."""
        self.pins[row] = self.pins.get(row, 0) + 1

    def pin_run(self, rows: Sequence[int]) -> None:
        """`pin` for each of `rows`."""
        pins = self.pins
        for row in rows:
            pins[row] = pins.get(row, 0) + 1

    def unpin_run(self, tokens: Iterable[int]) -> None:
        """`unpin` for each block that is still there: one that was found damaged took its pins along."""
        for row in map(self.current, tokens):
            if row >= 0:
                self.unpin(row)

    def unpin(self, row: int) -> None:
        """One reason less. Raises RuntimeError when the block is not pinned."""
        left = self.pins.get(row, 0) - 1
        if left < 0:
            raise RuntimeError(f"row {row} unpinned more often than pinned")
        if left:
            self.pins[row] = left
            return
        del self.pins[row]
        self._release(row, self.rows.mask[row])

    # In bulk

    def kind_number(self, kind: Kind) -> int:
        """For `adopt`: what stands for `kind` in its column."""
        return self._kind(kind.tenant, kind.fingerprint_id, kind.group)

    def parent_or_placeholder(self, tenant: int, key: bytes, child: int) -> int:
        """For `adopt`: the row of a parent, a placeholder where there is none."""
        index, rows = self.tenants[tenant], self.rows
        row = index.row(key)
        if row < 0:
            row = self._take(key, rows.kind[child], max(0, rows.depth[child] - 1), rows.payload_bytes[child])
            index.unreadable[key] = row
        return row

    def notify_adopted(self, rows: Iterable[int], tier: int, now_ns: int) -> None:
        """For `adopt`: notify the listeners that are there already."""
        listener, presence = self._listeners[tier], self._presence
        if isinstance(listener, NobodyListens) and presence is None:
            return
        for row in rows:
            listener.inserted(row, now_ns)
            if presence is not None:
                presence.changed(self.tenant_of(row), self.key(row), self.rows.mask[row])

    # Inside

    def _kind(self, tenant: int, fingerprint_id: int, group: int) -> int:
        kind = (tenant, fingerprint_id, group)
        number = self._kind_numbers.get(kind)  # type: ignore[call-overload]  # a plain tuple equals its Kind
        if number is None:
            number = self._kind_numbers[Kind(*kind)] = len(self.kinds)
            self.kinds.append(Kind(*kind))
            self._kind_tenant.append(tenant)
        return int(number)

    def _take(self, key: bytes, kind: int, depth: int, payload_bytes: int) -> int:
        row = self.rows.take(key, kind, depth, payload_bytes)
        if row >= len(self.copies[0].state):
            for copies in self.copies:
                copies.grow(self.rows.capacity)
        return row

    def _check_revivable(self, row: int, parent: int) -> None:
        if self.rows.mask[row] or self.rows.filling[row]:
            raise RuntimeError(f"row {row} inserted while it has a copy")
        ancestor = parent
        while ancestor >= 0:  # only here: a row without children cannot close a cycle
            if ancestor == row:
                raise CyclicChainError(f"block {self.key(row).hex()} would be its own ancestor")
            ancestor = self.rows.parent[ancestor]
