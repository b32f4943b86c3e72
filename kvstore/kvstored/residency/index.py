"""The residency index: which blocks exist, in which tiers, who their parents are, and what may leave.

Owns every fact about where a block is; the tiers own the bytes. Tells each tier's listener (the policy) what
happens. Never does I/O, reads a clock or decides what is worth keeping. Single-threaded: the control thread's
alone.

Invariants (walked by `check`)
- A tenant's key has at most one row. A row is *readable* (a RESIDENT or DRAINING copy), *filling* (only
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

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from kvstore_proto.identity import NO_PARENT
from kvstore_tiers.base import Slot
from kvstore_tiers.recovered import RecoveredBlocks
from kvstored.lifecycle import BY_CHOICE, Cause, CopyState, Step, advance
from kvstored.residency.adoption import adopt
from kvstored.residency.events import NobodyListens, PresenceListener, TierListener
from kvstored.residency.tenant import TenantIndex
from kvstored.residency.view import Kind, ResidencyView

DEFAULT_GHOST_KEYS = 65_536
_ACCESSES_MAX = 0xFFFF
_STATES = tuple(CopyState)
_FILLING = int(CopyState.FILLING)  # plain ints: half the time of a comparison with a member
_RESIDENT = int(CopyState.RESIDENT)
_DRAINING = int(CopyState.DRAINING)
_STORED = int(advance(CopyState.ABSENT, Step.RECOVER))  # what a copy is that comes whole
_RETIRED = int(advance(CopyState.RESIDENT, Step.RETIRE))
_IS_BY_CHOICE = [cause in BY_CHOICE for cause in range(max(Cause) + 1)]  # a set of members hashes their names


class CyclicChainError(ValueError):
    """A block was to be stored as its own ancestor: the caller's keys are forged or mixed up."""


class TakenCopy(NamedTuple):
    """A copy that has left the index. The caller frees the slot: at once if it was readable and unpinned,
    when its transfer ends if it was FILLING or DRAINING, through limbo if readers may remain.
    """

    tier: int
    slot: Slot
    state: CopyState


class Residency(ResidencyView):
    """The index over `tiers`, fastest first. See the module for the invariants."""

    def __init__(self, tiers: Sequence[str], *, ghost_keys: int = DEFAULT_GHOST_KEYS) -> None:
        super().__init__(tiers)
        self._ghost_keys = ghost_keys
        self._tenant_numbers: dict[str, int] = {}
        self._kind_numbers: dict[Kind, int] = {}
        self._listeners: list[TierListener] = [NobodyListens() for _ in tiers]
        self._presence: PresenceListener | None = None

    # Names

    def tenant(self, name: str) -> int:
        """The number of a tenant, new when first seen."""
        number = self._tenant_numbers.get(name)
        if number is None:
            number = self._tenant_numbers[name] = len(self.tenants)
            self.tenants.append(TenantIndex(name, self._ghost_keys))
            for copies in self.copies:
                copies.bytes_by_tenant.append(0)
                copies.leaving_by_tenant.append(0)
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

    def forget_empty(self, row: int) -> None:
        """End a row that has no copy, unless children hang on it; then its placeholder ancestors, likewise."""
        rows = self.rows
        while row >= 0 and not (rows.links[row] or rows.mask[row] or rows.filling[row]):
            key = rows.keys[row]
            if key is None:
                raise RuntimeError(f"row {row} ended twice")
            del self.tenants[self._kind_tenant[rows.kind[row]]].unreadable[key]
            parent = self._unlink(row)
            rows.give_back(row)
            row = parent

    # Copies

    def attach(self, row: int, tier: int, slot: Slot, now_ns: int, *, filling: bool = False) -> None:
        """Give `row` a copy in `tier`: readable at once, or (`filling`) after `publish`."""
        copies = self.copies[tier]
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

    def drain(self, row: int, tier: int) -> None:
        """A demotion from `tier` has begun. The copy stays readable and is no longer in its parent's way."""
        copies = self.copies[tier]
        if self.rows.keys[row] is None:
            self._wake(row)
        copies.state[row] = advance(copies.state[row], Step.DRAIN)
        copies.leaving_by_tenant[self.tenant_of(row)] += copies.nbytes[row]
        self._child_leaves(row, tier)

    def keep(self, row: int, tier: int) -> None:
        """The demotion was given up."""
        copies = self.copies[tier]
        copies.state[row] = advance(copies.state[row], Step.KEEP)
        copies.leaving_by_tenant[self.tenant_of(row)] -= copies.nbytes[row]
        parent = self.rows.parent[row]
        if parent >= 0:
            copies.kids[parent] += 1
        self._listeners[tier].released(row)

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

    def adopt(self, tier: int, blocks: RecoveredBlocks, kinds: Sequence[Kind], now_ns: int) -> list[int]:
        """`insert` and `attach` of all `blocks`, readable in `tier`, some hundred times as fast; `kinds` belong to
        `blocks.origins`. What is left out, by position, has to go the slow way: keys that have a row already, and
        blocks that are no deeper than their parents, which may close a cycle.
        """
        return adopt(self, tier, blocks, kinds, now_ns)

    def kind_number(self, kind: Kind) -> int:
        """For `adopt`: what stands for `kind` in its column."""
        return self._kind(kind.tenant, kind.fingerprint_id, kind.group)

    def row_to_hang_on(self, tenant: int, key: bytes, child: int) -> int:
        """For `adopt`: the row of a parent, a placeholder where there is none."""
        index, rows = self.tenants[tenant], self.rows
        row = index.row(key)
        if row < 0:
            row = self._take(key, rows.kind[child], max(0, rows.depth[child] - 1), rows.payload_bytes[child])
            index.unreadable[key] = row
        return row

    def tell_adopted(self, rows: Iterable[int], tier: int, now_ns: int) -> None:
        """For `adopt`: tell whoever listens already."""
        listener, presence = self._listeners[tier], self._presence
        if isinstance(listener, NobodyListens) and presence is None:
            return
        for row in rows:
            listener.inserted(row, now_ns)
            if presence is not None:
                presence.changed(self.tenant_of(row), self.key(row), self.rows.mask[row])

    def _wake(self, row: int) -> None:
        """A row that was taken over in bulk is about to change: from now on its key is in the dictionary."""
        rows = self.rows
        key = rows.key(row)
        if key is None:
            return  # it is free, which is for the caller to find out
        index = self.tenants[self._kind_tenant[rows.kind[row]]]
        rows.keys[row] = key
        index.readable[key] = row
        index.cold_blocks -= 1

    def _cool(self, row: int) -> None:
        """The row may again be as it was when it was taken over: its key is not needed in the dictionary any more."""
        rows = self.rows
        index = self.tenants[self._kind_tenant[rows.kind[row]]]
        slowest_only = rows.mask[row] == 1 << len(self.copies) - 1 and not rows.filling[row]
        key = rows.keys[row]
        if index.cold is None or not slowest_only or key is None or not index.cold.has_place(key, row):
            return
        del index.readable[key]
        rows.keys[row] = None
        index.cold_blocks += 1

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

    def _take_copy(self, row: int, tier: int) -> TakenCopy:
        """Books only: the rules are the caller's."""
        copies, rows, bit = self.copies[tier], self.rows, 1 << tier
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
        if before == _DRAINING:
            copies.leaving_by_tenant[tenant] -= slot.nbytes
        elif rows.parent[row] >= 0:
            self._child_leaves(row, tier)
        return TakenCopy(tier, slot, _STATES[before])

    def _tell_presence(self, row: int) -> None:
        rows = self.rows
        key, tenant = rows.keys[row], self._kind_tenant[rows.kind[row]]
        self._presence.changed(tenant, key, rows.mask[row])  # type: ignore[union-attr, arg-type]  # a live row has a key

    def _child_leaves(self, row: int, tier: int) -> None:
        """One child less of `row`'s parent is in `tier` to stay."""
        parent = self.rows.parent[row]
        if parent < 0:
            return
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
