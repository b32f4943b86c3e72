"""Reception: the daemon's part at a client's hello, when it asks for a descriptor, and at its end."""

from __future__ import annotations

import logging
import os
from typing import Protocol

from kvstore_proto.errors import ErrorKind, KVStoreError
from kvstore_proto.fingerprint import FingerprintError, parse_fingerprint
from kvstore_proto.v1 import handshake_pb2 as hs
from kvstored.clients.arena_grants import ArenaGrants
from kvstored.clients.lookup_index import LookupIndexes
from kvstored.clients.sessions import ClientSession, ClientSessions, ReturningClients
from kvstored.clients.tenants import Peer
from kvstored.clock import NS_PER_S
from kvstored.store.assembly import Store

log = logging.getLogger(__name__)
PROTOCOL_VERSION = 1
LOGGED_A_MINUTE = 20  # refusals that the log has; all are counted


class Streams(Protocol):
    """A maker of direct streams. A direct stream carries a client's requests over a socket pair."""

    def open(self, session: ClientSession) -> int:
        """Return the client's end of a new stream for `session`, a descriptor to be sent and then closed. Raises
        KVStoreError if no stream can be made.
        """
        ...


class Reception:
    """A component that answers clients on the handshake socket; it refuses a client by a KVStoreError. `former` has the
    leases of clients of an earlier daemon process; it is None if no memory is kept over a restart."""

    def __init__(
        self,
        store: Store,
        sessions: ClientSessions,
        arenas: ArenaGrants,
        indexes: LookupIndexes,
        streams: Streams,
        former: ReturningClients | None = None,
    ) -> None:
        self._store = store
        self._sessions = sessions
        self._arenas = arenas
        self._indexes = indexes
        self._streams = streams
        self._former = former
        self._epoch = os.urandom(16)
        self._warned_of_unmapped = False
        self._logged, self._logged_minute = 0, 0

    def welcome(self, peer: Peer, hello: hs.Hello) -> tuple[ClientSession, hs.Welcome, int | None]:
        """Open a session for the process `peer`, whose hello message is `hello`. Return the session, the answering
        message, and the descriptor of the client's staging memory, which is None for a client that only reads. Raises
        KVStoreError when the client is refused."""
        try:
            session = self._open(peer, hello)
        except KVStoreError as error:
            self._store.counters.add("sessions_refused")
            is_news = (peer.has_no_uid or peer.has_no_gid) and not self._warned_of_unmapped
            self._warned_of_unmapped |= is_news
            if is_news or self._may_tell():
                level = logging.WARNING if is_news else logging.INFO
                log.log(level, "refused pid %d uid %d gid %d: %s", peer.pid, peer.uid, peer.gid, error.message)
            raise
        config, staging, former = self._store.config, session.staging, self._former
        welcome = hs.Welcome(
            protocol_version=PROTOCOL_VERSION,
            session_token=session.token,
            tenant=session.tenant.name,
            roots=list(session.roots.values()),
            staging_bytes=staging.size_bytes if staging is not None else 0,
            lease_ttl_ms=config.limits.lease_ttl_ms,
            daemon_epoch=self._epoch,
            data_socket="" if peer.socket_of else str(config.daemon.socket_dir / "data.sock"),
            max_keys=config.limits.max_keys,
            max_block_bytes=config.limits.max_block_bytes,
            lookup_index=self._indexes.offered,
            direct_stream=True,
            arena_epoch=self._epoch if former is None else former.epoch,
            lease_ids=() if former is None else former.arrived(session, hello.former_token),
        )
        self._arenas.announce(session, welcome)
        self._store.counters.add("sessions_opened")
        log.debug(
            "client %s (pid %d uid %d cgroup %s) is tenant %s",
            session.client_name, peer.pid, peer.uid, peer.cgroup or "-", session.tenant.name,
        )  # fmt: skip
        return session, welcome, staging.fd if staging is not None else None

    def grant(self, session: ClientSession, kind: str, packet: hs.ClientPacket, reply: hs.DaemonPacket) -> int | None:
        """Fill in `reply` to the client's request in `packet`; `kind` is "arena", "lookup_index" or "direct_stream".
        Return the descriptor to send with the reply, which the caller closes, or None if the reply needs none."""
        if kind == "arena":
            arena, descriptor = self._arenas.grant(session, packet.arena)
            reply.arena.CopyFrom(arena)
            return descriptor
        if kind == "lookup_index":
            index, index_fd = self._indexes.grant(session)
            reply.lookup_index.CopyFrom(index)
            return index_fd
        reply.direct_stream.SetInParent()
        return self._streams.open(session)

    def farewell(self, session: ClientSession) -> None:
        """End the session `session`, whose client has closed its connection."""
        log.debug("client %s (pid %d) left", session.client_name, session.peer.pid)
        self._sessions.close(session)

    def shut_out(self, index_name: str) -> None:
        """Let processes that have mapped memory of the tenant with this `index_name`, and may do so no more, see no
        block that is stored from now on."""
        self._arenas.shut(index_name)
        self._indexes.close(self._store.residency.tenant(index_name))

    def _may_tell(self) -> bool:
        """Return whether one more refusal is logged: callers may make any number of them."""
        minute = self._store.clock.monotonic_ns() // (60 * NS_PER_S)
        if minute != self._logged_minute:
            if self._logged > LOGGED_A_MINUTE:
                log.info("%d more clients were refused before", self._logged - LOGGED_A_MINUTE)
            self._logged, self._logged_minute = 0, minute
        self._logged += 1
        return self._logged <= LOGGED_A_MINUTE

    def _open(self, peer: Peer, hello: hs.Hello) -> ClientSession:
        if hello.protocol_version != PROTOCOL_VERSION:
            raise KVStoreError(
                ErrorKind.INVALID,
                f"client speaks protocol {hello.protocol_version}, this daemon {PROTOCOL_VERSION}: "
                "upgrade the older one",
            )
        try:
            fingerprint = parse_fingerprint(hello.fingerprint)
        except FingerprintError as error:
            raise KVStoreError(ErrorKind.INVALID, str(error)) from None
        caller, name = self._sessions.tenant_of(peer), _printable(hello.client_name)
        session = self._sessions.open(caller, fingerprint, peer, name, hello.staging_bytes, hello.pool)
        tenant = session.tenant
        session.exact = not (hello.accepts_lossy and tenant.limits.lossy)
        if hello.device_identity and session.may_write:  # a client can write to device memory that it may import
            session.device_tiers = self._store.tiers_on(hello.device_identity)
        if session.staging is not None:
            self._arenas.prepare(tenant)
        return session


def _printable(name: str) -> str:
    """Return a client's name for itself, made safe for log lines and for the name of a memfd."""
    return "".join(char if " " <= char <= "~" else "?" for char in name[:64]) or "unnamed"
