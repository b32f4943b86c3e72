"""Put: reserve staging, let the client write, commit: copy, checksum, publish, and say how durable each block is.

The client can write its staging memory at any time, so nothing in it is trusted: the daemon copies first and checks the
copy, takes every header field but the token ids from the reservation, and refuses tokens that do not hash to the key.
Invariants: a block is visible to the very next lookup once its commit is answered; one commit, one reservation, once.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass

from kvstore_proto.arena import BlockHeader, slot_bytes
from kvstore_proto.errors import ErrorKind, KVStoreError
from kvstore_proto.identity import KEY_BYTES, NO_EXTRA, NO_PARENT, chain
from kvstore_proto.v1 import kvstore_pb2 as pb
from kvstore_tiers.base import Outcome, OutcomeKind, Slot
from kvstore_tiers.host import HostTier
from kvstored.clock import NS_PER_MS, Clock
from kvstored.dataplane.sessions import Reservation, Session, SessionTable
from kvstored.movement.completions import CompletionQueue
from kvstored.movement.room import Room
from kvstored.movement.writeback import WriteBack
from kvstored.residency import CyclicChainError, Residency
from kvstored.telemetry import Counters
from kvstored.tiering import HOST
from kvstored.verbs.validate import keys_of, known_group, payload_size

log = logging.getLogger(__name__)
HASHES_A_SLICE = 2048  # a millisecond or so of the control thread
_NO_EXTRA_FIELD = bytes(KEY_BYTES)
_MODES = {
    "none": pb.DURABILITY_MODE_NONE,
    "batch": pb.DURABILITY_MODE_BATCH,
    "always": pb.DURABILITY_MODE_ALWAYS,
}


@dataclass(slots=True)
class _Filling:
    """One block of a commit between its slot and its publication."""

    position: int
    reservation: Reservation
    token: int  # of the residency row
    slot: Slot
    outcome: Outcome | None = None


class Put:
    """See the module. `writeback` is None without an NVMe tier: everything is volatile then."""

    def __init__(
        self,
        residency: Residency,
        sessions: SessionTable,
        host: HostTier,
        room: Room,
        writeback: WriteBack | None,
        completions: CompletionQueue,
        clock: Clock,
        counters: Counters,
        *,
        max_keys: int,
        max_block_bytes: int,
        reservation_ttl_ms: int,
        default_mode: str,
    ) -> None:
        self._residency = residency
        self._sessions = sessions
        self._host = host
        self._room = room
        self._writeback = writeback
        self._completions = completions
        self._clock = clock
        self._counters = counters
        self._max_keys = max_keys
        self._max_block_bytes = max_block_bytes
        self._reservation_ttl_ms = reservation_ttl_ms
        self._default_mode = default_mode
        self._storing: set[asyncio.Task[dict[int, asyncio.Future[bool]]]] = set()
        self._reserved: dict[tuple[int, bytes], int] = {}  # (tenant, key) -> session id that is writing it

    # Reserve and abort

    def reserve(self, session: Session, request: pb.Reserve) -> pb.ReserveReply:
        """An extent of staging for each key that is not stored and that nobody else is writing."""
        keys = keys_of(request.keys, self._max_keys)
        parents = keys_of(request.parents, self._max_keys)
        extras = keys_of(request.extras, self._max_keys) if request.extras else [_NO_EXTRA_FIELD] * len(keys)
        known_group(session, request.group)
        payload_size(session, request.group, request.payload_bytes, self._max_block_bytes)
        if not len(parents) == len(extras) == len(keys):
            raise KVStoreError(ErrorKind.INVALID, f"{len(keys)} keys with {len(parents)} parents")
        nbytes = slot_bytes(request.payload_bytes)
        expires_ns = self._clock.monotonic_ns() + self._reservation_ttl_ms * NS_PER_MS
        statuses, ids, offsets = bytearray(), [], []
        for key, parent, extra in zip(keys, parents, extras, strict=True):
            status = self._reservable(session, key, parent, nbytes)
            reservation_id = offset = 0
            if status == pb.RESERVE_STATUS_RESERVED:
                found = session.staging.allocate(nbytes) if session.staging is not None else None
                if found is None:
                    status = pb.RESERVE_STATUS_THROTTLED
                else:
                    offset, reservation_id = found, self._sessions.next_reservation_id()
                    session.reservations[reservation_id] = Reservation(
                        reservation_id, key, parent, extra, request.group, request.payload_bytes, offset, nbytes,
                        expires_ns,
                    )  # fmt: skip
                    self._reserved[session.tenant_id, key] = session.session_id
            statuses.append(status)
            ids.append(reservation_id)
            offsets.append(offset)
        return pb.ReserveReply(statuses=bytes(statuses), reservation_ids=ids, staging_offsets=offsets, retry_after_ms=2)

    def abort(self, session: Session, request: pb.Abort) -> pb.AbortReply:
        """Give reservations back; one that is being committed is past that."""
        aborted = 0
        for reservation_id in request.reservation_ids:
            reservation = session.reservations.get(reservation_id)
            if reservation is not None and not reservation.committing:
                self._drop(session, reservation_id)
                aborted += 1
        return pb.AbortReply(aborted=aborted)

    def end_session(self, session: Session) -> None:
        """The client is gone: what it did not commit was never there."""
        for reservation_id, reservation in list(session.reservations.items()):
            if not reservation.committing:  # else the commit under way ends it
                self._drop(session, reservation_id)

    async def finish(self) -> None:
        """Wait for the commits under way, whether or not their clients are still there."""
        while self._storing:
            await asyncio.wait(set(self._storing))

    def expire(self, now_ns: int) -> int:
        """Let overdue reservations lapse, so that a client that reserves and forgets cannot block a key."""
        lapsed = 0
        for session in self._sessions.all():
            for reservation_id, reservation in list(session.reservations.items()):
                if reservation.expires_ns <= now_ns and not reservation.committing:
                    self._drop(session, reservation_id)
                    lapsed += 1
        self._counters.add("expired_reservations", lapsed)
        return lapsed

    def _reservable(self, session: Session, key: bytes, parent: bytes, nbytes: int) -> pb.ReserveStatus.ValueType:
        if key in (parent, NO_PARENT):
            return pb.RESERVE_STATUS_REFUSED
        if self._residency.find(session.tenant_id, key) >= 0:
            self._counters.add("present_blocks")
            return pb.RESERVE_STATUS_PRESENT
        if (session.tenant_id, key) in self._reserved:
            return pb.RESERVE_STATUS_PENDING
        if session.staging is None or nbytes > session.staging.size_bytes:
            return pb.RESERVE_STATUS_TOO_LARGE
        return pb.RESERVE_STATUS_RESERVED

    def _drop(self, session: Session, reservation_id: int) -> None:
        reservation = session.drop_reservation(reservation_id)
        if reservation is not None:
            self._reserved.pop((session.tenant_id, reservation.key), None)

    # Commit

    async def commit(self, session: Session, request: pb.Commit) -> AsyncIterator[pb.CommitReply]:
        """One reply when the blocks are published; a second, final one when pending ones have settled."""
        count = len(request.reservation_ids)
        if count > self._max_keys:
            raise KVStoreError(ErrorKind.TOO_LARGE, f"{count} reservations in one commit, limit {self._max_keys}")
        statuses = bytearray([pb.COMMIT_STATUS_FAILED] * count)
        durability = bytearray([pb.DURABILITY_VOLATILE] * count)
        taken: list[tuple[int, Reservation]] = []
        for position, reservation_id in enumerate(request.reservation_ids):
            reservation = session.reservations.get(reservation_id)
            if reservation is None or reservation.committing:
                statuses[position] = pb.COMMIT_STATUS_NO_RESERVATION
            else:
                reservation.committing = True
                taken.append((position, reservation))
        mode = request.durability
        if mode not in _MODES.values():  # the default, or one that this daemon does not know
            mode = _MODES[session.tenant.limits.durability or self._default_mode]
        # A client that dies now must not leave half a block behind: the storing itself cannot be cancelled.
        storing = asyncio.create_task(self._store(session, taken, statuses, mode))
        self._storing.add(storing)
        storing.add_done_callback(self._storing.discard)
        settling = await asyncio.shield(storing)
        if mode == pb.DURABILITY_MODE_ALWAYS:
            await _all(settling.values())
        for position, settled in settling.items():
            durability[position] = _durability(settled)
        final = pb.DURABILITY_PENDING not in durability
        yield pb.CommitReply(statuses=bytes(statuses), durability=bytes(durability), final=final)
        if not final:
            await _all(settling.values())
            for position, settled in settling.items():
                durability[position] = _durability(settled)
            yield pb.CommitReply(statuses=bytes(statuses), durability=bytes(durability), final=True)

    async def _store(
        self, session: Session, taken: Sequence[tuple[int, Reservation]], statuses: bytearray, mode: int
    ) -> dict[int, asyncio.Future[bool]]:
        """Slots, copies, publication, write-through; the reservations end whatever happens. As `_settling`.

        Write-through pins its blocks, so it begins in the same turn of the loop as publication: a turn later they may
        have been evicted and their rows be other blocks'.
        """
        try:
            async with session.beginning:  # commits of one client begin in order: parents before children
                fillings = await self._begin(session, taken, statuses)
            await self._copy(session, fillings)
            return self._settling(self._publish(fillings, statuses), mode)
        finally:
            for _, reservation in taken:
                self._drop(session, reservation.reservation_id)

    async def _begin(
        self, session: Session, taken: Sequence[tuple[int, Reservation]], statuses: bytearray
    ) -> list[_Filling]:
        """A slot and an unreadable row for every block that can be stored."""
        residency = self._residency
        fillings: list[_Filling] = []
        for position, reservation in taken:
            slot = self._room.allocate_now(reservation.nbytes, session.tenant_id)
            if slot is None:
                slot = await self._room.allocate(reservation.nbytes, session.tenant_id)
            if slot is None:
                statuses[position] = pb.COMMIT_STATUS_THROTTLED
                self._counters.add("throttled_blocks")
                continue
            if residency.find(session.tenant_id, reservation.key) >= 0:
                self._host.free(slot)
                statuses[position] = pb.COMMIT_STATUS_PRESENT
                continue
            parent_row = residency.find_any(session.tenant_id, reservation.parent)
            if self._is_orphan(session, reservation, parent_row):
                self._host.free(slot)
                statuses[position] = pb.COMMIT_STATUS_ORPHANED
                continue
            depth = residency.depth(parent_row) + 1 if parent_row >= 0 else 0
            now_ns = self._clock.monotonic_ns()
            try:
                row = residency.insert(
                    session.tenant_id, reservation.key, reservation.parent,
                    fingerprint_id=session.fingerprint_id, group=reservation.group, depth=depth,
                    payload_bytes=reservation.payload_bytes, now_ns=now_ns,
                )  # fmt: skip
            except CyclicChainError as error:
                self._host.free(slot)
                log.warning("client %s of %s: %s", session.client_name, session.tenant.name, error)
                continue
            residency.attach(row, HOST, slot, now_ns, filling=True)
            fillings.append(_Filling(position, reservation, residency.token(row), slot))
        return fillings

    def _is_orphan(self, session: Session, reservation: Reservation, parent_row: int) -> bool:
        """Whether the block could not be reached: under full attention, without the block before it. That one may
        have been evicted since this client was told of it, or found no room itself."""
        group = session.fingerprint.group(reservation.group)
        if reservation.parent == NO_PARENT or group is None or group.kind != "full":
            return False
        residency = self._residency
        return parent_row < 0 or not (residency.tier_mask(parent_row) or residency.being_filled(parent_row))

    async def _copy(self, session: Session, fillings: Sequence[_Filling]) -> None:
        """Copy payloads from staging to arenas in the tier's threads; outcomes lie in `fillings` afterwards."""
        if not fillings:
            return
        staging = session.staging
        assert staging is not None, "a reservation without staging"
        writes = []
        hashed = 0
        for filling in fillings:
            reservation = filling.reservation
            hashed += session.fingerprint.block_tokens // session.fingerprint.engine_block_tokens
            if hashed >= HASHES_A_SLICE:
                hashed = 0
                await asyncio.sleep(0)
            tokens = staging.tokens_at(reservation.offset)
            if not _tokens_hash_to_key(session, reservation, tokens):
                filling.outcome = Outcome(OutcomeKind.CORRUPT, message="tokens do not hash to the key")
                continue
            header = BlockHeader(
                key=reservation.key, parent=reservation.parent, extra=reservation.extra,
                fingerprint=session.fingerprint_digest, tenant=session.tenant.digest, group=reservation.group,
                payload_bytes=reservation.payload_bytes, tokens=tokens,
                depth=self._residency.depth(self._residency.current(filling.token)),
                generation=filling.slot.generation, created_ns=self._clock.wall_ns(),
            )  # fmt: skip
            writes.append((filling, header, staging.payload_at(reservation.offset, reservation.payload_bytes)))
        if not writes:
            return
        done: asyncio.Future[Sequence[Outcome]] = asyncio.get_running_loop().create_future()
        self._host.write_many(
            [(filling.slot, header, [source]) for filling, header, source in writes],
            self._completions.to_loop(done.set_result),
        )
        for (filling, _, _), outcome in zip(writes, await done, strict=True):
            filling.outcome = outcome

    def _publish(self, fillings: Sequence[_Filling], statuses: bytearray) -> dict[int, int]:
        """Make whole blocks readable, in chain order; position -> row of each."""
        residency = self._residency
        now_ns = self._clock.monotonic_ns()
        published: dict[int, int] = {}
        for filling in fillings:
            row = residency.current(filling.token)
            outcome = filling.outcome
            assert row >= 0 and outcome is not None, "a block went away while it was being filled"
            if not outcome.ok:
                self._host.free(residency.detach(row, HOST))
                if outcome.kind is OutcomeKind.CORRUPT:
                    statuses[filling.position] = pb.COMMIT_STATUS_KEY_MISMATCH
                else:
                    log.warning("a block could not be stored: %s", outcome.message)
                continue
            residency.publish(row, HOST, now_ns)
            statuses[filling.position] = pb.COMMIT_STATUS_STORED
            published[filling.position] = row
            self._counters.add("stored_blocks")
            self._counters.add("stored_bytes", filling.reservation.payload_bytes)
        if published:
            residency.touch_run(list(published.values()), now_ns)
        return published

    def _settling(self, published: dict[int, int], mode: int) -> dict[int, asyncio.Future[bool]]:
        """What will say whether each block is durable; empty where nothing is to be written."""
        writeback = self._writeback
        if writeback is None or mode == pb.DURABILITY_MODE_NONE:
            return {}
        at_once = mode == pb.DURABILITY_MODE_ALWAYS
        return {
            position: writeback.write_through(row, at_once=at_once)
            for position, row in published.items()
            if at_once or writeback.admits(row)
        }


async def _all(futures: Iterable[asyncio.Future[bool]]) -> None:
    waiting = [future for future in futures if not future.done()]
    if waiting:
        await asyncio.wait(waiting)


def _durability(settled: asyncio.Future[bool]) -> int:
    if not settled.done():
        return pb.DURABILITY_PENDING
    return pb.DURABILITY_DURABLE if settled.result() else pb.DURABILITY_VOLATILE


def _tokens_hash_to_key(session: Session, reservation: Reservation, tokens: bytes) -> bool:
    """Whether the block is the one it claims to be. Blocks without tokens (opaque objects) have nothing to check."""
    if not tokens:
        return True
    fingerprint = session.fingerprint
    if len(tokens) != fingerprint.block_tokens * 4:
        return False
    parent = reservation.parent
    if parent == NO_PARENT:
        parent = session.roots[reservation.group]
    extra = NO_EXTRA if reservation.extra == _NO_EXTRA_FIELD else reservation.extra
    key = chain(
        parent, tokens, engine_block_tokens=fingerprint.engine_block_tokens, extra=extra,
        hash_name=fingerprint.key_hash,
    )  # fmt: skip
    return key == reservation.key
