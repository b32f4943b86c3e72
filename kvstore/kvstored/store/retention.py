"""Retention decides how long blocks are kept, by the terms that their owners asked for. No other module enforces terms.

A put, a tenant's default and a touch give blocks a time to live, a priority and pins (`Terms`); the optional columns of
the index hold them. docs/policies.md has the table of the consequences, and a test runs that table against the store.

Invariants: no later request finds a block whose time is over, even before the block is removed. No block expires before
a stored block that continues it and needs it. An expired block is removed with all its copies, pinned or not, as soon
as no copy of it is being made and all saved terms are read. A reader that has a lease keeps the bytes. A pinned block
is not evicted. While no block has an expiry, no block is looked at and no clock is read.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import cast

import numpy as np

from kvstore_proto.errors import ErrorKind, KVStoreError
from kvstore_proto.terms import NO_TERMS, Terms, kept_word
from kvstore_tiers.base import Slot
from kvstore_tiers.host import HostTier
from kvstored.clock import NS_PER_S
from kvstored.lifecycle import Cause
from kvstored.store.blocks.rows import as_array
from kvstored.store.idle import IdleCopies
from kvstored.store.later_terms import ALL, PINS, Entry, LaterTerms
from kvstored.store.movement import Ground
from kvstored.store.pins import Pins
from kvstored.store.policies.ranked import Priorities
from kvstored.store.shortening import NEVER, PART_ROWS, Shortening
from kvstored.tier_set import ONLY

log = logging.getLogger(__name__)
MOST_A_TICK = 64
_OF_TERMS = frozenset({"expires_s", "priority", "pinned_by", "later_terms"})  # columns of the index


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
        self._residency, self._clock, self._counters = ground.residency, ground.clock, ground.counters
        host = cast(HostTier, ground.tiers[ground.residency.mapped])
        self.pins = Pins(ground.residency, ground.clock, ground.config.limits, host)
        self._columns = ground.residency.rows.optional.used
        self.priorities, self.idle = priorities, idle
        self._discard, self._is_coming = discard, is_coming
        self.defaults: dict[int, Terms] = {}
        self.later = LaterTerms(ground.residency, ground.clock, self.pins)
        self.shortening = Shortening(ground.residency, self._shortened)
        self._unpinning: dict[tuple[int, str], Iterator[int]] = {}  # by tenant and owner: pins that end
        self._hand = 0  # the row that the next look begins with
        # By tenant and packed keys: the rows of the leading run that may be served; a row, or -1, for every key.
        self.find_run, self.find_each = self._residency.find_run, self._residency.find_each
        if "expires_s" in self._columns:
            self._hide_expired()

    # What may be served

    @property
    def has_expiries(self) -> bool:
        """True once a block has had a time to live."""
        return "expires_s" in self._columns

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
        return row < 0 or not self.is_expired(row) or self.end(row)

    # Terms

    def check(self, tenant: int, terms: Terms, nbytes: int, rows: Sequence[int] = ()) -> None:
        """Check that `tenant` may give these `terms` to the stored blocks `rows`, and to new blocks whose slots have
        `nbytes`. Raises KVStoreError for terms out of bounds, or for more pinned bytes than are allowed.
        """
        if mistake := terms.mistake():
            raise KVStoreError(ErrorKind.INVALID, mistake)
        if terms.pin:
            self.pins.check(tenant, terms.pin, nbytes, rows)

    def of_new(self, tenant: int, terms: Terms) -> Terms:
        """Return `terms` with the defaults of `tenant` in place of a time to live or priority that is not given."""
        default = self.defaults.get(tenant)
        if default is None:
            return terms
        ttl_s = default.ttl_s if terms.ttl_s is None else terms.ttl_s
        return terms._replace(ttl_s=ttl_s, priority=default.priority if terms.priority is None else terms.priority)

    def stored(self, rows: Sequence[int], terms: Terms) -> None:
        """Set the terms of the new blocks `rows`. `terms` contain the tenant's defaults already. Headers have all terms
        but pins, and but the longer life that a block gets from its descendants; these are noted to be saved.
        """
        if terms != NO_TERMS:
            self._set(rows, terms)
        if terms.ttl_s is None and "expires_s" in self._columns:
            self._renew_above(rows)
        residency, later, expires_s = self._residency, self.later, self.expiry(terms.ttl_s or 0)
        mask, only = residency.rows.mask, ONLY[residency.mapped]
        may_differ = expires_s or "expires_s" in self._columns
        have_terms = terms != NO_TERMS or later.is_pending or not _OF_TERMS.isdisjoint(self._columns)
        for row in rows if later.is_followed and have_terms else ():
            is_in_another = mask[row] != only and residency.terms_of(row) != (0, 0, 0)
            if is_in_another or (may_differ and residency.expires_s(row) != expires_s):  # the header has other terms
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
        residency, expires_s = self._residency, self.expiry(terms.ttl_s or 0)
        longer, as_long, ranks = list[int](), list[int](), terms.priority is not None
        for row in rows:
            before_s = residency.expires_s(row)
            is_later = terms.ttl_s is not None and before_s and (not expires_s or expires_s > before_s)
            (longer if is_later else as_long).append(row)
            if ranks and (terms.priority or 0) > residency.priority(row):
                self.change((row,), Terms(priority=terms.priority))
        self.change(longer, terms._replace(priority=None))
        self.change(as_long, terms._replace(priority=None, ttl_s=None))

    def change(self, rows: Sequence[int], terms: Terms) -> None:
        """Set the terms of the blocks `rows`, parents before children, to `terms`: the expiry may become sooner or
        later, the priority lower or higher. No block expires before its descendants.
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
            self._set_expiry(rows, self.expiry(terms.ttl_s))
            if "expires_s" in self._columns:
                self._hide_expired()
        if terms.priority is not None:
            for row in rows:
                self.priorities.set(row, terms.priority, now_ns)
        if (terms.pin or terms.unpin) and rows:
            self.pins.set(rows, terms.pin, terms.unpin, terms.pin_ttl_s)
            if self.later.is_followed and terms.pin_ttl_s is not None:
                self.later.note_ends(self._residency.tenant_of(rows[0]))

    # Chains

    def _set_expiry(self, rows: Sequence[int], expires_s: int) -> None:
        """Let the blocks `rows` expire at `expires_s`, or with the last block that continues them; and let the blocks
        before them live as long."""
        residency, optional, shortening = self._residency, self._residency.rows.optional, self.shortening
        above = [residency.parent(row) for row in rows]
        inner = set(above)
        needs = dict.fromkeys(rows, 0)  # until when the blocks that continue it need it
        parts = set[int]()  # blocks that are continued by others too, or needed by a block that is
        shortening.forget(rows)
        for row, parent in zip(reversed(rows), reversed(above), strict=True):
            until_s, before_s = max(expires_s or NEVER, needs[row]), residency.expires_s(row) or NEVER
            if residency.dependents(row) > (row in inner):
                parts.add(row)
            if row in parts and (expires_s or NEVER) < before_s:
                until_s = max(until_s, before_s)
                shortening.put_down(row, expires_s)
                parts.add(parent)
                if parent not in needs:
                    self._raise_for_now(parent, until_s)
            optional.set("expires_s", row, until_s % NEVER)
            if parent in needs and not residency.stands_alone(parent):
                needs[parent] = max(needs[parent], until_s)
        self._renew_above(rows)
        if shortening.is_pending and residency.rows.capacity <= shortening.part_rows:
            self._shorten()

    def _raise_for_now(self, row: int, until_s: int) -> None:
        """Put down the times to live of the block at `row` and those before it, which a block that is stored again
        makes live until `until_s` for as long as its own time is not known."""
        residency = self._residency
        while row >= 0 and residency.tier_mask(row) and not residency.stands_alone(row):
            if (residency.expires_s(row) or NEVER) >= until_s or self.is_expired(row):
                return
            self.shortening.put_down(row, self.shortening.wanted(row) or residency.expires_s(row))
            row = residency.parent(row)

    def _shorten(self) -> None:
        self.shortening.step(self._clock.monotonic_ns() // NS_PER_S)

    def _shortened(self, row: int) -> None:
        if self.later.is_followed:
            self.later.note(row, ALL)

    def _renew_above(self, rows: Sequence[int]) -> None:
        """Let the blocks before each of `rows` live as long as it."""
        among = set(rows)
        for row in rows:
            if (parent := self._residency.parent(row)) not in among:
                self._renew(parent, self._residency.expires_s(row) or NEVER)

    def _renew(self, row: int, until_s: int, *, at_start: bool = False) -> None:
        """Let the block at `row` and those before it live until `until_s` at least. What has expired stays expired, but
        `at_start`, and ends the walk, as does a block that is not stored."""
        residency = self._residency
        self.shortening.needed(row, until_s)
        while row >= 0 and residency.tier_mask(row) and not residency.stands_alone(row):
            if self.is_expired(row) and not at_start:
                return
            if (residency.expires_s(row) or NEVER) >= until_s:
                return
            residency.rows.optional.set("expires_s", row, until_s % NEVER)
            if self.later.is_followed and not (at_start and self.later.is_pending):
                self.later.note(row, ALL)  # else its saved terms, which may still be read, would count as replaced
            row = residency.parent(row)

    def end_all_at(self, rows: Sequence[int], expires_s: int) -> None:
        """Let the blocks `rows`, children before parents, expire at `expires_s` (`expiry`), and the blocks before them
        no sooner. Call `settle_chains` when all are done: some may be needed for longer."""
        self.shortening.forget(rows)
        for row in rows:
            self._residency.rows.optional.set("expires_s", row, expires_s)
            if self.later.is_followed:
                self.later.note(row, ALL)
            self._renew(self._residency.parent(row), expires_s or NEVER)
        if "expires_s" in self._columns:
            self._hide_expired()

    def settle_chains(self, *, at_start: bool = False) -> Iterator[None]:
        """Let each block live as long as its descendants, in steps of some 2 ms. At the start, when headers and saved
        terms may not agree, also what has expired."""
        for first in range(0, self._residency.rows.capacity, PART_ROWS):
            column = self._residency.rows.optional.view("expires_s")
            if column is None:
                return
            part = slice(first, first + PART_ROWS)
            parents = np.frombuffer(self._residency.rows.parent, np.int32)[part]
            mask = np.frombuffer(self._residency.rows.mask, np.uint8)[part]
            own_s = np.where(column[part] == 0, NEVER, column[part].astype(np.int64))
            above_s = column[parents].astype(np.int64)
            shorter = np.flatnonzero((parents >= 0) & (mask != 0) & (above_s != 0) & (above_s < own_s)) + first
            del column, parents, mask  # no view is kept while columns change
            for row in shorter.tolist():
                if not self.is_expired(row):
                    until_s = self._residency.expires_s(row) or NEVER
                    self._renew(self._residency.parent(row), until_s, at_start=at_start)
            yield

    def kept(self, terms: Terms) -> int:
        """Return the header word that encodes expiry and priority of `terms` for blocks stored now
        (`kvstore_proto.terms.kept_word`).
        """
        if terms == NO_TERMS:
            return 0
        expires_s = self._clock.wall_ns() // NS_PER_S + terms.ttl_s if terms.ttl_s else 0
        return kept_word(expires_s, terms.priority or 0)

    def unpin_all(self, tenant: int, owner: str = "") -> Iterable[int]:
        """End the pins of `owner` on blocks of `tenant`, or of all its owners (""), in steps of a millisecond. Yield
        how many blocks lost one in each step.
        """
        for rows in self.pins.steps_to_unpin(tenant, owner):
            for row in rows if self.later.is_followed else ():
                self.later.note(row, PINS)
            yield len(rows)

    def restore(self, entries: Sequence[Entry]) -> None:
        """Give blocks the terms in the saved `entries`, in place of the terms in their headers."""
        now_ns = self._clock.monotonic_ns()
        for tenant, ends in self.later.found_ends(entries):
            self.pins.ends |= {(tenant, owner): ends_s for owner, ends_s in ends.items()}
        for row, terms in self.later.found(entries):
            tenant, bits = self._residency.tenant_of(row), 0
            for owner in terms.owners:
                try:
                    bits |= self.pins.bit_of(tenant, owner)
                except KVStoreError as error:
                    log.warning("a pin of %s is lost: %s", owner, error)
            if terms.scope == ALL:
                self._residency.rows.optional.set("expires_s", row, terms.expires_s)
                self.priorities.set(row, terms.priority, now_ns)
            self._residency.set_owners(row, bits)
        if "expires_s" in self._columns:
            self._hide_expired()

    def expiry(self, ttl_s: int) -> int:
        """Return the second of the monotonic clock at which a block expires that lives for `ttl_s` seconds from now on,
        rounded down; 0 for a `ttl_s` of 0."""
        return self._clock.monotonic_ns() // NS_PER_S + ttl_s if ttl_s else 0

    # Time

    def tick(self) -> bool:
        """Remove a bounded number of expired blocks. Return True when more can be removed at once."""
        now_ns = self._clock.monotonic_ns()
        self.idle.tick(now_ns)
        if self.shortening.is_pending:
            self._shorten()
        for tenant, owner in self.pins.due():
            steps = self._unpinning.setdefault((tenant, owner), iter(self.unpin_all(tenant, owner)))
            if next(steps, None) is not None:
                return True
            del self._unpinning[tenant, owner]
            if self.pins.holds_any(tenant, owner):  # pinned meanwhile
                return True
            del self.pins.ends[tenant, owner]
            self.later.note_ends(tenant)
        if self.later.is_pending:  # saved terms may let a block live that has expired by its header
            return False
        column = self._residency.rows.optional.view("expires_s")
        if column is None:
            return False
        first = self._hand if self._hand < len(column) else 0
        part = column[first : first + PART_ROWS]
        due = np.flatnonzero((part != 0) & (part <= now_ns // NS_PER_S)) + first
        depth = as_array(self._residency.rows.depth)[due]
        tokens = [self._residency.token(row) for row in due[np.argsort(depth, kind="stable")[::-1]].tolist()]
        del column, part
        ended = 0
        for token in tokens:
            row = self._residency.current(token)
            ended += row >= 0 and self.end(row)
            if ended == MOST_A_TICK:
                return True
        self._hand = first + PART_ROWS
        return self.shortening.is_pending

    def end(self, row: int, cause: Cause = Cause.EXPIRED) -> bool:
        """Remove a block from every tier, whoever leased or pinned it: its time is over, or no client may ask for it
        any more. Return False while a copy of it is being made."""
        residency = self._residency
        if residency.being_filled(row) or self._is_coming(residency.token(row)):
            return False
        tenant, orphans = residency.tenant_of(row), residency.dependents(row)
        for taken in residency.remove(row, cause, self._clock.monotonic_ns()):
            self._discard[taken.tier](taken.slot, tenant)
        if cause is Cause.EXPIRED:
            self._counters.add("expired_blocks")
        if orphans:
            self._counters.add("orphaned_blocks", orphans)
        return True
