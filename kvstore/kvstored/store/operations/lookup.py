"""Lookups and hints, which are answered at once. A lookup says where blocks are and how long loading them would take; a
hint prefetches blocks that will be needed, touches blocks that were used elsewhere, or passes on an engine's
expectation to policies.

Invariants: a lookup moves nothing, but it may ask key-addressed tiers for blocks that the index does not know; a block
it calls usable was readable at that instant, and only the lease guarantees it. No client waits for the work that a hint
begins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from kvstore_proto.identity import KEY_BYTES
from kvstore_proto.terms import NO_TERMS, Terms
from kvstored.clock import NS_PER_MS
from kvstored.lifecycle import Cause
from kvstored.store.assembly import Store
from kvstored.store.operations.client import Client
from kvstored.store.operations.discovery import Discovery, Question
from kvstored.store.policies import ChainHint, deliver_hint

DUE_MAX_MS = 24 * 3600 * 1000


def leading(present: Sequence[bool]) -> int:
    """Return how many entries of `present` come before the first False: the number of leading blocks that are
    stored.
    """
    return present.index(False) if False in present else len(present)


class Presence(NamedTuple):
    """The answer to a lookup of a chain. `rows` has the row of each requested block, or -1 when the block is missing or
    cannot be reached. `load_us` has for each block the microseconds that it adds to the time for loading the chain. The
    first `usable` blocks can be restored; `cause` says why the next one cannot, None when all can.
    """

    rows: list[int]
    load_us: list[int]
    usable: int
    cause: Cause | None


class LookUp:
    """The operation that answers which blocks of a chain are stored, without a lease. Through `discovery` it asks
    remote tiers for blocks this store does not know.
    """

    def __init__(self, store: Store, discovery: Discovery) -> None:
        self._discovery = discovery
        self._residency, self._promoter, self._retention = store.residency, store.promoter, store.retention
        self._counters, self._flows, self._clock = store.counters, store.flows, store.clock

    def count(self, client: Client) -> None:
        """Count one lookup request of `client`, however many chains it names."""
        self._counters.add("lookups")
        self._flows.looked_up(client)

    @property
    def can_ask(self) -> bool:
        """True if the store has a remote (key-addressed) tier that `ask` can ask."""
        return self._discovery.is_possible

    def ask(self, client: Client, keys: bytes, group: int, parent: bytes, wait_ms: int) -> Question | None:
        """Ask remote tiers for the blocks of `keys` (packed, 16 bytes each) from the first one this store does not
        know. Return the question when a wait of at most `wait_ms` for its answer pays, otherwise None. `parent` is the
        key of the block before the first one; `group` is the layer group.
        """
        known = len(self._retention.find_run(client.tenant_id, keys))
        return self._discovery.ask(client, keys, known, group, wait_ms, parent)

    def asked(self, client: Client, keys: bytes) -> Question | None:
        """Return the question that `ask` has returned for the blocks `keys`, if it has no answer yet."""
        known = len(self._retention.find_run(client.tenant_id, keys)) * KEY_BYTES
        return self._discovery.under_way(client, keys[known : known + KEY_BYTES])

    async def wait(self, questions: Iterable[Question], wait_ms: int) -> None:
        """Wait at most `wait_ms` in all for the answers to `questions`."""
        until_ns = self._clock.monotonic_ns() + wait_ms * NS_PER_MS
        for question in questions:
            left_ms = (until_ns - self._clock.monotonic_ns()) // NS_PER_MS
            await self._discovery.wait(question, max(left_ms, 0))

    def look_up(self, client: Client, keys: bytes, usable_of: Callable[[Sequence[bool]], int] = leading) -> Presence:
        """Look up the blocks `keys` (packed, 16 bytes each) for `client`. `usable_of` gets one bool for each key, True
        when its block is present, and returns how many leading blocks can be restored."""
        residency, blocks = self._residency, len(keys) // KEY_BYTES
        found = self._retention.find_each(client.tenant_id, keys)
        rows = self._promoter.reachable(found, exact=client.exact)
        usable = blocks if -1 not in rows else usable_of([row >= 0 for row in rows])
        cause = None
        if usable < blocks:  # then the key at `usable` is missing, by any rule
            cause = Cause.READ_FAILED  # stored, but on a medium that is shed
            if found[usable] < 0 or (client.exact and not residency.exactness.served_tiers(found[usable])):
                cause = client.why_missing(residency, keys[usable * KEY_BYTES : (usable + 1) * KEY_BYTES])
            self._flows.missed(client, cause, blocks - usable)
        load_us = self._promoter.estimate_us(rows, residency.readable(client.device_tiers))
        self._counters.add("lookup_keys", blocks)
        self._counters.add("lookup_hit_keys", usable)
        return Presence(rows, load_us, usable, cause)


class PrefetchResult(NamedTuple):
    """The result of a prefetch of a chain. `stored_blocks` leading blocks are stored; `resident_blocks` of them were
    mapped already, and `scheduled_blocks`, with `scheduled_bytes` of payload, are queued for promotion.
    """

    resident_blocks: int
    scheduled_blocks: int
    stored_blocks: int
    scheduled_bytes: int


class Hints:
    """The operations by which engines announce what they will need: prefetch, hint, touch, and renewal of leases."""

    def __init__(self, store: Store) -> None:
        self._residency, self._leases = store.residency, store.leases
        self._promoter, self._clock, self._feed = store.promoter, store.clock, store.feed
        self._retention = store.retention
        self.lease_ttl_ms = store.config.limits.lease_ttl_ms
        self._prefetch_budget_bytes = store.config.movement.prefetch_budget_bytes

    def prefetch(self, client: Client, keys: bytes, budget_bytes: int = 0, in_ms: int = 0) -> PrefetchResult:
        """Queue the leading stored blocks of the packed `keys` for promotion, the first block first, within
        `budget_bytes` (0: the configured budget). A later get takes over queued blocks. `in_ms` is in how many
        milliseconds a request for the chain is expected, 0 when that is not known.
        """
        residency = self._residency
        budget_bytes = min(budget_bytes or self._prefetch_budget_bytes, self._prefetch_budget_bytes)
        rows = self._retention.find_run(client.tenant_id, keys)
        rows = self._promoter.reachable_run(rows, exact=client.exact)
        if rows and in_ms:
            now_ns = self._clock.monotonic_ns()
            due = ChainHint(due_ns=now_ns + min(in_ms, DUE_MAX_MS) * NS_PER_MS)
            deliver_hint(self._feed.policies, residency, client.tenant_id, residency.key(rows[-1]), rows, due, now_ns)
        resident = scheduled = scheduled_bytes = 0
        for row in rows:
            if residency.has(row, residency.mapped):
                resident += 1
                continue
            nbytes = residency.payload_bytes(row)
            if scheduled_bytes + nbytes > budget_bytes or not self._promoter.prefetch(row):
                break
            scheduled += 1
            scheduled_bytes += nbytes
        return PrefetchResult(resident, scheduled, len(rows), scheduled_bytes)

    def hint(self, client: Client, keys: Sequence[bytes], hint: ChainHint, due_in_ms: int | None) -> int:
        """Give the policies an engine's expectation `hint` about the chain `keys`. `due_in_ms` is in how many
        milliseconds a request for the chain is due, or None. Return how many leading blocks of the chain are stored."""
        now_ns = self._clock.monotonic_ns()
        known = self._residency.find_keys(client.tenant_id, keys)
        if due_in_ms is not None:
            hint = hint._replace(due_ns=now_ns + due_in_ms * NS_PER_MS)
        self._feed.hinted(client.tenant_id, keys, known, hint, now_ns)
        return len(known)

    def touch(self, client: Client, keys: bytes, terms: Terms = NO_TERMS) -> int:
        """Count an access of the leading stored blocks of the packed `keys`, and set their terms (expiry, priority,
        pin). Return the number of these blocks. Raises KVStoreError for terms out of bounds.
        """
        residency, rows = self._residency, self._retention.find_run(client.tenant_id, keys)
        if terms != NO_TERMS:
            self._retention.check(client.tenant_id, terms, 0, rows)
            self._retention.change(rows, terms)
        residency.touch_run(rows, self._clock.monotonic_ns(), client.device_tiers)
        return len(rows)

    def renew(self, client: Client, lease_ids: Sequence[int]) -> int:
        """Let the leases `lease_ids` of the client live for `lease_ttl_ms` from now. Return how many of them
        existed.
        """
        expires_ns = self._clock.monotonic_ns() + self.lease_ttl_ms * NS_PER_MS
        return sum(self._leases.renew(client.session_id, lease_id, expires_ns) for lease_id in lease_ids)
