"""Sessions: one for each handshake connection, which is a client's identity and the anchor of all it holds.

Owns loan and staging of each client; ends everything a client held when its connection ends. Never does
I/O.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Set
from dataclasses import dataclass, field
from typing import Any

from kvstore_proto.fingerprint import Fingerprint
from kvstored.clients.staging import Staged, Staging
from kvstored.clients.tenants import Peer, Tenant
from kvstored.lifecycle import Cause
from kvstored.store.blocks import ResidencyView


@dataclass(slots=True)
class StagedBlock:
    """What a client says of one block, and where the block is: at `offset` in `staged`; `nbytes` is its slot's size."""

    key: bytes
    parent: bytes
    extra: bytes
    group: int
    payload_bytes: int
    staged: Staged
    offset: int
    nbytes: int


@dataclass(slots=True)
class Session:
    """`tenant_id` is the residency's number for the tenant; `staging` is None for a client that only reads, and for a
    unary call. `loan` is the number under which the client may store from its staging, 0 before it has asked; what was
    asked for under an earlier number is void."""

    session_id: int
    token: bytes
    peer: Peer
    client_name: str
    tenant: Tenant
    tenant_id: int
    fingerprint: Fingerprint
    fingerprint_digest: bytes
    fingerprint_id: int
    roots: dict[int, bytes]  # of each layer group
    staging: Staging | None
    give_back_staging: Callable[[int], None]
    family: Set[int] = frozenset()  # fingerprints that may be meant to be the same
    in_flight: int = 0  # requests that wait for bytes, over all streams
    beginning: int = 0  # requests whose blocks have not all begun to be stored
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)  # held by the first of those
    loan: int = 0
    copying: set[asyncio.Task[Any]] = field(default_factory=set)  # that read the staging memory
    closed: bool = False
    on_close: list[Callable[[], None]] = field(default_factory=list)

    @property
    def account(self) -> str:
        """For whom the engine asks, where it serves several."""
        return self.fingerprint.account

    def why_missing(self, residency: ResidencyView, key: bytes) -> Cause:
        """Why a block that this client asked for is not readable."""
        return residency.why_missing(self.tenant_id, key, self.fingerprint_id, self.family).cause

    def part_with_staging(self) -> None:
        """After the end: give the staging memory back, as soon as nothing copies from it any more."""
        if self.closed and not self.copying and self.staging is not None:
            staging, self.staging = self.staging, None
            staging.forget_fd()
            self.give_back_staging(staging.size_bytes)


class SessionTable:
    """All live sessions by token. Tokens are 16 random bytes; an unknown one tells nothing."""

    def __init__(self, last_session_id: int = 0) -> None:
        self._by_token: dict[bytes, Session] = {}
        self._last_session_id = last_session_id

    def __len__(self) -> int:
        return len(self._by_token)

    def all(self) -> list[Session]:
        return list(self._by_token.values())

    def find(self, token: bytes) -> Session | None:
        return self._by_token.get(token)

    def next_id(self) -> int:
        self._last_session_id += 1
        return self._last_session_id

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
