"""Retention decides how long blocks are kept, by the terms that their owners asked for. No other module enforces terms.

A put, a tenant's default and a touch give blocks a time to live, a priority and pins (`Terms`); the optional columns of
the index hold them. docs/policies.md has the table of the consequences, and a test runs that table against the store.

Invariants: no later request finds a block whose time is over, even before the block is removed. The block is removed
with all its copies, pinned or not, as soon as no copy of it is being made. A reader that has a lease keeps the bytes. A
pinned block is not evicted; the pinned bytes of each tenant are bounded. While no block has an expiry, no block is
looked at and no clock is read.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial, reduce
from operator import or_
from typing import cast

import numpy as np

from kvstore_proto.errors import ErrorKind, KVStoreError
from kvstore_proto.terms import NO_TERMS, Terms, kept_word
from kvstore_tiers.base import Slot
from kvstore_tiers.host import HostTier
from kvstored.clock import NS_PER_S
from kvstored.lifecycle import Cause
from kvstored.store.idle import IdleCopies
from kvstored.store.later_terms import ALL, PINS, Entry, LaterTerms
from kvstored.store.movement import Ground
from kvstored.store.policies.ranked import Priorities
from kvstored.tier_set import ONLY

log = logging.getLogger(__name__)
OWNERS_MAX = 32  # of pins of one tenant: a bit each
ALL_OWNERS = (1 << OWNERS_MAX) - 1
PART_ROWS = 1 << 16  # looked at in one tick: 30 µs
MOST_A_TICK = 64
PINNED_SHARE = 2  # at most one part in so many of the mapped tier is pinned by one tenant


class Retention:
    """The rules for how long blocks are kept: it sets and enforces their terms (time to live, priority, pins).
    `discard[tier](slot, tenant)` frees a slot of a removed block. `is_coming(token)` returns whether the block is being
    written to the durable tier. `defaults` has the terms of new blocks, by tenant number.
    """

    def __init__(
        self,
        ground: Ground,
        priorities: Priorities,
        idle: IdleCopies,
        discard: Sequence[Callable[[Slot, int], None]],
        is_coming: Callable[[int], bool],
    ) -> None:
        self._residency, self._clock = ground.residency, ground.clock
        self._counters, self._limits = ground.counters, ground.config.limits
        self._host = cast(HostTier, ground.tiers[ground.residency.mapped])
        self._columns = ground.residency.rows.optional.used
        self.priorities, self.idle = priorities, idle
        self._discard, self._is_coming = discard, is_coming
        self.defaults: dict[int, Terms] = {}
        self._coming_bytes: Counter[int] = Counter()  # by tenant, slots of blocks that a put under way will pin
        self._coming_owners: Counter[tuple[int, str]] = Counter()  # puts under way that will pin, by tenant and owner
        self._owners: dict[int, list[str]] = {}  # by tenant: whose pin each bit is
        self.later = LaterTerms(ground.residency, ground.clock, self.owners)
        self._hand = 0  # the row that the next look begins with
        # By tenant and packed keys: the rows of the leading run that may be served; a row, or -1, for every key.
        self.find_run, self.find_each = self._residency.find_run, self._residency.find_each
        if "expires_s" in self._columns:
            self._hide_expired()

    # What may be served

    def is_expired(self, row: int) -> bool:
        """Return whether the block at `row` has outlived its time to live."""
        column = self._columns.get("expires_s")
        return column is not None and 0 < column[row] <= self._clock.monotonic_ns() // NS_PER_S

    def _hide_expired(self) -> None:
        """Look at expiries from now on, because a block has one."""
        self.find_run, self.find_each = self._served_run, self._served_each

    def _served_run(self, tenant: int, packed_keys: bytes) -> list[int]:
        rows = self._residency.find_run(tenant, packed_keys)
        return rows[: next((at for at, row in enumerate(rows) if self.is_expired(row)), len(rows))]

    def _served_each(self, tenant: int, packed_keys: bytes) -> list[int]:
        rows = self._residency.find_each(tenant, packed_keys)
        return [-1 if row >= 0 and self.is_expired(row) else row for row in rows]

    def make_way(self, tenant: int, key: bytes) -> bool:
        """Remove the block `key` of `tenant` if it has expired, so that it can be stored again. Return False only when
        it has expired and cannot be removed now."""
        row = self._residency.find(tenant, key)
        return row < 0 or not self.is_expired(row) or self._end(row)

    # Terms

    def check(self, tenant: int, terms: Terms, nbytes: int) -> None:
        """Check that `tenant` may give blocks these `terms`. Raises KVStoreError for terms out of bounds, or for a pin
        when the tenant may not pin `nbytes` more.
        """
        if mistake := terms.mistake():
            raise KVStoreError(ErrorKind.INVALID, mistake)
        if terms.pin:
            self._bit_of(tenant, terms.pin)
            pinned_bytes = self._residency.pinned_bytes[tenant] + self._coming_bytes[tenant]
            # DRAM may have been resized, or be on its way to less.
            dram_bytes = min(self._host.capacity_bytes, self._host.ceiling_bytes)
            limit_bytes = min(self._limits.pinned_per_tenant_bytes, dram_bytes // PINNED_SHARE)
            if pinned_bytes + nbytes > limit_bytes:
                raise KVStoreError(
                    ErrorKind.TOO_LARGE,
                    f"the tenant has pinned {pinned_bytes} bytes, and {nbytes} more are over "
                    f"limits.pinned_per_tenant, or half of DRAM, {limit_bytes}: unpin some",
                )

    def hold(self, tenant: int, terms: Terms, nbytes: int) -> Callable[[], None]:
        """Reserve the pinned bytes and the pin owner for a put that `check` allowed, whose new slots have `nbytes` in
        all. Return a function that ends the reservation; call it once, when the blocks are stored or given up."""
        if not terms.pin:
            return lambda: None

        def count(sign: int) -> None:
            self._coming_bytes[tenant] += sign * nbytes
            self._coming_owners[tenant, terms.pin] += sign
            if not self._coming_owners[tenant, terms.pin]:
                del self._coming_owners[tenant, terms.pin]

        count(1)
        return partial(count, -1)

    def of_new(self, tenant: int, terms: Terms) -> Terms:
        """Return `terms` with the defaults of `tenant` in place of a time to live or priority that is not given."""
        default = self.defaults.get(tenant)
        if default is None:
            return terms
        ttl_s = default.ttl_s if terms.ttl_s is None else terms.ttl_s
        return terms._replace(ttl_s=ttl_s, priority=default.priority if terms.priority is None else terms.priority)

    def stored(self, rows: Sequence[int], terms: Terms) -> None:
        """Set the terms of the new blocks `rows`. `terms` contain the tenant's defaults already. Headers have all terms
        but pins, which are noted to be saved.
        """
        if terms != NO_TERMS:
            self._set(rows, terms)
        residency, later = self._residency, self.later
        mask, only = residency.rows.mask, ONLY[residency.mapped]
        for row in rows if later.is_followed else ():
            if mask[row] != only and residency.terms_of(row) != (0, 0, 0):  # another copy's header has other terms
                later.note(row, ALL)
            elif scope := residency.rows.optional.get("later_terms", row):
                later.note(row, scope)
            elif terms.pin:
                later.note(row, PINS)
            elif later.is_pending:
                later.note_entry(row)

    def stored_before(self, rows: Sequence[int], terms: Terms) -> None:
        """Apply the `terms` of a put to its blocks `rows` that were stored before, where that keeps a block longer: a
        later expiry, a higher priority, one more pin."""
        if terms == NO_TERMS:
            return
        residency, expires_s = self._residency, self._expiry(terms.ttl_s or 0)
        for row in rows:
            before_s = residency.expires_s(row)
            is_later = before_s and (not expires_s or expires_s > before_s)
            self.change(
                (row,),
                terms._replace(
                    ttl_s=terms.ttl_s if is_later else None,
                    priority=max(residency.priority(row), terms.priority or 0) if terms.priority is not None else None,
                ),
            )

    def change(self, rows: Sequence[int], terms: Terms) -> None:
        """Set the terms of the blocks `rows` to `terms`: the expiry may become sooner or later, the priority lower or
        higher.
        """
        facts = self._residency.terms_of
        before = [facts(row) for row in rows] if self.later.is_followed else []
        self._set(rows, terms)
        for row, was in zip(rows, before, strict=False):
            if (now := facts(row)) != was:
                self.later.note(row, PINS if now[:2] == was[:2] else ALL)

    def _set(self, rows: Sequence[int], terms: Terms) -> None:
        now_ns = self._clock.monotonic_ns()
        if terms.ttl_s is not None:
            expires_s = self._expiry(terms.ttl_s)
            self._hide_expired()
            for row in rows:
                self._residency.rows.optional.set("expires_s", row, expires_s)
        if terms.priority is not None:
            for row in rows:
                self.priorities.set(row, terms.priority, now_ns)
        if terms.pin or terms.unpin:
            for row in rows:
                tenant = self._residency.tenant_of(row)
                owners = self._residency.pinned_by(row)
                owners &= ~self._bit_of(tenant, terms.unpin, is_new=False)
                self._residency.set_owners(row, owners | self._bit_of(tenant, terms.pin))

    def kept(self, terms: Terms) -> int:
        """Return the header word that encodes expiry and priority of `terms` for blocks stored now
        (`kvstore_proto.terms.kept_word`).
        """
        if terms == NO_TERMS:
            return 0
        expires_s = self._clock.wall_ns() // NS_PER_S + terms.ttl_s if terms.ttl_s else 0
        return kept_word(expires_s, terms.priority or 0)

    def owners(self, row: int) -> list[str]:
        """Return the names of the owners that have pinned the block at `row`."""
        bits = self._residency.pinned_by(row)
        names = self._owners.get(self._residency.tenant_of(row), []) if bits else []
        return [name for bit, name in enumerate(names) if bits >> bit & 1]

    def unpin_all(self, tenant: int, owner: str = "") -> int:
        """Remove the pins of `owner` on blocks of `tenant`, or of all its owners (""). Return the number of blocks that
        lost one.
        """
        bits = self._bit_of(tenant, owner, is_new=False) if owner else ALL_OWNERS
        rows = [row for row in self._pinned_rows(tenant) if self._residency.pinned_by(row) & bits]
        for row in rows:
            self._residency.set_owners(row, self._residency.pinned_by(row) & ~bits)
            if self.later.is_followed:
                self.later.note(row, PINS)
        return len(rows)

    def restore(self, entries: Sequence[Entry]) -> None:
        """Give blocks the terms in the saved `entries`, in place of the terms in their headers."""
        now_ns = self._clock.monotonic_ns()
        for row, terms in self.later.found(entries):
            tenant, bits = self._residency.tenant_of(row), 0
            for owner in terms.owners:
                try:
                    bits |= self._bit_of(tenant, owner)
                except KVStoreError as error:
                    log.warning("a pin of %s is lost: %s", owner, error)
            if terms.scope == ALL:
                self._residency.rows.optional.set("expires_s", row, terms.expires_s)
                self.priorities.set(row, terms.priority, now_ns)
            self._residency.set_owners(row, bits)
        if "expires_s" in self._columns:
            self._hide_expired()

    def _pinned_rows(self, tenant: int) -> list[int]:
        """Return the rows of the tenant's blocks that have an owner's pin."""
        column = self._residency.rows.optional.view("pinned_by")
        rows = np.empty(0, np.int64) if column is None else np.flatnonzero(column)
        found: list[int] = rows[self._residency.tenants_of(rows) == tenant].tolist()
        return found

    def _expiry(self, ttl_s: int) -> int:
        """Return the second of the monotonic clock at which a block expires that lives for `ttl_s` seconds from now on,
        rounded down; 0 for a `ttl_s` of 0."""
        return self._clock.monotonic_ns() // NS_PER_S + ttl_s if ttl_s else 0

    def _bit_of(self, tenant: int, owner: str, *, is_new: bool = True) -> int:
        """Return the bit of `owner` among the tenant's owners of pins; 0 when `owner` is "" or unknown and not
        `is_new`. Raises KVStoreError when the tenant has `OWNERS_MAX` owners already."""
        names = self._owners.setdefault(tenant, [])
        if owner and owner in names:  # "" is the name of a bit that was freed
            return 1 << names.index(owner)
        if not owner or not is_new:
            return 0
        if len(names) == OWNERS_MAX:
            self._forget_owner(tenant, names)
        if "" in names:
            names[names.index("")] = owner
        else:
            names.append(owner)
        return 1 << names.index(owner)

    def _forget_owner(self, tenant: int, names: list[str]) -> None:
        """Free the bits of owners that have no pin any more, and that no put under way will pin for. Raises
        KVStoreError when there is no such owner."""
        held = reduce(or_, map(self._residency.pinned_by, self._pinned_rows(tenant)), 0)
        for bit in range(OWNERS_MAX):
            if not held >> bit & 1 and not self._coming_owners[tenant, names[bit]]:
                names[bit] = ""
        if "" not in names:
            raise KVStoreError(
                ErrorKind.TOO_LARGE, f"{OWNERS_MAX} owners have pins of this tenant, no more can: let one unpin all"
            )

    # Time

    def tick(self) -> bool:
        """Remove a bounded number of expired blocks. Return True when more can be removed at once."""
        now_ns = self._clock.monotonic_ns()
        self.idle.tick(now_ns)
        column = self._residency.rows.optional.view("expires_s")
        if column is None:
            return False
        first = self._hand if self._hand < len(column) else 0
        part = column[first : first + PART_ROWS]
        due = np.flatnonzero((part != 0) & (part <= now_ns // NS_PER_S)) + first
        depth = np.frombuffer(self._residency.rows.depth, np.uint32)[due]
        tokens = [self._residency.token(row) for row in due[np.argsort(depth, kind="stable")[::-1]].tolist()]
        del column, part
        ended = 0
        for token in tokens:
            row = self._residency.current(token)
            ended += row >= 0 and self._end(row)
            if ended == MOST_A_TICK:
                return True
        self._hand = first + PART_ROWS
        return False

    def _end(self, row: int) -> bool:
        """Remove a block whose time is over from every tier. Return False while a copy of it is being made."""
        residency = self._residency
        if residency.being_filled(row) or self._is_coming(residency.token(row)):
            return False
        tenant, orphans = residency.tenant_of(row), residency.dependents(row)
        for taken in residency.remove(row, Cause.EXPIRED, self._clock.monotonic_ns()):
            self._discard[taken.tier](taken.slot, tenant)
        self._counters.add("expired_blocks")
        if orphans:
            self._counters.add("orphaned_blocks", orphans)
        return True
