"""Puts of a stream: from staging memory, where the client chooses the place of each block, or from slots it reserved.

The module checks a put, and decides when a loan of the staging memory may be renewed, and which client may reserve how
many slots. It keeps no account of places in staging: a client that writes to one while the daemon copies it spoils its
own block. A put from reserved slots needs no copy: each slot is checksummed in place (`kvstore_tiers/image_copies.py`).

Invariants: bytes outside the staging memory are never read, nor two blocks of a request from the same bytes; once a
loan is renewed, no earlier request reads the staging memory; no lookup finds a reserved slot before it is stored; slots
that a request has not stored are free when it has ended; a slot that a living client may be writing to is given to no
other.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from itertools import pairwise

from kvstore_proto.arena import ALIGNMENT_BYTES, slot_bytes
from kvstore_proto.errors import ErrorKind, KVStoreError
from kvstore_proto.terms import NO_TERMS
from kvstore_proto.v1 import kvstore_pb2 as pb
from kvstore_tiers.base import Slot
from kvstored.clients.codes import terms_of
from kvstored.clients.sessions import ClientSession
from kvstored.clients.staging import ReservedBlocks
from kvstored.clock import NS_PER_MS
from kvstored.rpc.verbs.validate import keys_of, known_group, payload_size
from kvstored.store.assembly import Store
from kvstored.store.operations.durability import DurabilityMode
from kvstored.store.operations.put import Puts
from kvstored.store.operations.records import (
    NO_EXTRA_FIELD,
    NOWHERE,
    Offer,
    PutAnswer,
    Reserved,
    StagedBlocks,
    StoreStatus,
)
from kvstored.store.reservations import Reservation

AHEAD_SHARE = 128  # at most one part in so many of DRAM is held for puts that may follow
SLICE_SLOTS = 64  # between two looks at the loop: about 0.2 ms


class PutVerb:
    """The handlers of clients' puts: from staging memory, or from slots that the client reserved. A reservation lasts
    as long as a lease; a client may reserve as many bytes as it may have of staging.
    """

    def __init__(self, put: Puts, store: Store) -> None:
        self._put = put
        self._reservations, self._residency = store.reservations, store.residency
        self._retention = store.retention
        self._host, self._room, self._clock = store.host, store.room, store.clock
        self._in_place, self._limits = store.config.put, store.config.limits
        self._default_mode = store.config.durability.mode  # of tenants that have none of their own

    async def lend(self, session: ClientSession) -> pb.LendReply:
        """Lend the client of `session` its staging memory (from which it puts blocks) under a new number, after all
        puts that read the memory have ended. The number is 0 for a client without staging memory."""
        session.require_writer()
        if session.staging is None:
            return pb.LendReply()
        session.loan += 1  # first, so that nothing new begins under the old one
        number = session.loan
        if session.copying:
            await asyncio.wait(set(session.copying))
        return pb.LendReply(loan=number)

    def store(self, session: ClientSession, whole: pb.Request) -> AsyncGenerator[pb.Response, None]:
        """Check the put in `whole` and begin it; yield its answers. Raises KVStoreError for an invalid request, and for
        more puts at once than allowed.
        """
        session.require_writer()
        request, limits = whole.store, self._limits
        keys, parents = keys_of(request.keys, limits.max_keys), keys_of(request.parents, limits.max_keys)
        extras = keys_of(request.extras, limits.max_keys) if request.extras else [NO_EXTRA_FIELD] * len(keys)
        known_group(session, request.group)
        payload_size(session, request.group, request.payload_bytes, limits.max_block_bytes)
        if not len(parents) == len(extras) == len(keys):
            raise KVStoreError(ErrorKind.INVALID, f"{len(keys)} keys with {len(parents)} parents")
        if len(request.pages) != len(keys):
            raise KVStoreError(ErrorKind.INVALID, f"{len(keys)} keys with {len(request.pages)} pages")
        offsets: Sequence[int]
        staged: StagedBlocks | None
        reserved: Reserved | None = None
        if request.reservation:
            offsets = [page - 1 for page in request.pages]  # NOWHERE for a block that is not written
            staged = reserved = self._reserved(session, request, offsets)
        else:
            staged, offsets = self._staged(session, request)
        if staged is None:
            return _sent_again(len(keys))
        sizes = [request.payload_bytes] * len(keys)
        terms, before = terms_of(request.terms), keys_of(request.before, limits.max_keys)
        offer = Offer(
            request.group, request.keys, keys, parents, extras, sizes, staged, offsets, reserved, terms, before
        )  # fmt: skip
        try:
            return self.store_inline(session, offer, request.durability)
        except Exception:
            if reserved is not None:
                reserved.end()
            raise

    def store_inline(
        self, session: ClientSession, offer: Offer, durability: pb.DurabilityMode.ValueType
    ) -> AsyncGenerator[pb.Response, None]:
        """Begin the put of `offer`, whose blocks were checked or came in the message, and yield its answers. Raises
        KVStoreError for a client that may not put, and for terms that are wrong."""
        session.require_writer()
        self._check_terms(session, offer)
        return _replies(self._put.store(session, offer, self._mode_of(session, durability)))

    def _check_terms(self, session: ClientSession, offer: Offer) -> None:
        """Raise KVStoreError for terms that are out of bounds, or pin more than the tenant may."""
        if offer.terms != NO_TERMS:
            rows = self._retention.find_each(session.tenant_id, offer.packed) if offer.terms.pin else []
            nbytes = sum(slot_bytes(offer.payload_bytes[at]) for at, row in enumerate(rows) if row < 0)
            self._retention.check(session.tenant_id, offer.terms, nbytes, [row for row in rows if row >= 0])

    def _mode_of(self, session: ClientSession, asked: pb.DurabilityMode.ValueType) -> DurabilityMode:
        """Return the durability that is asked for; where that is none, or one of a newer version, the tenant's."""
        try:
            return DurabilityMode(asked)
        except ValueError:
            return DurabilityMode[(session.tenant.limits.durability or self._default_mode).upper()]

    def _staged(self, session: ClientSession, request: pb.Store) -> tuple[StagedBlocks | None, list[int]]:
        """Return the staging memory, None if its loan has ended, and the place of each block in it; NOWHERE for blocks
        that were not written. Raises KVStoreError unless all are in the memory and apart.
        """
        staging, nbytes = session.staging, slot_bytes(request.payload_bytes)
        if staging is None or not session.loan or request.loan != session.loan:
            return None, []
        offsets = [(page - 1) * ALIGNMENT_BYTES if page else NOWHERE for page in request.pages]
        placed = sorted(offset for offset in offsets if offset != NOWHERE)
        if placed and placed[-1] > staging.size_bytes - nbytes:
            raise KVStoreError(
                ErrorKind.INVALID,
                f"a slot of {nbytes} bytes at {placed[-1]} is not within the staging memory of {staging.size_bytes}",
            )
        if any(after - before < nbytes for before, after in pairwise(placed)):
            raise KVStoreError(ErrorKind.INVALID, f"two slots of {nbytes} bytes overlap")
        self._check_inflight(session)
        return staging, offsets

    def _check_inflight(self, session: ClientSession) -> None:
        """Raise KVStoreError for one put too many: the stream's limit does not count the puts of a broken stream."""
        if len(session.copying) >= self._limits.inflight_per_client:
            raise KVStoreError(
                ErrorKind.THROTTLED, f"{len(session.copying)} puts of this client are being stored already", 5
            )

    # Slots that a client writes itself

    def _reserved(self, session: ClientSession, request: pb.Store, places: Sequence[int]) -> ReservedBlocks | None:
        """Return the blocks at `places` of a reservation; None if it has ended. Raises KVStoreError for places that are
        not in it.
        """
        self._check_inflight(session)
        found = self._reservations.find(session.session_id, request.reservation, self._clock.monotonic_ns())
        if found is None:
            return None
        wanted = [place for place in places if place != NOWHERE]
        if len(set(wanted)) < len(wanted) or not found.slots.keys() >= set(wanted):
            raise KVStoreError(ErrorKind.INVALID, "a slot is named twice, or is not in the reservation any more")
        nbytes = slot_bytes(request.payload_bytes)
        if any(found.slots[place].nbytes != nbytes for place in wanted):
            raise KVStoreError(ErrorKind.INVALID, f"the slots reserved are not for payloads of {request.payload_bytes}")
        taken = self._reservations.take(found, wanted)
        return ReservedBlocks(taken, session.tenant_id, self._host, self._reservations)

    async def reserve(self, session: ClientSession, request: pb.ReserveSlots) -> pb.ReserveSlotsReply:
        """Reserve slots of arenas that the client will write to, and return their places. Raises KVStoreError for a
        request that is wrong as a whole, or not allowed.
        """
        session.require_writer()
        if request.give_back:
            self._reservations.give_back(session.session_id, request.give_back)
        if not request.blocks:
            return pb.ReserveSlotsReply()
        if not session.tenant.puts_in_place(self._in_place):
            raise KVStoreError(
                ErrorKind.FORBIDDEN, f"put.in_place is off for tenant {session.tenant.name}: put by way of staging"
            )
        limits = self._limits
        known_group(session, request.group)
        payload_size(session, request.group, request.payload_bytes, limits.max_block_bytes)
        if request.blocks > limits.max_keys:
            raise KVStoreError(
                ErrorKind.TOO_LARGE, f"{request.blocks} slots in one message, the limit is {limits.max_keys}: split it"
            )
        expires_ns = self._clock.monotonic_ns() + limits.lease_ttl_ms * NS_PER_MS
        reservation = self._reservations.begin(
            session.session_id, session.tenant_id, expires_ns, is_ahead=request.ahead
        )
        try:
            await self._fill(session, reservation, request)
        except BaseException:  # cancelled too: the client gets no answer
            self._reservations.give_back(session.session_id, reservation.number)
            raise
        if not reservation.slots or session.closed:
            self._reservations.give_back(session.session_id, reservation.number)
            return pb.ReserveSlotsReply()
        slots = reservation.slots.values()
        return pb.ReserveSlotsReply(
            reservation=reservation.number,
            arena_ids=[slot.container for slot in slots],
            offsets=[slot.offset for slot in slots],
            expires_in_ms=max(0, expires_ns - self._clock.monotonic_ns()) // NS_PER_MS,
        )

    def undo(self, session: ClientSession, reply: pb.ReserveSlotsReply) -> None:
        """Free the reserved slots that `reply` names, since it could not be sent to the client of `session`."""
        self._reservations.give_back(session.session_id, reply.reservation)

    async def _fill(self, session: ClientSession, reservation: Reservation, request: pb.ReserveSlots) -> None:
        """Find slots, and evict blocks where too few are free; fewer slots if there is no room for more."""
        nbytes, room, tenant = slot_bytes(request.payload_bytes), self._room, session.tenant_id
        while (most := min(request.blocks - reservation.places, self._may_hold(session, request))) > 0:
            slots = room.allocate_run(min(most, SLICE_SLOTS), nbytes, tenant, writable=True)
            if not slots and not request.ahead and (slot := await self._make_room(session, request)) is not None:
                slots = [slot]
            added = [self._reservations.add(reservation, slot) for slot in slots]  # each: one of an ended one is freed
            if not added or not all(added):
                return
            if len(slots) == SLICE_SLOTS:
                await asyncio.sleep(0)

    def _may_hold(self, session: ClientSession, request: pb.ReserveSlots) -> int:
        """Return how many slots more the client may hold: it may have asked for others at the same time."""
        left_bytes = self._limits.staging_per_client_bytes - self._reservations.held_bytes(session.session_id)
        if request.ahead:
            most_bytes = self._host.statistics().capacity_bytes // AHEAD_SHARE
            left_bytes = min(left_bytes, most_bytes - self._reservations.ahead_bytes)
        return left_bytes // slot_bytes(request.payload_bytes)

    async def _make_room(self, session: ClientSession, request: pb.ReserveSlots) -> Slot | None:
        tenant, nbytes = session.tenant_id, slot_bytes(request.payload_bytes)
        parent = self._residency.find_any(tenant, request.parent) if request.parent else -1
        slot = await self._room.allocate_for(None, nbytes, tenant, parent=parent, writable=True)
        if isinstance(slot, Slot) and self._may_hold(session, request) > 0:
            return slot
        if isinstance(slot, Slot):
            self._host.free(slot)
        return None


async def _sent_again(blocks: int) -> AsyncGenerator[pb.Response, None]:
    """Answer a put whose loan or reservation has ended: nothing was stored, the client sends it again."""
    statuses, durability = bytes([StoreStatus.AGAIN] * blocks), bytes(blocks)
    yield pb.Response(store=pb.StoreReply(statuses=statuses, durability=durability, final=True))


async def _replies(answers: AsyncGenerator[PutAnswer, None]) -> AsyncGenerator[pb.Response, None]:
    async with aclosing(answers):
        async for each in answers:
            reply = pb.StoreReply(statuses=each.statuses, durability=each.durability, final=each.final)
            yield pb.Response(store=reply)
