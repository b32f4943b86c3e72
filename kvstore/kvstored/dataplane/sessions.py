"""Sessions: one for each handshake connection, which is a client's identity and the anchor of all it holds.

Owns reservations, loan and staging of each client; ends everything a client held when its connection ends. Never does
I/O.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Set
from dataclasses import dataclass, field
from typing import Any

from kvstore_proto.fingerprint import Fingerprint
from kvstored.dataplane.staging import Staged
from kvstored.lifecycle import Cause
from kvstored.residency import ResidencyView
from kvstored.tenants import Peer, Tenant


@dataclass(slots=True)
class StagedBlock:
    """What a client says of one block, and the slot of its staging memory that the block lies in."""

    key: bytes
    parent: bytes
    extra: bytes
    group: int
    payload_bytes: int
    offset: int
    nbytes: int


@dataclass(slots=True)
class Reservation(StagedBlock):
    """A client's right to commit one block from an extent of its staging memory."""

    reservation_id: int
    expires_ns: int
    committing: bool = False


@dataclass(slots=True)
class Loan:
    """The extent of its staging memory that a client places blocks in by itself, until the session ends. What was
    asked for under an earlier `number` is void."""

    number: int
    offset: int
    nbytes: int


@dataclass(slots=True)
class Session:
    """`tenant_id` is the residency's number for the tenant; `staging` is None for a client that only reads."""

    session_id: int
    token: bytes
    peer: Peer
    client_name: str
    tenant: Tenant
    tenant_id: int
    fingerprint: Fingerprint
    fingerprint_digest: bytes
    fingerprint_id: int
    family: Set[int]  # fingerprints that may be meant to be the same
    roots: dict[int, bytes]  # of each layer group
    staging: Staged | None
    give_back_staging: Callable[[int], None]
    reservations: dict[int, Reservation] = field(default_factory=dict)
    in_flight: int = 0  # requests that wait for bytes, over all streams
    beginning: int = 0  # requests whose blocks have not all begun to be stored
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)  # held by the first of those
    loan: Loan | None = None
    copying: set[asyncio.Task[Any]] = field(default_factory=set)  # that read the loan
    closed: bool = False
    on_close: list[Callable[[], None]] = field(default_factory=list)

    @property
    def account(self) -> str:
        """For whom the engine asks, where it serves several."""
        return self.fingerprint.account

    def why_missing(self, residency: ResidencyView, key: bytes) -> Cause:
        """Why a block that this client asked for is not readable."""
        return residency.why_missing(self.tenant_id, key, self.fingerprint_id, self.family).cause

    def drop_reservation(self, reservation_id: int) -> Reservation | None:
        """Take a reservation back and free its extent; None when there is none."""
        reservation = self.reservations.pop(reservation_id, None)
        if reservation is not None and self.staging is not None:
            self.staging.free(reservation.offset, reservation.nbytes)
            self.part_with_staging()
        return reservation

    def part_with_staging(self) -> None:
        """After the end: give the staging memory back, as soon as nothing copies from it any more."""
        if self.closed and not self.reservations and not self.copying and self.staging is not None:
            staging, self.staging, self.loan = self.staging, None, None
            staging.forget_fd()
            self.give_back_staging(staging.size_bytes)


class SessionTable:
    """All live sessions by token. Tokens are 16 random bytes; an unknown one tells nothing."""

    def __init__(self, last_session_id: int = 0) -> None:
        self._by_token: dict[bytes, Session] = {}
        self._last_session_id = last_session_id
        self._last_reservation_id = 0

    def __len__(self) -> int:
        return len(self._by_token)

    def all(self) -> list[Session]:
        return list(self._by_token.values())

    def find(self, token: bytes) -> Session | None:
        return self._by_token.get(token)

    def next_id(self) -> int:
        self._last_session_id += 1
        return self._last_session_id

    def next_reservation_id(self) -> int:
        self._last_reservation_id += 1
        return self._last_reservation_id

    def add(self, session: Session) -> None:
        self._by_token[session.token] = session

    def close(self, session: Session) -> None:
        """Forget the session and run what was attached to its end. Idempotent."""
        if session.closed:
            return
        session.closed = True
        self._by_token.pop(session.token, None)
        actions, session.on_close = session.on_close, []  # they hold tasks, whose frames hold the session
        for action in actions:
            action()

    @staticmethod
    def new_token() -> bytes:
        return os.urandom(16)
