"""Hints: prefetch what will be needed, touch what was used elsewhere, tell policies what an engine expects. A hint is
never waited for; only one that makes no sense is an error.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvstore_proto.errors import ErrorKind, KVStoreError
from kvstore_proto.v1 import kvstore_pb2 as pb
from kvstored.clients.sessions import Session
from kvstored.clock import NS_PER_MS, Clock
from kvstored.store.blocks import Residency
from kvstored.store.leases import LeaseTable
from kvstored.store.policies import ChainHint, Policy, known_step, tell
from kvstored.store.tiering import MAPPED
from kvstored.store.transfer.promote import Promoter
from kvstored.verbs.validate import keys_of, known_group

DUE_MAX_MS = 24 * 3600 * 1000


class Hints:
    """See the module. `policies` are told, one a tier."""

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
        policies: Sequence[Policy] = (),
    ) -> None:
        self._policies = policies
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
        rows = residency.find_run(session.tenant_id, request.set.keys)
        if rows and request.in_ms:
            now_ns = self._clock.monotonic_ns()
            told = ChainHint(due_ns=now_ns + min(request.in_ms, DUE_MAX_MS) * NS_PER_MS)
            tell(self._policies, residency, session.tenant_id, residency.key(rows[-1]), rows, told, now_ns)
        for row in rows:
            if residency.has(row, MAPPED):
                reply.resident_blocks += 1
                continue
            budget_bytes -= residency.payload_bytes(row)
            if budget_bytes < 0 or not self._promoter.prefetch(row):
                break
            reply.scheduled_blocks += 1
        return reply

    def hint(self, session: Session, request: pb.Hint) -> pb.HintReply:
        """Tell the policies. Raises KVStoreError for a hint that cannot be meant so."""
        keys = keys_of(request.set.keys, self._max_keys)
        known_group(session, request.set.group)
        if not keys:
            raise KVStoreError(ErrorKind.INVALID, "a hint names a chain by its last key, got none")
        if request.HasField("will_continue") and not 0.0 <= request.will_continue <= 1.0:  # nor NaN
            raise KVStoreError(ErrorKind.INVALID, f"will_continue must be from 0 to 1, got {request.will_continue:g}")
        if request.due_in_ms > DUE_MAX_MS:
            raise KVStoreError(ErrorKind.INVALID, f"due_in_ms must be at most {DUE_MAX_MS}, got {request.due_in_ms}")
        now_ns = self._clock.monotonic_ns()
        known = self._residency.find_run(session.tenant_id, request.set.keys)
        told = ChainHint(
            request.will_continue if request.HasField("will_continue") else None,
            now_ns + request.due_in_ms * NS_PER_MS if request.HasField("due_in_ms") else None,
            known_step(request.next_step), request.answer_tokens,
        )  # fmt: skip
        tell(self._policies, self._residency, session.tenant_id, keys[-1], known, told, now_ns)
        return pb.HintReply(known_blocks=len(known))

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
