"""Lookup: which blocks of a chain are here, where, and how long it would take to have them mapped.

Moves nothing and waits for nothing. Invariant: what it calls usable was readable at that instant; the lease is the
truth.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvstore_proto.errors import ErrorKind, KVStoreError
from kvstore_proto.identity import KEY_BYTES
from kvstore_proto.matching import restorable_blocks
from kvstore_proto.v1 import kvstore_pb2 as pb
from kvstored.clients.sessions import Session
from kvstored.lifecycle import Cause, miss_reason
from kvstored.store.blocks import Residency
from kvstored.store.tiering import codes_by_mask
from kvstored.store.transfer.promote import Promoter
from kvstored.telemetry import Counters, Flows, RecentMisses
from kvstored.verbs.validate import keys_of, known_group


class LookUp:
    """See the module."""

    def __init__(
        self,
        residency: Residency,
        promoter: Promoter,
        counters: Counters,
        flows: Flows,
        misses: RecentMisses,
        max_keys: int,
    ) -> None:
        self._residency = residency
        self._promoter = promoter
        self._counters = counters
        self._flows = flows
        self._misses = misses
        self._max_keys = max_keys
        self._code_of_mask = codes_by_mask(residency)

    def look_up(self, session: Session, request: pb.Lookup) -> pb.LookupReply:
        count = sum(len(key_set.keys) for key_set in request.sets) // KEY_BYTES
        if count > self._max_keys:
            raise KVStoreError(
                ErrorKind.TOO_LARGE, f"{count} keys in one message, the limit is {self._max_keys}: split it"
            )
        reply = pb.LookupReply()
        for key_set in request.sets:
            self._look_up_set(session, key_set, reply.sets.add())
        self._counters.add("lookups")
        self._flows.looked_up(session)
        return reply

    def _look_up_set(self, session: Session, key_set: pb.KeySet, presence: pb.Presence) -> None:
        keys = keys_of(key_set.keys, self._max_keys)
        known_group(session, key_set.group)
        residency = self._residency
        found = residency.find_each(session.tenant_id, key_set.keys)
        rows = self._promoter.reachable(found)
        mask = residency.rows.mask
        code = self._code_of_mask
        presence.tiers = bytes([code[mask[row]] if row >= 0 else 0 for row in rows])
        presence.load_us.extend(self._promoter.estimate_us(rows))
        usable = usable_blocks(rows, key_set.match, key_set.window_blocks)
        presence.usable_blocks = usable
        if usable < len(keys):  # then the key at `usable` is missing, whatever the match
            cause = Cause.READ_FAILED  # stored, but on a medium that is shed
            if found[usable] < 0:
                cause = session.why_missing(residency, keys[usable])
            presence.miss_reason = miss_reason(cause)
            self._flows.missed(session, cause, len(keys) - usable)
            self._misses.note("lookup", session, keys[usable], cause, usable, len(keys))
        self._counters.add("lookup_keys", len(keys))
        self._counters.add("lookup_hit_keys", usable)


def usable_blocks(rows: Sequence[int], match: int, window_blocks: int) -> int:
    """`restorable_blocks` of residency rows: a block is present where its row is not negative."""
    return restorable_blocks([row >= 0 for row in rows], match, window_blocks)
