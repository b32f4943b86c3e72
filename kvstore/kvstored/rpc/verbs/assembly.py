"""The verbs over a store's operations, with the limits that the configuration sets for requests."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from kvstore_proto.v1.explain_pb2 import ExplainReply, ExplainRequest
from kvstored.clients.sessions import Session
from kvstored.rpc.verbs import Verbs
from kvstored.rpc.verbs.delete import Deleting
from kvstored.rpc.verbs.get import Acquiring
from kvstored.rpc.verbs.hints import Hinting
from kvstored.rpc.verbs.lending import Lending
from kvstored.rpc.verbs.lookup import LookingUp
from kvstored.rpc.verbs.reserving import Reserving
from kvstored.store.assembly import Store
from kvstored.store.operations import Operations
from kvstored.store.tiering import MAPPED
from kvstored.telemetry import RecentMisses


def make_verbs(
    store: Store,
    operations: Operations,
    misses: RecentMisses,
    deleting: Deleting,
    explain: Callable[[Session, ExplainRequest], Awaitable[ExplainReply]],
) -> Verbs:
    config, limits, residency = store.config, store.config.limits, store.residency
    put, default_mode = operations.put, config.durability.mode
    lending = Lending(put, limits, default_mode=default_mode)
    reserving = Reserving(put, store.reservations, residency, store.host, store.rooms[MAPPED], store.clock, config)
    acquiring = Acquiring(
        operations.get, residency, misses, max_keys=limits.max_keys, leases_per_client=limits.leases_per_client
    )
    looking_up = LookingUp(operations.look_up, residency, misses, max_keys=limits.max_keys)
    hinting = Hinting(operations.hints, max_keys=limits.max_keys)
    return Verbs(looking_up, lending, reserving, acquiring, hinting, deleting, explain)
