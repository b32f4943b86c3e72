"""Lookup on the wire."""

from __future__ import annotations

from functools import cache, partial

from kvstore_proto.errors import ErrorKind, KVStoreError
from kvstore_proto.identity import KEY_BYTES
from kvstore_proto.matching import restorable_blocks
from kvstore_proto.v1 import kvstore_pb2 as pb
from kvstored.clients.codes import codes_by_mask, miss_reason
from kvstored.clients.sessions import Session
from kvstored.rpc.verbs.validate import keys_of, known_group
from kvstored.store.blocks import ResidencyView
from kvstored.store.operations.lookup import LookUp
from kvstored.telemetry import RecentMisses


class LookupVerb:
    """`max_keys` of a request, over all its chains."""

    def __init__(self, look_up: LookUp, residency: ResidencyView, misses: RecentMisses, *, max_keys: int) -> None:
        self._look_up = look_up
        self._residency = residency
        self._misses = misses
        self._max_keys = max_keys
        self._codes_by_mask = cache(partial(codes_by_mask, residency))

    def look_up(self, session: Session, request: pb.Lookup) -> pb.LookupReply:
        """Raises KVStoreError for a request that is wrong as a whole."""
        count = sum(len(key_set.keys) for key_set in request.sets) // KEY_BYTES
        if count > self._max_keys:
            raise KVStoreError(
                ErrorKind.TOO_LARGE, f"{count} keys in one message, the limit is {self._max_keys}: split it"
            )
        reply = pb.LookupReply()
        for key_set in request.sets:
            self._look_up_set(session, key_set, reply.sets.add())
        self._look_up.count(session)
        return reply

    def _look_up_set(self, session: Session, key_set: pb.KeySet, presence: pb.Presence) -> None:
        keys = keys_of(key_set.keys, self._max_keys)
        known_group(session, key_set.group)
        usable_of = partial(restorable_blocks, match=key_set.match, window_blocks=key_set.window_blocks)
        found = self._look_up.look_up(session, key_set.keys, usable_of)
        mask, code = self._residency.rows.mask, self._codes_by_mask(session.device_tiers)
        presence.tiers = bytes([code[mask[row]] if row >= 0 else 0 for row in found.rows])
        presence.load_us.extend(found.load_us)
        presence.usable_blocks = found.usable
        if found.cause is not None:
            presence.miss_reason = miss_reason(found.cause)
            self._misses.note("lookup", session, keys[found.usable], found.cause, found.usable, len(keys))
