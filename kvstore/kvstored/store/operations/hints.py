"""Hints: prefetch what will be needed, touch what was used elsewhere, pass on to policies what an engine expects.

A hint is never waited for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvstored.clock import NS_PER_MS
from kvstored.store.assembly import Store
from kvstored.store.operations.client import Client
from kvstored.store.policies import ChainHint, deliver_hint

DUE_MAX_MS = 24 * 3600 * 1000


@dataclass(frozen=True, slots=True)
class Prefetched:
    """Numbers of stored blocks of a prefetch: mapped already, or queued to be mapped; and their payload bytes."""

    resident_blocks: int
    scheduled_blocks: int
    stored_blocks: int
    scheduled_bytes: int


class Hints:
    """The hints of all clients."""

    def __init__(self, store: Store) -> None:
        self._residency, self._leases = store.residency, store.leases
        self._promoter, self._clock, self._feed = store.promoter, store.clock, store.feed
        self.lease_ttl_ms = store.config.limits.lease_ttl_ms
        self._prefetch_budget_bytes = store.config.movement.prefetch_budget_bytes

    def prefetch(self, client: Client, keys: bytes, budget_bytes: int = 0, in_ms: int = 0) -> Prefetched:
        """Start to move the leading run up, head first, within the budget and the room that prefetch may hold. A later
        demand takes over what is queued. `in_ms`: when a request for it is expected, 0: not said."""
        residency = self._residency
        budget_bytes = min(budget_bytes or self._prefetch_budget_bytes, self._prefetch_budget_bytes)
        rows = residency.find_run(client.tenant_id, keys)
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
        return Prefetched(resident, scheduled, len(rows), scheduled_bytes)

    def hint(self, client: Client, keys: Sequence[bytes], hint: ChainHint, due_in_ms: int | None) -> int:
        """Pass on what is expected of the chain `keys`, and in how long a request for it is due; how many of its blocks
        are stored, from the first on."""
        now_ns = self._clock.monotonic_ns()
        known = self._residency.find_keys(client.tenant_id, keys)
        if due_in_ms is not None:
            hint = replace(hint, due_ns=now_ns + due_in_ms * NS_PER_MS)
        self._feed.hinted(client.tenant_id, keys, known, hint, now_ns)
        return len(known)

    def touch(self, client: Client, keys: bytes) -> int:
        """Count an access of the leading run; how many blocks that is."""
        rows = self._residency.find_run(client.tenant_id, keys)
        self._residency.touch_run(rows, self._clock.monotonic_ns(), client.device_tiers)
        return len(rows)

    def renew(self, client: Client, lease_ids: Sequence[int]) -> int:
        """Let leases of the client live for `lease_ttl_ms` from now; how many there were."""
        expires_ns = self._clock.monotonic_ns() + self.lease_ttl_ms * NS_PER_MS
        return sum(self._leases.renew(client.session_id, lease_id, expires_ns) for lease_id in lease_ids)
