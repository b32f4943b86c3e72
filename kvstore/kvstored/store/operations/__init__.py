"""What a client can ask the store for: put, get, lookup, hints and delete, on plain records.

No wire message, no socket and no session: the daemon's streams and unary calls, the simulator and tests drive these.
"""

from __future__ import annotations

from kvstored.store.assembly import Store
from kvstored.store.operations.client import Client
from kvstored.store.operations.delete import Delete
from kvstored.store.operations.discovery import Discovery, Known
from kvstored.store.operations.get import Get, GetLimits
from kvstored.store.operations.hints import Hints
from kvstored.store.operations.loader import Loader
from kvstored.store.operations.lookup import LookUp
from kvstored.store.operations.put import Put
from kvstored.store.remote import RemoteValue
from kvstored.telemetry import DeletionLog

__all__ = ["Client", "Operations"]


class Operations:
    """All of them over one store."""

    def __init__(self, store: Store, deletions: DeletionLog) -> None:
        residency, promoter, clock, counters = store.residency, store.promoter, store.clock, store.counters
        limits, movement = store.config.limits, store.config.movement
        self.put = Put(store)
        self.discovery = Discovery(
            residency,
            store.keyed,
            store.rooms,
            promoter,
            Known(store.absences, RemoteValue(compute=store.compute)),
            store.completions,
            clock,
            counters,
        )
        loader = Loader(residency, promoter, store.dram_check, self.discovery, clock, store.straight)
        self.get = Get(
            residency, store.leases, loader, clock, counters, store.flows, store.feed,
            GetLimits(limits.lease_ttl_ms, movement.acquire_wait_ms),
        )  # fmt: skip
        self.look_up = LookUp(residency, promoter, counters, store.flows)
        self.hints = Hints(
            residency, store.leases, promoter, clock, store.feed, lease_ttl_ms=limits.lease_ttl_ms,
            prefetch_budget_bytes=movement.prefetch_budget_bytes,
        )  # fmt: skip
        self.delete = Delete(
            residency, store.writeback, [*store.keyed.values()], store.copiers, store.discard, store.completions, clock,
            deletions,
        )  # fmt: skip
