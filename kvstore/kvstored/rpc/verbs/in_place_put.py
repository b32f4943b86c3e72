"""A put without a copy: a client gets slots of its tenant's arenas, writes blocks there, and stores them.

Owns which client may, how much, and the checks of such a store; the store then does what every put does, without the
copy; the slot is checksummed where it is (`kvstore_tiers/host_transfers.py`).
Invariants: no lookup finds a reserved slot before it is stored; slots that a request has not stored are free when it
has ended; a slot that a living client may be writing to is given to no other.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from kvstore_proto.arena import slot_bytes
from kvstore_proto.errors import ErrorKind, KVStoreError
from kvstore_proto.v1 import kvstore_pb2 as pb
from kvstore_tiers.base import Slot
from kvstore_tiers.host import HostTier
from kvstored.clients.sessions import Session
from kvstored.clients.staged_blocks import ReservedBlocks
from kvstored.clients.tenants.peer import has_exited
from kvstored.clock import NS_PER_MS, Clock
from kvstored.config import Config
from kvstored.rpc.verbs.validate import (
    claimed_blocks,
    durability_asked,
    known_group,
    may_store,
    payload_size,
    sent_again,
)
from kvstored.store.blocks import Residency
from kvstored.store.operations.offer import NOWHERE, Offer, Stored
from kvstored.store.operations.put import Put
from kvstored.store.reservations import Reservation, Reservations
from kvstored.store.transfer.room import Room

LOOK_AGAIN_S = 0.25
AHEAD_SHARE = 128  # at most one part in so many of DRAM is held for puts that may follow
SLICE_SLOTS = 64  # between two looks at the loop: about 0.2 ms


class InPlacePut:
    """See the module. A reservation lasts as long as a lease; a client holds as much as it may have of staging."""

    def __init__(
        self,
        put: Put,
        reservations: Reservations,
        residency: Residency,
        host: HostTier,
        room: Room,
        clock: Clock,
        config: Config,
    ) -> None:
        self._put = put
        self._reservations = reservations
        self._residency = residency
        self._host = host
        self._room = room
        self._clock = clock
        self._in_place = config.put
        self._default_mode = config.durability.mode
        self._limits = config.limits

    async def reserve(self, session: Session, request: pb.ReserveSlots) -> pb.ReserveSlotsReply:
        """Raises KVStoreError for a request that is wrong as a whole, or not allowed."""
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

    def undo(self, session: Session, reply: pb.ReserveSlotsReply) -> None:
        """Take back slots of a reply that could not be sent."""
        self._reservations.give_back(session.session_id, reply.reservation)

    def store(self, session: Session, request: pb.Store) -> AsyncGenerator[Stored, None]:
        """As `Put.store`. Raises KVStoreError for an invalid request, and for more puts at once than allowed."""
        limits = self._limits
        keys, parents, extras = claimed_blocks(session, request, limits.max_keys, limits.max_block_bytes)
        places = [page - 1 for page in request.pages]  # NOWHERE for a block that is not written
        if len(places) != len(keys):
            raise KVStoreError(ErrorKind.INVALID, f"{len(keys)} keys with {len(places)} pages")
        may_store(session, limits.inflight_per_client)
        found = self._reservations.find(session.session_id, request.reservation, self._clock.monotonic_ns())
        if found is None:
            return sent_again(len(keys))
        wanted = [place for place in places if place != NOWHERE]
        if len(set(wanted)) < len(wanted) or not found.slots.keys() >= set(wanted):
            raise KVStoreError(ErrorKind.INVALID, "a slot is named twice, or is not in the reservation any more")
        nbytes = slot_bytes(request.payload_bytes)
        if any(found.slots[place].nbytes != nbytes for place in wanted):
            raise KVStoreError(ErrorKind.INVALID, f"the slots reserved are not for payloads of {request.payload_bytes}")
        taken = self._reservations.take(found, wanted)
        blocks = ReservedBlocks(taken, session.tenant_id, self._host, self._reservations)
        sizes = [request.payload_bytes] * len(keys)
        offer = Offer(request.group, request.keys, keys, parents, extras, sizes, blocks, places, blocks)
        try:
            return self._put.store(session, offer, durability_asked(session, request.durability, self._default_mode))
        except Exception:
            blocks.end()
            raise

    def leave(self, session: Session) -> None:
        """The session has ended. Its process may live on with the arenas mapped, a thread of it in the middle of a
        write: its slots are freed when the process has exited, or at the latest one lease's time later."""
        self._leave(session, self._clock.monotonic_ns() + self._limits.lease_ttl_ms * NS_PER_MS)

    def _leave(self, session: Session, done_ns: int) -> None:
        """A process that ends closes its sockets before the kernel says that it has exited: so look again."""
        if has_exited(session.peer) or self._clock.monotonic_ns() >= done_ns:
            self._reservations.end_session(session.session_id)
        elif self._reservations.held_bytes(session.session_id):
            asyncio.get_running_loop().call_later(LOOK_AGAIN_S, self._leave, session, done_ns)

    async def _fill(self, session: Session, reservation: Reservation, request: pb.ReserveSlots) -> None:
        """Find slots one by one, evicting for them; fewer where there is no room for more."""
        nbytes, room, tenant = slot_bytes(request.payload_bytes), self._room, session.tenant_id
        left_bytes = self._limits.staging_per_client_bytes - self._reservations.held_bytes(session.session_id)
        if request.ahead:
            most_bytes = self._host.statistics().capacity_bytes // AHEAD_SHARE
            left_bytes = min(left_bytes, most_bytes - self._reservations.ahead_bytes)
        for count in range(1, min(request.blocks, left_bytes // nbytes) + 1):
            slot = room.allocate_now(nbytes, tenant, writable=True)
            if slot is None and not request.ahead:
                slot = await self._make_room(request, nbytes, tenant)
            if slot is None or not self._reservations.add(reservation, slot):
                return
            if count % SLICE_SLOTS == 0:
                await asyncio.sleep(0)

    async def _make_room(self, request: pb.ReserveSlots, nbytes: int, tenant: int) -> Slot | None:
        parent = self._residency.find_any(tenant, request.parent) if request.parent else -1
        slot = await self._room.allocate_for(None, nbytes, tenant, parent=parent, writable=True)
        return slot if isinstance(slot, Slot) else None
