"""Prefetch, touch and hint on the wire. Only a hint that makes no sense is an error."""

from __future__ import annotations

from kvstore_proto.errors import ErrorKind, KVStoreError
from kvstore_proto.v1 import kvstore_pb2 as pb
from kvstored.clients.codes import known_step
from kvstored.clients.sessions import Session
from kvstored.rpc.verbs.validate import keys_of, known_group
from kvstored.store.operations.hints import DUE_MAX_MS, Hints
from kvstored.store.policies import ChainHint


class HintVerb:
    """`max_keys` of a request."""

    def __init__(self, hints: Hints, *, max_keys: int) -> None:
        self._hints = hints
        self._max_keys = max_keys

    def prefetch(self, session: Session, request: pb.Prefetch) -> pb.PrefetchReply:
        """See `Hints.prefetch`."""
        self._check(session, request.set)
        queued = self._hints.prefetch(session, request.set.keys, request.budget_bytes, request.in_ms)
        return pb.PrefetchReply(
            resident_blocks=queued.resident_blocks,
            scheduled_blocks=queued.scheduled_blocks,
            stored_blocks=queued.stored_blocks,
            scheduled_bytes=queued.scheduled_bytes,
        )

    def hint(self, session: Session, request: pb.Hint) -> pb.HintReply:
        """Raises KVStoreError for a hint that cannot be meant so."""
        keys = self._check(session, request.set)
        if not keys:
            raise KVStoreError(ErrorKind.INVALID, "a hint names a chain by its last key, got none")
        if request.HasField("will_continue") and not 0.0 <= request.will_continue <= 1.0:  # nor NaN
            raise KVStoreError(ErrorKind.INVALID, f"will_continue must be from 0 to 1, got {request.will_continue:g}")
        if request.due_in_ms > DUE_MAX_MS:
            raise KVStoreError(ErrorKind.INVALID, f"due_in_ms must be at most {DUE_MAX_MS}, got {request.due_in_ms}")
        hint = ChainHint(
            request.will_continue if request.HasField("will_continue") else None, None,
            known_step(request.next_step), request.answer_tokens,
        )  # fmt: skip
        due_in_ms = request.due_in_ms if request.HasField("due_in_ms") else None
        return pb.HintReply(known_blocks=self._hints.hint(session, keys, hint, due_in_ms))

    def touch(self, session: Session, request: pb.Touch) -> pb.TouchReply:
        """Count an access of the leading run, and renew leases."""
        reply = pb.TouchReply(expires_in_ms=self._hints.lease_ttl_ms)
        if request.HasField("set"):
            self._check(session, request.set)
            reply.touched = self._hints.touch(session, request.set.keys)
        reply.renewed = self._hints.renew(session, request.lease_ids)
        return reply

    def _check(self, session: Session, key_set: pb.KeySet) -> list[bytes]:
        keys = keys_of(key_set.keys, self._max_keys)
        known_group(session, key_set.group)
        return keys
