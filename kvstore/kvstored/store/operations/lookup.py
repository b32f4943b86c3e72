"""Lookups and hints, which are answered at once. A lookup says where blocks are and how long loading them would take; a
hint prefetches blocks that will be needed, touches blocks that were used elsewhere, or passes on an engine's
expectation to policies.

Invariants: a lookup moves nothing, but it may ask key-addressed tiers for blocks that the index does not know; a block
it calls usable was readable at that instant, and only the lease guarantees it. No client waits for the work that a hint
begins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

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
    """Return how many blocks come before the first that is missing."""
    return present.index(False) if False in present else len(present)


@dataclass(frozen=True, slots=True)
class Presence:
    """The answer to a lookup. By block: its row, -1 if it is missing or out of reach, and the microseconds that it adds
    until all are mapped. `usable` leading blocks count; `cause` says why no more do, None if all do.
    """

    rows: list[int]
    load_us: list[int]
    usable: int
    cause: Cause | None


class LookUp:
    """The lookups of all clients. `discovery` asks other stores."""

    def __init__(self, store: Store, discovery: Discovery) -> None:
        self._discovery = discovery
        self._residency, self._promoter, self._retention = store.residency, store.promoter, store.retention
        self._counters, self._flows, self._clock = store.counters, store.flows, store.clock

    def count(self, client: Client) -> None:
        """Count one request, of any number of chains."""
        self._counters.add("lookups")
        self._flows.looked_up(client)

    @property
    def can_ask(self) -> bool:
        """True if there is a key-addressed tier, which `ask` can ask."""
        return self._discovery.is_possible

    def ask(self, client: Client, keys: bytes, group: int, parent: bytes, wait_ms: int) -> Question | None:
        """Ask key-addressed tiers for the packed `keys` from the first one that is unknown here; return the question,
        if a wait of at most `wait_ms` for its answer pays. `parent` is the key of the block before the first.
        """
        blocks = len(keys) // KEY_BYTES
        known = len(self._retention.find_run(client.tenant_id, keys))
        if known == blocks or self._discovery.declines(client, blocks - known):
            return None
        return self._discovery.ask(client, keys, known, group, wait_ms, parent)

    async def wait(self, questions: Iterable[Question], wait_ms: int) -> None:
        """Wait at most `wait_ms` for the answers to `questions`."""
        until_ns = self._clock.monotonic_ns() + wait_ms * NS_PER_MS
        for question in questions:
            left_ms = (until_ns - self._clock.monotonic_ns()) // NS_PER_MS
            await self._discovery.wait(question, max(left_ms, 0))

    def look_up(self, client: Client, keys: bytes, usable_of: Callable[[Sequence[bool]], int] = leading) -> Presence:
        """Return the places of the packed `keys`. `usable_of` says how far a chain can be restored, from which of its
        blocks are present.
        """
        residency, blocks = self._residency, len(keys) // KEY_BYTES
        found = self._retention.find_each(client.tenant_id, keys)
        rows = self._promoter.reachable(found, exact=client.exact)
        usable = usable_of([row >= 0 for row in rows])
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


@dataclass(frozen=True, slots=True)
class PrefetchResult:
    """The result of a prefetch: the numbers of stored blocks that were mapped already, or queued to be mapped; and
    their payload bytes.
    """

    resident_blocks: int
    scheduled_blocks: int
    stored_blocks: int
    scheduled_bytes: int


class Hints:
    """The hints of all clients."""

    def __init__(self, store: Store) -> None:
        self._residency, self._leases = store.residency, store.leases
        self._promoter, self._clock, self._feed = store.promoter, store.clock, store.feed
        self._retention = store.retention
        self.lease_ttl_ms = store.config.limits.lease_ttl_ms
        self._prefetch_budget_bytes = store.config.movement.prefetch_budget_bytes

    def prefetch(self, client: Client, keys: bytes, budget_bytes: int = 0, in_ms: int = 0) -> PrefetchResult:
        """Start to move the leading run up, head first, within the budget and the room for prefetch. A later demand
        takes over queued blocks. `in_ms`: when a request for it is expected, 0: unknown.
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
        """Pass on an expectation about the chain `keys`, and in how many milliseconds a request for it is due; return
        how many of its leading blocks are stored.
        """
        now_ns = self._clock.monotonic_ns()
        known = self._residency.find_keys(client.tenant_id, keys)
        if due_in_ms is not None:
            hint = replace(hint, due_ns=now_ns + due_in_ms * NS_PER_MS)
        self._feed.hinted(client.tenant_id, keys, known, hint, now_ns)
        return len(known)

    def touch(self, client: Client, keys: bytes, terms: Terms = NO_TERMS) -> int:
        """Count an access of the leading run and set its terms; how many blocks that is. Raises KVStoreError for terms
        out of bounds."""
        residency, rows = self._residency, self._retention.find_run(client.tenant_id, keys)
        if terms != NO_TERMS:
            newly = [row for row in rows if not residency.pinned_by(row)]
            self._retention.check(client.tenant_id, terms, sum(map(residency.slot_bytes, newly)))
            self._retention.change(rows, terms)
        residency.touch_run(rows, self._clock.monotonic_ns(), client.device_tiers)
        return len(rows)

    def renew(self, client: Client, lease_ids: Sequence[int]) -> int:
        """Let leases of the client live for `lease_ttl_ms` from now; return how many there were."""
        expires_ns = self._clock.monotonic_ns() + self.lease_ttl_ms * NS_PER_MS
        return sum(self._leases.renew(client.session_id, lease_id, expires_ns) for lease_id in lease_ids)
