"""The view gives read access to the columns of the residency index, and answers all questions about them.

Policies and listings get this view. It changes no row or copy, except that `reset_facts` resets optional columns; the
parts that `index` puts together make the changes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence, Set
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvstore_proto.arena import slot_bytes
from kvstore_proto.identity import NO_PARENT
from kvstore_tiers.base import Slot
from kvstore_tiers.codecs import ShapeOf
from kvstored.lifecycle import Cause, CopyState
from kvstored.store.blocks.exactness import Exactness
from kvstored.store.blocks.ghost import Absence
from kvstored.store.blocks.keys import TenantIndex, unpack_keys
from kvstored.store.blocks.rows import RowColumns, TierCopies
from kvstored.tier_set import MAX_TIERS, MEMBERS, NO_TIERS, ONLY, TIER_SETS, TierSet

_RESIDENT = int(CopyState.RESIDENT)  # a plain int: half the time of a comparison with a member


class RowKind(NamedTuple):
    """The facts that blocks of one row kind share."""

    tenant: int
    fingerprint_id: int
    group: int


class ResidencyView:
    """Answers questions about rows of live blocks; the answers for a free row mean nothing. A tier is named by its
    position. `durable`: the position of the tier that outlives the daemon, -1 if there is none; the last tier by
    default. `in_memory`: how many tiers, from the first on, are in memory; by default all tiers before the durable one.
    `mapped`: the position of the tier that clients map, where puts are stored and leases are given; a tier before it
    has copies of blocks that are used often. `exported`: the tiers before it that a client on their device may read in
    place. `closed`: the tiers that no new lease may name now. `changes` differs whenever a row or a copy was added,
    removed or changed its state; uses and pins do not count. `deletions`: how many times blocks were deleted by order.
    `window_of(fingerprint_id, group)`: how many blocks before a boundary a resume there needs; 0: all, or not known.
    `shape_of(fingerprint digest, group, payload bytes)`: the shape of a payload, None if it is not known; it may be
    called from any thread.
    """

    def __init__(
        self,
        tiers: Sequence[str],
        durable: int | None = None,
        in_memory: int | None = None,
        mapped: int = 0,
        exported: TierSet = NO_TIERS,
    ) -> None:
        if not 1 <= len(tiers) <= MAX_TIERS:
            raise ValueError(f"residency takes 1 to {MAX_TIERS} tiers, got {len(tiers)}")
        self.tiers = tuple(tiers)
        self.durable = (len(tiers) - 1 or -1) if durable is None else durable
        self.in_memory = in_memory or (self.durable if self.durable > 0 else len(tiers))
        self.mapped, self.exported, self.closed = mapped, exported, NO_TIERS
        self.rows = RowColumns()
        self.copies = tuple(TierCopies(name) for name in tiers)
        self.tenants: list[TenantIndex] = []
        self.kinds: list[RowKind] = []
        self.pins: dict[int, int] = {}
        self.pinned_bytes: defaultdict[int, int] = defaultdict(int)  # by tenant, slots of blocks that owners pinned
        self.kind_tenant: list[int] = []  # by kind number
        self.terms_gone: Callable[[int], None] | None = None  # called for a block that goes and had later terms
        self.kind_window: list[int] = []  # by kind number: blocks that a resume needs before it, see `window_of`
        self.window_of: Callable[[int, int], int] = lambda fingerprint_id, group: 0
        self.exactness = Exactness(self.rows, self.copies, mapped)
        self.shape_of: ShapeOf = lambda digest, group, payload_bytes: None
        self.changes = 0
        self.deletions = 0

    def tier(self, name: str) -> int:
        """Return the position of the tier `name`. Raises ValueError for an unknown name."""
        return self.tiers.index(name)

    def readable(self, device_tiers: TierSet) -> TierSet:
        """Return the tiers that a client can read in place. `device_tiers`: the tiers on the client's device."""
        return device_tiers.difference(self.closed).with_tier(self.mapped)

    # Looking up

    def find(self, tenant: int, key: bytes) -> int:
        """Return the row of a readable block, or -1."""
        return self.tenants[tenant].find(key)

    def find_any(self, tenant: int, key: bytes) -> int:
        """Return the row of a block that is readable or being filled, or of a placeholder; -1 if there is no row."""
        return self.tenants[tenant].row(key)

    def find_run(self, tenant: int, packed_keys: bytes) -> list[int]:
        """Return the rows of the leading run of readable blocks. O(keys); 64 keys take a few microseconds."""
        return self.find_keys(tenant, unpack_keys(packed_keys))

    def find_keys(self, tenant: int, keys: Iterable[bytes]) -> list[int]:
        """Return the rows that `find_run` returns, for keys that are not packed."""
        index, keys = self.tenants[tenant], tuple(keys)
        found: list[int] = []
        for row in map(index.readable.get, keys):
            if row is None:
                break
            found.append(row)
        if index.bulk is not None and len(found) < len(keys):
            found += index.bulk.find_run(keys[len(found) :], index.readable.get)
        return found

    def find_each(self, tenant: int, packed_keys: bytes) -> list[int]:
        """Return for every key the row of its readable block, or -1."""
        index, keys = self.tenants[tenant], unpack_keys(packed_keys)
        if index.bulk is not None:
            return [index.find(key) for key in keys]
        readable = index.readable
        return [readable.get(key, -1) for key in keys]

    def find_column(self, tenant: int, keys: npt.NDArray[np.void]) -> npt.NDArray[np.int64]:
        """Return for every key (dtype V16) the row of its readable block, or -1. Use it for many keys: a million take
        0.3 s."""
        index = self.tenants[tenant]
        get, found = index.readable.get, np.full(len(keys), -1, np.int64)
        if index.bulk is not None:
            found[:] = index.bulk.find_each(np.ascontiguousarray(keys).view("<u8").reshape(-1, 2))
        left = np.flatnonzero(found < 0)
        found[left] = [get(key, -1) for key in keys[left].tolist()]
        return found

    def why_missing(self, tenant: int, key: bytes, fingerprint_id: int = -1, family: Set[int] = frozenset()) -> Absence:
        """Return the reason why `key` is not readable. The reason is OTHER_FINGERPRINT if the tenant never stored
        blocks under `fingerprint_id`, but did under another fingerprint in `family`.
        """
        index = self.tenants[tenant]
        row = index.find(key)
        if row >= 0 and self.expires_s(row):
            return Absence(Cause.EXPIRED)  # nothing else hides a block that is stored
        absence = index.ghost.recall(key)
        if absence is not None:
            return absence
        if family and fingerprint_id not in index.fingerprints and not index.fingerprints.isdisjoint(family):
            return Absence(Cause.OTHER_FINGERPRINT)
        return Absence(Cause.NEVER_STORED)

    # Where it is

    def slot(self, row: int, tier: int) -> Slot:
        """Return the slot of the copy in `tier`. Raises RuntimeError if there is no copy."""
        if not self.copies[tier].state[row]:  # ABSENT
            raise RuntimeError(f"row {row} has no copy in {self.tiers[tier]}")
        return self.copies[tier].slot(row)

    def slots(self, rows: Sequence[int], tier: int) -> list[Slot]:
        """Return the slot of each row's copy in `tier`. Raises RuntimeError if a row has no copy there."""
        copies = self.copies[tier]
        state, container, offset = copies.state, copies.container, copies.offset
        nbytes, generation = copies.nbytes, copies.generation
        if not all(state[row] for row in rows):
            raise RuntimeError(f"not all of {rows} have a copy in {self.tiers[tier]}")
        return [Slot(container[row], offset[row], nbytes[row], generation[row]) for row in rows]

    def is_held_by_another(self, row: int, tier: int) -> bool:
        """Return whether another tenant has a copy in `tier`, in any state, of a block with the same key."""
        key, tenant, state = self.key(row), self.tenant_of(row), self.copies[tier].state
        others = (index.row(key) for number, index in enumerate(self.tenants) if number != tenant)
        return any(other >= 0 and state[other] for other in others)

    def state(self, row: int, tier: int) -> CopyState:
        return CopyState(self.copies[tier].state[row])

    def is_in(self, row: int, tier: int) -> bool:
        """Return whether `tier` has a copy, readable or not."""
        return bool(self.copies[tier].state[row])

    def has(self, row: int, tier: int) -> bool:
        """Return whether `tier` has a readable copy."""
        return tier in MEMBERS[self.rows.mask[row]]

    def tier_mask(self, row: int) -> TierSet:
        """Return the tiers that have a readable copy."""
        return TIER_SETS[self.rows.mask[row]]

    def fastest(self, row: int, device_tiers: int = NO_TIERS) -> int:
        """Return the tier from which a client has the block soonest: the mapped tier if it has a readable copy,
        otherwise the first tier with a readable copy on the client's device, otherwise the first tier with a readable
        copy; -1 if there is none.
        """
        return self.fastest_of(self.exactness.best_tiers(row), device_tiers)

    def fastest_of(self, tiers: int, device_tiers: int) -> int:
        """Return the result of `fastest` for a block with readable copies in `tiers`."""
        members = MEMBERS[tiers]
        if self.mapped in members:
            return self.mapped
        nearest = MEMBERS[tiers & device_tiers] or members
        return nearest[0] if nearest else -1

    def fastest_in_memory(self, row: int) -> int:
        """Return the fastest tier with a readable copy if this tier is in memory, or -1."""
        position = self.fastest(row)
        return position if position < self.in_memory else -1

    # What may be evicted

    def pin_count(self, row: int) -> int:
        return self.pins.get(row, 0)

    def is_held(self, row: int) -> bool:
        """Return whether the copies of the block must stay in their slots: it is leased, or being copied. Pins of
        owners keep the copies in their tiers, not in their slots."""
        return self.pins.get(row, 0) > bool(self.pinned_by(row))

    def is_evictable(self, row: int, tier: int) -> bool:
        """Return whether the copy in `tier` may be evicted now: it is RESIDENT and unpinned, and has no child in this
        tier that needs it. The slowest tier cannot demote: there the block also needs another copy, or no such child in
        any tier."""
        copies, rows = self.copies[tier], self.rows
        if copies.state[row] != _RESIDENT or row in self.pins:
            return False
        is_last = rows.links[row] and tier == len(self.copies) - 1 and rows.mask[row] == ONLY[tier]
        return not (copies.kids[row] or is_last) or self.kind_window[rows.kind[row]] > 0

    def policy_may_name(self, row: int, tier: int) -> bool:
        """Return whether a policy may name the copy in `tier` as its victim: the copy may be evicted, and the block's
        priority is 0. Blocks with another priority have an order of their own (`policies/ranked.py`)."""
        if (priority := self.rows.optional.used.get("priority")) is not None and priority[row]:
            return False
        return self.is_evictable(row, tier)

    def run_above(self, row: int, tier: int, limit: int) -> list[int]:
        """Return `row`, which may be evicted from `tier` now, and the rows above it that may be evicted after the row
        below has gone. `limit` is the most rows to return.
        """
        copies, pins, rows = self.copies[tier], self.pins, self.rows
        parents, links, mask = rows.parent, rows.links, rows.mask
        state, kids, only = copies.state, copies.kids, ONLY[tier] if tier == len(self.copies) - 1 else NO_TIERS
        priority = rows.optional.used.get("priority")
        found = [row]
        while len(found) < limit:
            row = parents[row]
            if row < 0 or kids[row] != 1 or state[row] != _RESIDENT or row in pins:
                break
            if links[row] != 1 and mask[row] == only:
                break
            if priority is not None and priority[row]:
                break
            found.append(row)
        return found

    def may_forget(self, row: int) -> bool:
        """Return whether the block may be removed from all tiers by choice: it is unpinned, has no child that needs it,
        and no copy is being filled."""
        return not ((self.rows.links[row] and self.dependents(row)) or self.rows.filling[row] or row in self.pins)

    def stands_alone(self, row: int) -> bool:
        """Return whether the blocks behind this one are of use without it: its layer group keeps a window or a state,
        so each block serves boundaries of its own."""
        return self.kind_window[self.rows.kind[row]] > 0

    def dependents(self, row: int, tier: int | None = None) -> int:
        """Return the number of child rows that are of no use without the block; with `tier`, of child rows with a copy
        in `tier`."""
        children = self.children(row, tier)
        return 0 if children and self.stands_alone(row) else children

    def being_filled(self, row: int) -> bool:
        """Return whether a tier has a FILLING copy of the block: a put, promotion or demotion is under way."""
        return self.rows.filling[row] != 0

    def children(self, row: int, tier: int | None = None) -> int:
        """Return the number of child rows; with `tier`, only the child rows that have a copy in `tier`."""
        return self.rows.links[row] if tier is None else self.copies[tier].kids[row]

    # What it is

    def token(self, row: int) -> int:
        """Return a name that is valid as long as the block is stored. Keep the token, not the row, across an await."""
        return self.rows.token(row)

    def current(self, token: int) -> int:
        """Return the row of the block named `token`, or -1 when the block is gone."""
        return self.rows.current(token)

    def is_current(self, token: int) -> bool:
        return self.rows.current(token) >= 0

    # What a row is

    def key(self, row: int) -> bytes:
        key = self.rows.key(row)
        if key is None:
            raise RuntimeError(f"row {row} is free")
        return key

    def parent(self, row: int) -> int:
        """Return the row of the parent (perhaps a placeholder), or -1 for the first block of a chain."""
        return self.rows.parent[row]

    def parent_key(self, row: int) -> bytes:
        parent = self.rows.parent[row]
        return NO_PARENT if parent < 0 else self.key(parent)

    def tenant_of(self, row: int) -> int:
        return self.kind_tenant[self.rows.kind[row]]

    def tenants_of(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the tenant of each row; the vectorised form of `tenant_of`."""
        return np.array(self.kind_tenant, np.int64)[np.frombuffer(self.rows.kind, np.uint32)[rows]]

    def kind(self, row: int) -> RowKind:
        """Return the tenant, fingerprint and group of a row's block."""
        return self.kinds[self.rows.kind[row]]

    def depth(self, row: int) -> int:
        return self.rows.depth[row]

    def payload_bytes(self, row: int) -> int:
        return self.rows.payload_bytes[row]

    def slot_bytes(self, row: int) -> int:
        """Return the bytes of a slot that holds the payload of the block as it is, in any tier."""
        return slot_bytes(self.rows.payload_bytes[row])

    def last_access_ns(self, row: int) -> int:
        return self.rows.last_access_ns[row]

    def accesses(self, row: int) -> int:
        """Return the number of accesses in this life and, if the ghost remembers them, in earlier lives. The number
        saturates at 65,535."""
        return self.rows.accesses[row]

    def expires_s(self, row: int) -> int:
        """Return when the block expires, in whole seconds of the monotonic clock; 0 means never."""
        return self.rows.optional.get("expires_s", row)

    def priority(self, row: int) -> int:
        """Return the priority of the block: in a full tier a block with a lower priority leaves first."""
        return self.rows.optional.get("priority", row)

    def pinned_by(self, row: int) -> int:
        """Return a set of bits: bit n is set when the owner of pins with number n of the block's tenant has pinned the
        block."""
        return self.rows.optional.get("pinned_by", row)

    def terms_of(self, row: int) -> tuple[int, int, int]:
        """Return `expires_s`, `priority` and `pinned_by` of the block."""
        return self.expires_s(row), self.priority(row), self.pinned_by(row)

    def reset_facts(self, row: int) -> None:
        """Reset the optional columns of a block that is gone; its row may remain as a placeholder."""
        if self.pinned_by(row):
            self.pinned_bytes[self.tenant_of(row)] -= self.slot_bytes(row)
        if self.terms_gone is not None and self.rows.optional.get("later_terms", row):
            self.terms_gone(row)
        self.rows.optional.reset((row,))

    def codec(self, row: int, tier: int) -> int:
        """Return the number of the codec that made the stored bytes of the copy in `tier`; 0 means that they are the
        payload."""
        return self.copies[tier].optional.get("codec", row)

    def stored_bytes(self, row: int, tier: int) -> int:
        """Return the number of stored bytes of the copy in `tier`, which is smaller than the payload if a codec made
        them."""
        return self.copies[tier].optional.get("stored_bytes", row) or self.rows.payload_bytes[row]

    def tenant_bytes(self, tenant: int, tier: int) -> int:
        """Return the slot bytes of a tenant in a tier, FILLING copies included."""
        return self.copies[tier].bytes_by_tenant[tenant]

    def reserved_bytes(self, tenant: int, tier: int) -> int:
        """Return the slot bytes that a tenant has reserved in a tier for blocks to come."""
        return self.copies[tier].reserved_by_tenant.get(tenant, 0)

    def tenant_blocks(self, tenant: int) -> int:
        """Return the number of readable blocks of a tenant."""
        return self.tenants[tenant].blocks

    def tier_blocks(self, tier: int) -> int:
        """Return the number of copies in a tier, in any state."""
        return self.copies[tier].blocks

    def __len__(self) -> int:
        """Return the number of readable blocks."""
        return sum(tenant.blocks for tenant in self.tenants)
