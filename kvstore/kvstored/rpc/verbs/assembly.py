"""The verbs over a store's operations, with the limits that the configuration sets for requests."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from kvstore_proto.v1.explain_pb2 import ExplainReply, ExplainRequest
from kvstored.clients.sessions import Session
from kvstored.rpc.verbs import Verbs
from kvstored.rpc.verbs.delete import DeleteVerb
from kvstored.rpc.verbs.get import AcquireVerb
from kvstored.rpc.verbs.hints import HintVerb
from kvstored.rpc.verbs.in_place_put import InPlacePut
from kvstored.rpc.verbs.lookup import LookupVerb
from kvstored.rpc.verbs.staged_put import StagedPut
from kvstored.store.assembly import Store
from kvstored.store.operations import Operations
from kvstored.store.tiering import MAPPED
from kvstored.telemetry import RecentMisses


def make_verbs(
    store: Store,
    operations: Operations,
    misses: RecentMisses,
    deleting: DeleteVerb,
    explain: Callable[[Session, ExplainRequest], Awaitable[ExplainReply]],
) -> Verbs:
    config, limits, residency = store.config, store.config.limits, store.residency
    put, default_mode = operations.put, config.durability.mode
    lending = StagedPut(put, limits, default_mode=default_mode)
    reserving = InPlacePut(put, store.reservations, residency, store.host, store.rooms[MAPPED], store.clock, config)
    acquiring = AcquireVerb(
        operations.get, residency, misses, max_keys=limits.max_keys, leases_per_client=limits.leases_per_client
    )
    looking_up = LookupVerb(operations.look_up, residency, misses, max_keys=limits.max_keys)
    hinting = HintVerb(operations.hints, max_keys=limits.max_keys)
    return Verbs(looking_up, lending, reserving, acquiring, hinting, deleting, explain)
