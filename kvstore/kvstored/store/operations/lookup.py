"""Lookup: it says which blocks of a chain are here, where, and how long it would take to have them mapped.

Moves nothing and waits for nothing. Invariant: what it calls usable was readable at that instant; the lease is the
truth.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvstore_proto.identity import KEY_BYTES
from kvstored.lifecycle import Cause
from kvstored.store.assembly import Store
from kvstored.store.operations.client import Client


def leading(present: Sequence[bool]) -> int:
    """Return how many blocks come before the first that is missing."""
    return present.index(False) if False in present else len(present)


@dataclass(frozen=True, slots=True)
class Presence:
    """By block that was asked for: its row, -1 where it is missing or out of reach, and the microseconds that it adds
    until all are mapped. `usable` leading blocks count as there; `cause` says why not more do, None where all do."""

    rows: list[int]
    load_us: list[int]
    usable: int
    cause: Cause | None


class LookUp:
    """The lookups of all clients."""

    def __init__(self, store: Store) -> None:
        self._residency, self._promoter = store.residency, store.promoter
        self._counters, self._flows = store.counters, store.flows

    def count(self, client: Client) -> None:
        """Count one request, of any number of chains."""
        self._counters.add("lookups")
        self._flows.looked_up(client)

    def look_up(self, client: Client, keys: bytes, usable_of: Callable[[Sequence[bool]], int] = leading) -> Presence:
        """`keys` are packed; `usable_of` says how far a chain can be restored, from which of its blocks are there."""
        residency, blocks = self._residency, len(keys) // KEY_BYTES
        found = residency.find_each(client.tenant_id, keys)
        rows = self._promoter.reachable(found)
        usable = usable_of([row >= 0 for row in rows])
        cause = None
        if usable < blocks:  # then the key at `usable` is missing, by any rule
            cause = Cause.READ_FAILED  # stored, but on a medium that is shed
            if found[usable] < 0:
                cause = client.why_missing(residency, keys[usable * KEY_BYTES : (usable + 1) * KEY_BYTES])
            self._flows.missed(client, cause, blocks - usable)
        load_us = self._promoter.estimate_us(rows, residency.readable(client.device_tiers))
        self._counters.add("lookup_keys", blocks)
        self._counters.add("lookup_hit_keys", usable)
        return Presence(rows, load_us, usable, cause)
