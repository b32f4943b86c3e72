"""The view gives read access to the columns of the block index, and answers all questions about them. Policies and
listings get this view. It changes no row or copy, except that `reset_facts` resets optional columns; the parts that
`index` puts together make the changes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence, Set
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvstore_proto.arena import slot_bytes
from kvstore_proto.identity import KEY_BYTES, NO_PARENT
from kvstore_tiers.base import Slot
from kvstore_tiers.codecs import ShapeOf
from kvstored.lifecycle import Cause, CopyState
from kvstored.store.blocks.exactness import Exactness
from kvstored.store.blocks.ghost import Absence
from kvstored.store.blocks.keys import TenantIndex, unpack_keys
from kvstored.store.blocks.rows import RowColumns, TierCopies, as_array
from kvstored.store.blocks.runs import NEIGHBOURS_MIN, RowRun, SlotRun, count_each
from kvstored.tier_set import MAX_TIERS, MEMBERS, NO_TIERS, ONLY, TIER_SETS, TierSet

_RESIDENT = int(CopyState.RESIDENT)  # a plain int: half the time of a comparison with a member


class RowKind(NamedTuple):
    """The tenant, fingerprint and layer group that all blocks of one row kind have in common, by number."""

    tenant: int
    fingerprint_id: int
    group: int


class ResidencyView:
    """The read-only view of the block index. It answers questions about rows of live blocks; for a free row the answers
    mean nothing. A tier is named by its position. `durable`: the position of the tier that outlives the daemon, -1 if
    there is none; the last tier by default. `in_memory`: how many tiers, from the first on, are in memory; by default
    all tiers before the durable one. `mapped`: the position of the tier that clients map, where puts are stored and
    leases are given; a tier before it has copies of blocks that are used often. `exported`: the tiers before it that a
    client on their device may read in place. `closed`: the tiers that no new lease may name now. `changes` differs
    whenever a row or a copy was added, removed or changed its state; uses and pins do not count. `deletions`: how many
    times blocks were deleted by order. `window_of(fingerprint_id, group)`: how many blocks before a boundary a resume
    there needs; 0: all, or not known. `shape_of(fingerprint digest, group, payload bytes)`: the shape of a payload,
    None if it is not known; any thread may call it."""

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
        self.counted_pins: dict[int, int] = {}
        self.late_pins: set[RowRun] = set()  # of leases: not in `counted_pins` until somebody asks
        self.pinned_bytes: defaultdict[int, int] = defaultdict(int)  # by tenant, slots of blocks that owners pinned
        self.kind_tenant: list[int] = []  # by kind number
        self.terms_gone: Callable[[int], None] | None = None  # called for a block that goes and had later terms
        self.owners_changed: Callable[[int, int, int], None] = lambda row, before, after: None  # of pins, as bits
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
        """Return the tiers that a client can read in place: the mapped tier, and each of `device_tiers` (the tiers on
        its device) that is not closed for new leases."""
        return device_tiers.difference(self.closed).with_tier(self.mapped)

    # Looking up

    def find(self, tenant: int, key: bytes) -> int:
        """Return the row of the block `key` of `tenant` if it is readable in some tier, otherwise -1."""
        return self.tenants[tenant].find(key)

    def find_any(self, tenant: int, key: bytes) -> int:
        """Return the row of the block `key` of `tenant`: readable, being filled or a placeholder; -1 if there is no
        row."""
        return self.tenants[tenant].row(key)

    def find_run(self, tenant: int, packed_keys: bytes) -> list[int]:
        """Return the rows of the leading blocks of `packed_keys`, 16 bytes each, up to the first gap."""
        neighbours = self._neighbours(tenant, packed_keys)
        return self.find_keys(tenant, unpack_keys(packed_keys)) if neighbours is None else neighbours

    def find_keys(self, tenant: int, keys: Iterable[bytes]) -> list[int]:
        """Return the rows of the leading blocks of `keys` that are readable, up to the first that is not."""
        index, keys = self.tenants[tenant], tuple(keys)
        found: list[int] = list(iter(map(index.readable.get, keys).__next__, None))
        if index.bulk is not None and len(found) < len(keys):
            found += index.bulk.find_run(keys[len(found) :], index.readable.get)
        return found

    def find_each(self, tenant: int, packed_keys: bytes) -> list[int]:
        """Return for each of `packed_keys` (16 bytes each) the row of its readable block, or -1."""
        if (neighbours := self._neighbours(tenant, packed_keys)) is not None:
            return neighbours
        index, keys = self.tenants[tenant], unpack_keys(packed_keys)
        if index.bulk is not None:
            return [index.find(key) for key in keys]
        readable = index.readable
        return [readable.get(key, -1) for key in keys]

    def _neighbours(self, tenant: int, packed_keys: bytes) -> list[int] | None:
        is_long, index = len(packed_keys) >= NEIGHBOURS_MIN * KEY_BYTES, self.tenants[tenant]
        first = index.readable.get(packed_keys[:KEY_BYTES], -1) if is_long else -1
        return self.rows.neighbours(first, packed_keys) if first >= 0 else None

    def find_column(self, tenant: int, keys: npt.NDArray[np.void]) -> npt.NDArray[np.int64]:
        """Return an array with the row of the readable block, or -1, for each of `keys` (dtype V16)."""
        index = self.tenants[tenant]
        get, found = index.readable.get, np.full(len(keys), -1, np.int64)
        if index.bulk is not None:
            found[:] = index.bulk.find_each(np.ascontiguousarray(keys).view("<u8").reshape(-1, 2))
        left = np.flatnonzero(found < 0)
        found[left] = [get(key, -1) for key in keys[left].tolist()]
        return found

    def why_missing(self, tenant: int, key: bytes, fingerprint_id: int = -1, family: Set[int] = frozenset()) -> Absence:
        """Return why the block `key` of `tenant` is not readable. The reason is OTHER_FINGERPRINT if the tenant never
        stored blocks under `fingerprint_id`, but did under another fingerprint in `family`."""
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
        """Return the slot of the copy of the block at `row` in `tier`. Raises RuntimeError if it has no copy there."""
        if not self.copies[tier].state[row]:  # ABSENT
            raise RuntimeError(f"row {row} has no copy in {self.tiers[tier]}")
        return self.copies[tier].slot(row)

    def slots(self, rows: Sequence[int] | RowRun, tier: int) -> SlotRun:
        """Return the slot of each row's copy in `tier`. Raises RuntimeError if a row has no copy there."""
        copies, run = self.copies[tier], rows if isinstance(rows, RowRun) else RowRun([*rows])
        if not all(run.of(copies.state)):
            raise RuntimeError(f"not all of {run.rows} have a copy in {self.tiers[tier]}")
        return copies.slots(run)

    def is_held_by_another(self, row: int, tier: int) -> bool:
        """Return whether another tenant has a copy in `tier`, in any state, of a block with the same key."""
        if len(self.tenants) == 1:
            return False
        key, tenant, state = self.key(row), self.tenant_of(row), self.copies[tier].state
        others = (index.row(key) for number, index in enumerate(self.tenants) if number != tenant)
        return any(other >= 0 and state[other] for other in others)

    def state(self, row: int, tier: int) -> CopyState:
        return CopyState(self.copies[tier].state[row])

    def is_in(self, row: int, tier: int) -> bool:
        """Return whether the block at `row` has a copy in `tier`, readable or being filled."""
        return bool(self.copies[tier].state[row])

    def has(self, row: int, tier: int) -> bool:
        """Return whether the block at `row` has a readable copy in `tier`."""
        return tier in MEMBERS[self.rows.mask[row]]

    def tier_mask(self, row: int) -> TierSet:
        """Return the tiers in which the block at `row` has a readable copy."""
        return TIER_SETS[self.rows.mask[row]]

    def fastest(self, row: int, device_tiers: int = NO_TIERS) -> int:
        """Return the tier from which a client can have the block at `row` soonest, or -1 if it has no readable copy.
        That is the mapped tier if it has a copy, otherwise the first tier with one among `device_tiers` (those on the
        client's device), otherwise the first of all. Exact copies go before lossy ones."""
        return self.fastest_of(self.exactness.best_tiers(row), device_tiers)

    def fastest_of(self, tiers: int, device_tiers: int) -> int:
        """Return the result of `fastest` for a block with readable copies in `tiers`."""
        members = MEMBERS[tiers]
        if self.mapped in members:
            return self.mapped
        nearest = MEMBERS[tiers & device_tiers] or members
        return nearest[0] if nearest else -1

    def fastest_in_memory(self, row: int) -> int:
        """Return the fastest tier with a readable copy of the block at `row`, or -1 when that tier is not in memory."""
        position = self.fastest(row)
        return position if position < self.in_memory else -1

    # What may be evicted

    @property
    def pins(self) -> dict[int, int]:
        """The number of pins of each pinned block, by row."""
        while self.late_pins:
            count_each(self.counted_pins, self.late_pins.pop().rows)
        return self.counted_pins

    def pin_count(self, row: int) -> int:
        return self.pins.get(row, 0)

    def is_held(self, row: int) -> bool:
        """Return whether the copies of the block at `row` must stay in their slots, because it is leased or being
        copied. A pin of an owner keeps the copies in their tiers, not in their slots."""
        return self.pins.get(row, 0) > bool(self.pinned_by(row))

    def is_evictable(self, row: int, tier: int) -> bool:
        """Return whether the copy in `tier` of the block at `row` is readable and unpinned and may be evicted now. It
        may not while a child (the next block of a chain) has a copy in `tier`, nor as the block's only copy in the
        slowest tier while the block has any child. Children count only if they cannot be used without the block."""
        copies, rows = self.copies[tier], self.rows
        if copies.state[row] != _RESIDENT or row in (self.pins if self.late_pins else self.counted_pins):
            return False
        is_last = rows.links[row] and tier == len(self.copies) - 1 and rows.mask[row] == ONLY[tier]
        return not (copies.kids[row] or is_last) or self.kind_window[rows.kind[row]] > 0

    def policy_may_name(self, row: int, tier: int) -> bool:
        """Return whether a policy may evict the copy of the block at `row` in `tier`: the copy may be evicted, and the
        block's priority is 0. Blocks with another priority have an order of their own (`policies/ranked.py`)."""
        if (priority := self.rows.optional.used.get("priority")) is not None and priority[row]:
            return False
        return self.is_evictable(row, tier)

    def run_above(self, row: int, tier: int, limit: int) -> list[int]:
        """Return `row`, which may be evicted from `tier` now, and the rows before it in its chain that may be evicted
        once the blocks after them have gone. `limit` is the most rows to return."""
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
        """Return whether the block at `row` may be evicted from all tiers: it is unpinned, no child needs it, and no
        copy is being filled."""
        return not ((self.rows.links[row] and self.dependents(row)) or self.rows.filling[row] or row in self.pins)

    def stands_alone(self, row: int) -> bool:
        """Return whether later blocks of a chain are of use without the block at `row`. That is so in layer groups with
        a sliding window or a recurrent state."""
        return self.kind_window[self.rows.kind[row]] > 0

    def dependents(self, row: int, tier: int | None = None) -> int:
        """Return how many children (next blocks of chains) need the block at `row`; with `tier`, only those in
        `tier`."""
        children = self.children(row, tier)
        return 0 if children and self.stands_alone(row) else children

    def being_filled(self, row: int) -> bool:
        """Return whether a copy of the block at `row` is being filled in some tier, by a put, promotion or demotion."""
        return self.rows.filling[row] != 0

    def children(self, row: int, tier: int | None = None) -> int:
        """Return how many blocks directly follow the block at `row` in chains; with `tier`, only those with a copy in
        `tier`."""
        return self.rows.links[row] if tier is None else self.copies[tier].kids[row]

    # What it is

    def token(self, row: int) -> int:
        """Return a token that names the block at `row` while it is stored. Across an await, keep the token, not the
        row."""
        return self.rows.token(row)

    def current(self, token: int) -> int:
        """Return the row of the block that `token` names, or -1 when it is not stored any more."""
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
        """Return the row of the block before the one at `row` in its chain, which may be a placeholder for a block that
        is not stored. Return -1 for the first block."""
        return self.rows.parent[row]

    def parent_key(self, row: int) -> bytes:
        parent = self.rows.parent[row]
        return NO_PARENT if parent < 0 else self.key(parent)

    def tenant_of(self, row: int) -> int:
        return self.kind_tenant[self.rows.kind[row]]

    def tenants_of(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the tenant's number for each of `rows`, as an array."""
        found: npt.NDArray[np.int64] = np.array(self.kind_tenant, np.int64)[as_array(self.rows.kind)[rows]]
        return found

    def kind(self, row: int) -> RowKind:
        """Return the tenant, fingerprint and layer group of the block at `row`."""
        return self.kinds[self.rows.kind[row]]

    def depth(self, row: int) -> int:
        return self.rows.depth[row]

    def payload_bytes(self, row: int) -> int:
        return self.rows.payload_bytes[row]

    def slot_bytes(self, row: int) -> int:
        """Return the size in bytes of a slot for the uncompressed payload of the block at `row`, in any tier."""
        return slot_bytes(self.rows.payload_bytes[row])

    def last_access_ns(self, row: int) -> int:
        return self.rows.last_access_ns[row]

    def accesses(self, row: int) -> int:
        """Return how often the block at `row` was used, including uses before an eviction if they are remembered. The
        number stops at 65,535."""
        return self.rows.accesses[row]

    def expires_s(self, row: int) -> int:
        """Return when the block at `row` expires, in whole seconds of the monotonic clock; 0 means never."""
        return self.rows.optional.get("expires_s", row)

    def priority(self, row: int) -> int:
        """Return the priority of the block at `row`. A full tier gives up blocks with a lower priority first."""
        return self.rows.optional.get("priority", row)

    def pinned_by(self, row: int) -> int:
        """Return which owners (users of the tenant) have pinned the block at `row`; bit n stands for owner number n."""
        return self.rows.optional.get("pinned_by", row)

    def terms_of(self, row: int) -> tuple[int, int, int]:
        """Return the expiry (monotonic seconds), the priority and the pinning owners of the block at `row`."""
        return self.expires_s(row), self.priority(row), self.pinned_by(row)

    def reset_facts(self, row: int) -> None:
        """Set the optional columns of `row`, whose block is gone, to their defaults."""
        if owners := self.pinned_by(row):
            self.pinned_bytes[self.tenant_of(row)] -= self.slot_bytes(row)
            self.owners_changed(row, owners, 0)
        if self.terms_gone is not None and self.rows.optional.get("later_terms", row):
            self.terms_gone(row)
        self.rows.optional.reset((row,))

    def codec(self, row: int, tier: int) -> int:
        """Return the number of the codec of the copy in `tier` of the block at `row`; 0 means a plain payload."""
        return self.copies[tier].optional.get("codec", row)

    def stored_bytes(self, row: int, tier: int) -> int:
        """Return how many bytes the copy in `tier` of the block at `row` takes, without its header: fewer than the
        payload if it is compressed."""
        return self.copies[tier].optional.get("stored_bytes", row) or self.rows.payload_bytes[row]

    def tenant_bytes(self, tenant: int, tier: int) -> int:
        """Return the bytes of all slots that `tenant` has in `tier`, slots that are being filled included."""
        return self.copies[tier].bytes_by_tenant[tenant]

    def reserved_bytes(self, tenant: int, tier: int) -> int:
        """Return the bytes of the slots in `tier` that `tenant` has reserved for blocks it will put."""
        return self.copies[tier].reserved_by_tenant.get(tenant, 0)

    def tenant_blocks(self, tenant: int) -> int:
        """Return the number of readable blocks of a tenant."""
        return self.tenants[tenant].blocks

    def tier_blocks(self, tier: int) -> int:
        """Return the number of block copies in `tier`, readable or not."""
        return self.copies[tier].blocks

    def __len__(self) -> int:
        """Return the number of readable blocks."""
        return sum(tenant.blocks for tenant in self.tenants)
