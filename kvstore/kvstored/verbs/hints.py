"""Hints: prefetch what will be needed, touch what was used elsewhere. A hint is never waited for and never an error."""

from __future__ import annotations

from kvstore_proto.v1 import kvstore_pb2 as pb
from kvstored.clock import NS_PER_MS, Clock
from kvstored.dataplane.leases import LeaseTable
from kvstored.dataplane.sessions import Session
from kvstored.movement.promote import Promoter
from kvstored.residency import Residency
from kvstored.tiering import HOST
from kvstored.verbs.validate import keys_of, known_group


class Hints:
    """See the module."""

    def __init__(
        self,
        residency: Residency,
        leases: LeaseTable,
        promoter: Promoter,
        clock: Clock,
        *,
        max_keys: int,
        lease_ttl_ms: int,
        prefetch_budget_bytes: int,
    ) -> None:
        self._residency = residency
        self._leases = leases
        self._promoter = promoter
        self._clock = clock
        self._max_keys = max_keys
        self._lease_ttl_ms = lease_ttl_ms
        self._prefetch_budget_bytes = prefetch_budget_bytes

    def prefetch(self, session: Session, request: pb.Prefetch) -> pb.PrefetchReply:
        """Start to move the leading run up, head first, within the budget and the room that prefetch may hold. A later
        demand takes over what is queued."""
        keys_of(request.set.keys, self._max_keys)
        known_group(session, request.set.group)
        residency = self._residency
        budget_bytes = min(request.budget_bytes or self._prefetch_budget_bytes, self._prefetch_budget_bytes)
        reply = pb.PrefetchReply()
        for row in residency.find_run(session.tenant_id, request.set.keys):
            if residency.has(row, HOST):
                reply.resident_blocks += 1
                continue
            budget_bytes -= residency.payload_bytes(row)
            if budget_bytes < 0 or not self._promoter.prefetch(row):
                break
            reply.scheduled_blocks += 1
        return reply

    def touch(self, session: Session, request: pb.Touch) -> pb.TouchReply:
        """Count an access of the leading run, and renew leases."""
        now_ns = self._clock.monotonic_ns()
        reply = pb.TouchReply(expires_in_ms=self._lease_ttl_ms)
        if request.HasField("set"):
            keys_of(request.set.keys, self._max_keys)
            known_group(session, request.set.group)
            rows = self._residency.find_run(session.tenant_id, request.set.keys)
            self._residency.touch_run(rows, now_ns)
            reply.touched = len(rows)
        expires_ns = now_ns + self._lease_ttl_ms * NS_PER_MS
        reply.renewed = sum(
            self._leases.renew(session.session_id, lease_id, expires_ns) for lease_id in request.lease_ids
        )
        return reply
