"""A put from staging memory in one message (store); the client chooses the place of each block by itself.

Owns the checks of a store, and when a loan of the staging memory may be renewed. Keeps no account of the places: a
client that writes to a place while the daemon copies it spoils its own block. Invariants: bytes outside the staging
memory are never read, nor two blocks of a request from the same bytes; once a loan is renewed, no earlier request reads
the staging memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from itertools import pairwise

from kvstore_proto.arena import ALIGNMENT_BYTES, slot_bytes
from kvstore_proto.errors import ErrorKind, KVStoreError
from kvstore_proto.v1 import kvstore_pb2 as pb
from kvstored.clients.sessions import Session
from kvstored.config.schema import LimitsSection
from kvstored.rpc.verbs.validate import claimed_blocks, durability_asked, may_store, sent_again
from kvstored.store.operations.offer import NOWHERE, Offer, Stored
from kvstored.store.operations.put import Put


class StagedPut:
    """`default_mode` is the name of the durability of tenants that have none of their own."""

    def __init__(self, put: Put, limits: LimitsSection, *, default_mode: str) -> None:
        self._put = put
        self._default_mode = default_mode
        self._limits = limits

    async def lend(self, session: Session) -> pb.LendReply:
        """The client's staging memory, under a new number, once nothing reads it any more."""
        if session.staging is None:
            return pb.LendReply()
        session.loan += 1  # first, so that nothing new begins under the old one
        number = session.loan
        if session.copying:
            await asyncio.wait(set(session.copying))
        return pb.LendReply(loan=number)

    def store(self, session: Session, request: pb.Store) -> AsyncGenerator[Stored, None]:
        """As `Put.store`. Raises KVStoreError for an invalid request, and for more puts at once than allowed."""
        limits = self._limits
        keys, parents, extras = claimed_blocks(session, request, limits.max_keys, limits.max_block_bytes)
        pages = request.pages
        if len(pages) != len(keys):
            raise KVStoreError(ErrorKind.INVALID, f"{len(keys)} keys with {len(pages)} pages")
        staging = session.staging
        if staging is None or not session.loan or request.loan != session.loan:
            return sent_again(len(keys))
        offsets = _offsets(pages, slot_bytes(request.payload_bytes), staging.size_bytes)
        may_store(session, limits.inflight_per_client)
        sizes = [request.payload_bytes] * len(keys)
        offer = Offer(request.group, request.keys, keys, parents, extras, sizes, staging, offsets)
        return self._put.store(session, offer, durability_asked(session, request.durability, self._default_mode))

    def store_inline(
        self, session: Session, offer: Offer, durability: pb.DurabilityMode.ValueType
    ) -> AsyncGenerator[Stored, None]:
        """A put whose blocks came in its message."""
        return self._put.store(session, offer, durability_asked(session, durability, self._default_mode))


def _offsets(pages: Sequence[int], nbytes: int, staging_bytes: int) -> list[int]:
    """Where each block is; NOWHERE for those not written. Raises KVStoreError unless all are in the staging memory and
    apart."""
    offsets = [(page - 1) * ALIGNMENT_BYTES if page else NOWHERE for page in pages]
    placed = sorted(offset for offset in offsets if offset != NOWHERE)
    if placed and placed[-1] > staging_bytes - nbytes:
        raise KVStoreError(
            ErrorKind.INVALID,
            f"a slot of {nbytes} bytes at {placed[-1]} is not within the staging memory of {staging_bytes}",
        )
    if any(after - before < nbytes for before, after in pairwise(placed)):
        raise KVStoreError(ErrorKind.INVALID, f"two slots of {nbytes} bytes overlap")
    return offsets
