"""The verbs over a store's operations, with the limits that the configuration sets for requests."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from kvstore_proto.v1.explain_pb2 import ExplainReply, ExplainRequest
from kvstored.clients.sessions import Session
from kvstored.config import Config
from kvstored.rpc.verbs import Verbs
from kvstored.rpc.verbs.delete import Deleting
from kvstored.rpc.verbs.get import Acquiring
from kvstored.rpc.verbs.hints import Hinting
from kvstored.rpc.verbs.lending import Lending
from kvstored.rpc.verbs.lookup import LookingUp
from kvstored.rpc.verbs.storing import Storing
from kvstored.store.blocks import ResidencyView
from kvstored.store.operations import Operations
from kvstored.telemetry import RecentMisses


def make_verbs(
    config: Config,
    operations: Operations,
    residency: ResidencyView,
    misses: RecentMisses,
    deleting: Deleting,
    explain: Callable[[Session, ExplainRequest], Awaitable[ExplainReply]],
) -> Verbs:
    limits = config.limits
    storing = Storing(operations.put, default_mode=config.durability.mode)
    lending = Lending(
        storing, max_keys=limits.max_keys, max_block_bytes=limits.max_block_bytes,
        inflight_limit=limits.inflight_per_client,
    )  # fmt: skip
    acquiring = Acquiring(
        operations.get, residency, misses, max_keys=limits.max_keys, leases_per_client=limits.leases_per_client
    )
    looking_up = LookingUp(operations.look_up, residency, misses, max_keys=limits.max_keys)
    hinting = Hinting(operations.hints, max_keys=limits.max_keys)
    return Verbs(looking_up, storing, lending, acquiring, hinting, deleting, explain)
