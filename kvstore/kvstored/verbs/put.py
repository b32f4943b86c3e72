"""Put in two steps: reserve staging, let the client write, commit. What the first release's clients speak.

Owns reservations and their end; what becomes of a committed block is the intake's. Invariants: one commit, one
reservation, once; a reservation is committed, aborted, or lapses. A block that is there already is not reserved, and
stays as durable as it is: durability is asked for with the commit, which does not name it.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence

from kvstore_proto.arena import slot_bytes
from kvstore_proto.errors import ErrorKind, KVStoreError
from kvstore_proto.identity import NO_PARENT
from kvstore_proto.v1 import kvstore_pb2 as pb
from kvstored.clock import NS_PER_MS, Clock
from kvstored.dataplane.sessions import Reservation, Session, SessionTable
from kvstored.residency import Residency
from kvstored.telemetry import Counters
from kvstored.verbs.intake import Intake
from kvstored.verbs.settling import answers
from kvstored.verbs.validate import claimed_blocks


class Put:
    """See the module."""

    def __init__(
        self,
        intake: Intake,
        residency: Residency,
        sessions: SessionTable,
        clock: Clock,
        counters: Counters,
        *,
        max_keys: int,
        max_block_bytes: int,
        reservation_ttl_ms: int,
    ) -> None:
        self._intake = intake
        self._residency = residency
        self._sessions = sessions
        self._clock = clock
        self._counters = counters
        self._max_keys = max_keys
        self._max_block_bytes = max_block_bytes
        self._reservation_ttl_ms = reservation_ttl_ms

    def reserve(self, session: Session, request: pb.Reserve) -> pb.ReserveReply:
        """An extent of staging for each key that is not stored and that nobody else is writing."""
        keys, parents, extras = claimed_blocks(session, request, self._max_keys, self._max_block_bytes)
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
                        key, parent, extra, request.group, request.payload_bytes, offset, nbytes,
                        reservation_id, expires_ns,
                    )  # fmt: skip
                    self._intake.writers[session.tenant_id, key] = session.session_id
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

    def commit(self, session: Session, request: pb.Commit) -> AsyncGenerator[pb.CommitReply, None]:
        """One reply when the blocks are published; a second, final one when pending ones have settled."""
        count = len(request.reservation_ids)
        if count > self._max_keys:
            raise KVStoreError(ErrorKind.TOO_LARGE, f"{count} reservations in one commit, limit {self._max_keys}")
        mode = self._intake.mode(session, request.durability)
        statuses = bytearray([pb.COMMIT_STATUS_FAILED] * count)
        taken: list[tuple[int, Reservation]] = []
        for position, reservation_id in enumerate(request.reservation_ids):
            reservation = session.reservations.get(reservation_id)
            if reservation is None or reservation.committing:
                statuses[position] = pb.COMMIT_STATUS_NO_RESERVATION
            else:
                reservation.committing = True
                taken.append((position, reservation))
        taking = self._intake.take_in(
            session, taken, statuses, mode, lambda _: self._drop_all(session, [block for _, block in taken])
        )
        return answers(taking, statuses, bytearray(count), {}, mode)

    def _drop_all(self, session: Session, reservations: Sequence[Reservation]) -> None:
        for reservation in reservations:
            self._drop(session, reservation.reservation_id)

    def _reservable(self, session: Session, key: bytes, parent: bytes, nbytes: int) -> pb.ReserveStatus.ValueType:
        if key in (parent, NO_PARENT):
            return pb.RESERVE_STATUS_REFUSED
        row = self._residency.find(session.tenant_id, key)
        if row >= 0 and not self._intake.may_come_again(row):
            self._counters.add("present_blocks")
            return pb.RESERVE_STATUS_PRESENT
        if (session.tenant_id, key) in self._intake.writers:
            return pb.RESERVE_STATUS_PENDING
        if session.staging is None or nbytes > session.staging.size_bytes:
            return pb.RESERVE_STATUS_TOO_LARGE
        return pb.RESERVE_STATUS_RESERVED

    def _drop(self, session: Session, reservation_id: int) -> None:
        reservation = session.drop_reservation(reservation_id)
        if reservation is not None:
            self._intake.writers.pop((session.tenant_id, reservation.key), None)
