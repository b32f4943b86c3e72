"""Sessions: one for each handshake connection, which is a client's identity and the anchor of all it holds.

Owns loan and staging of each client; ends everything a client held when its connection ends. Never does
I/O.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field

from kvstored.clients.containers import SeenContainers
from kvstored.clients.staging import Staging
from kvstored.clients.tenants import Peer, Tenant
from kvstored.store.operations.client import Client


@dataclass(slots=True, kw_only=True, eq=False)
class Session(Client):
    """`staging` is None for a client that only reads, and for a unary call. `loan` is the number under which the client
    may store from its staging, 0 before it has asked; what was asked for under an earlier number is void."""

    token: bytes = field(repr=False)  # who has it is this session's client on data.sock
    peer: Peer
    tenant: Tenant
    staging: Staging | None
    give_back_staging: Callable[[int], None]
    in_flight: int = 0  # requests that wait for bytes, over all streams
    loan: int = 0
    is_over_leases: bool = False  # once it was, which is logged
    on_close: list[Callable[[], None]] = field(default_factory=list)

    def put_ended(self) -> None:
        """After the end: give the staging memory back, as soon as nothing copies from it any more."""
        if self.closed and not self.copying and self.staging is not None:
            staging, self.staging = self.staging, None
            staging.forget_fd()
            self.give_back_staging(staging.size_bytes)


class SessionTable:
    """All live sessions by token. Tokens are 16 random bytes; an unknown one reveals nothing."""

    def __init__(self, last_session_id: int = 0) -> None:
        self._by_token: dict[bytes, Session] = {}
        self.containers = SeenContainers()
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
        self.containers.note(session.tenant.name, session.peer.uid, session.peer.cgroup)

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
