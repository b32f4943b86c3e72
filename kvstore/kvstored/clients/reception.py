"""Reception: what happens at a client's hello and at its end.

Owns the opening of sessions (tenant, keys' roots, staging) and the giving away of arenas, lookup indexes and streams:
a client gets read-only descriptors of its own tenant's memory and of no other's, and writable ones only of arenas for
puts in place, where its tenant may do that.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from kvstore_proto.errors import ErrorKind, KVStoreError
from kvstore_proto.fingerprint import Fingerprint, FingerprintError, parse_fingerprint
from kvstore_proto.v1 import handshake_pb2 as hs
from kvstore_tiers.arena import writable_owner
from kvstore_tiers.host import HostTier
from kvstored.clients.handshake import PROTOCOL_VERSION
from kvstored.clients.lookup_index import LookupIndexes
from kvstored.clients.sessions import Session, SessionTable
from kvstored.clients.staging import Staging, StagingPool
from kvstored.clients.tenants import Peer, Tenant, TenantDirectory
from kvstored.config import Config
from kvstored.store.blocks import Residency
from kvstored.store.policies import Policy, Share
from kvstored.store.tiering import MAPPED
from kvstored.telemetry import Counters

log = logging.getLogger(__name__)


class Returning(Protocol):
    """Clients of the daemon before this one, whose leases still stand."""

    @property
    def epoch(self) -> bytes:
        """Names the numbering of arenas."""
        ...

    def arrived(self, session: Session, token: bytes) -> list[int]:
        """A client has come; numbers of the leases that it has again, if `token` is one that it had before."""
        ...


class Streams(Protocol):
    """Who opens direct streams."""

    def open(self, session: Session) -> int:
        """The client's end, a descriptor to hand over and close. Raises KVStoreError."""
        ...


class NobodyReturns:
    """Without warm restart nothing of a daemon outlives it."""

    def __init__(self) -> None:
        self._epoch = os.urandom(16)

    @property
    def epoch(self) -> bytes:
        return self._epoch

    def arrived(self, session: Session, token: bytes) -> list[int]:
        return []


class Reception:
    """Implements `Welcomer`. `on_end(session)` releases what the session held elsewhere."""

    def __init__(
        self,
        config: Config,
        sessions: SessionTable,
        tenants: TenantDirectory,
        residency: Residency,
        host: HostTier,
        staging_pool: StagingPool,
        policies: list[Policy],
        indexes: LookupIndexes,
        streams: Streams,
        counters: Counters,
        on_end: Callable[[Session], None],
        *,
        epoch: bytes,
        data_socket: Path,
        returning: Returning | None = None,
    ) -> None:
        self._config = config
        self._sessions = sessions
        self._tenants = tenants
        self._residency = residency
        self._host = host
        self._staging_pool = staging_pool
        self._policies = policies
        self._indexes = indexes
        self._streams = streams
        self._counters = counters
        self._on_end = on_end
        self._epoch = epoch
        self._data_socket = data_socket
        self._returning = NobodyReturns() if returning is None else returning

    def welcome(self, peer: Peer, hello: hs.Hello) -> tuple[Session, hs.Welcome, int | None]:
        try:
            session = self._open(peer, hello)
        except KVStoreError as error:
            self._counters.add("sessions_refused")
            log.info("refused pid %d uid %d: %s", peer.pid, peer.uid, error.message)
            raise
        limits = self._config.limits
        staging = session.staging
        index_name = session.tenant.index_name
        writable_arenas = self._arenas_of(writable_owner(index_name))
        welcome = hs.Welcome(
            protocol_version=PROTOCOL_VERSION,
            session_token=session.token,
            tenant=session.tenant.name,
            roots=list(session.roots.values()),
            staging_bytes=staging.size_bytes if staging is not None else 0,
            lease_ttl_ms=limits.lease_ttl_ms,
            daemon_epoch=self._epoch,
            data_socket=str(self._data_socket),
            max_keys=limits.max_keys,
            max_block_bytes=limits.max_block_bytes,
            arena_ids=[*self._arenas_of(index_name), *writable_arenas],
            lookup_index=self._indexes.offered,
            direct_stream=True,
            arena_epoch=self._returning.epoch,
            lease_ids=self._returning.arrived(session, hello.former_token),
            put_in_place=self._puts_in_place(session.tenant),
            writable_arena_ids=writable_arenas if self._puts_in_place(session.tenant) else [],
        )
        self._counters.add("sessions_opened")
        log.debug(
            "client %s (pid %d uid %d cgroup %s) is tenant %s",
            session.client_name, peer.pid, peer.uid, peer.cgroup or "-", session.tenant.name,
        )  # fmt: skip
        return session, welcome, staging.fd if staging is not None else None

    def _arenas_of(self, owner: str) -> list[int]:
        return [report.container for report in self._host.containers() if report.owner == owner]

    def _puts_in_place(self, tenant: Tenant) -> bool:
        return tenant.puts_in_place(self._config.put)

    def grant_arena(self, session: Session, request: hs.ArenaRequest) -> tuple[hs.ArenaGrant, int]:
        """KVStoreError for an arena that is not this tenant's, in the same words as for one that is not there."""
        number, index_name = request.arena_id, session.tenant.index_name
        owners = {writable_owner(index_name)} if request.writable else {index_name, writable_owner(index_name)}
        if self._host.owner(number) not in owners:
            raise KVStoreError(ErrorKind.NOT_FOUND, f"this tenant has no arena {number}")
        if request.writable and not self._puts_in_place(session.tenant):
            raise KVStoreError(ErrorKind.FORBIDDEN, f"put.in_place is off for tenant {session.tenant.name}")
        grant = hs.ArenaGrant(arena_id=number, size_bytes=self._host.container_bytes(number), writable=request.writable)
        return grant, self._host.writable_fd(number) if request.writable else self._host.readonly_fd(number)

    def grant_lookup_index(self, session: Session) -> tuple[hs.LookupIndexGrant, int | None]:
        return self._indexes.grant(session)

    def grant_stream(self, session: Session) -> int:
        return self._streams.open(session)

    def farewell(self, session: Session) -> None:
        log.debug("client %s (pid %d) left", session.client_name, session.peer.pid)
        self._sessions.close(session)
        self._on_end(session)
        session.put_ended()

    def _open(self, peer: Peer, hello: hs.Hello) -> Session:
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
        tenant = self._tenants.resolve(peer)
        if tenant is None:
            raise KVStoreError(
                ErrorKind.FORBIDDEN, f"uid {peer.uid} belongs to no tenant; list it under [[tenant]] uids"
            )
        name = _printable(hello.client_name)
        staging = self._make_staging(hello.staging_bytes, name)
        owner = writable_owner(tenant.index_name) if self._puts_in_place(tenant) else tenant.index_name
        if staging is not None and not self._arenas_of(owner):
            self._host.precreate(owner, self._config.host.prefault_ahead_bytes)
        session = self._session(tenant, fingerprint, peer, name, staging)
        self._sessions.add(session)
        return session

    def open_call(self, tenant: Tenant, fingerprint: Fingerprint, name: str) -> Session:
        """A session for one unary call, in no table: nobody waits for its end. Its fingerprint is not noted, so that
        asking for made-up ones costs nothing: `note_fingerprint` before blocks are stored under it."""
        return self._session(tenant, fingerprint, Peer(0, -1, -1), name, None, is_noted=False)

    def note_fingerprint(self, session: Session) -> None:
        """Remember the fingerprint of a session that `open_call` made, and give it its number."""
        digest = self._tenants.remember(session.fingerprint)
        session.fingerprint_id = self._tenants.fingerprint_number(digest)
        session.family = self._tenants.family(session.fingerprint)

    def _session(
        self,
        tenant: Tenant,
        fingerprint: Fingerprint,
        peer: Peer,
        name: str,
        staging: Staging | None,
        *,
        is_noted: bool = True,
    ) -> Session:
        tenant_id = self._residency.tenant(tenant.index_name)
        self._set_shares(tenant, tenant_id)
        digest = self._tenants.remember(fingerprint) if is_noted else fingerprint.digest()
        number = self._tenants.fingerprint_number(digest) if is_noted else self._tenants.known_number(digest)
        return Session(
            session_id=self._sessions.next_id(),
            token=self._sessions.new_token(),
            peer=peer,
            client_name=name,
            tenant=tenant,
            tenant_id=tenant_id,
            fingerprint=fingerprint,
            fingerprint_digest=digest,
            fingerprint_id=number,
            family=self._tenants.family(fingerprint),
            roots={
                group.group_id: root for group, root in zip(fingerprint.groups, tenant.roots(fingerprint), strict=True)
            },
            staging=staging,
            give_back_staging=self._staging_pool.give_back,
        )

    def _make_staging(self, wanted_bytes: int, name: str) -> Staging | None:
        granted_bytes = self._staging_pool.take(wanted_bytes)
        if not granted_bytes:
            return None
        try:
            return Staging(granted_bytes, name)
        except OSError as error:
            self._staging_pool.give_back(granted_bytes)
            raise KVStoreError(ErrorKind.UNAVAILABLE, f"no staging memory can be made: {error.strerror}") from None

    def set_shares(self) -> None:
        """Of all that are listed with any, at the start: blocks of before are protected before their tenant comes. And
        after a change of what is listed, of all that have a share."""
        shares = {number for policy in self._policies for number in policy.shares}
        for tenant in self._tenants.all():
            limits = tenant.limits
            is_limited = limits.host_min_bytes or limits.host_max_bytes or limits.nvme_max_bytes
            number = self._residency.tenant(tenant.index_name) if is_limited or shares else -1
            if is_limited or number in shares:
                self._set_shares(tenant, number)

    def _set_shares(self, tenant: Tenant, tenant_id: int) -> None:
        limits = tenant.limits
        shares = {
            MAPPED: Share(limits.host_min_bytes, limits.host_max_bytes or None),
            self._residency.durable: Share(0, limits.nvme_max_bytes or None),
        }
        for policy in self._policies:
            if policy.tier in shares:
                policy.set_share(tenant_id, shares[policy.tier])


def _printable(name: str) -> str:
    """A client's name for itself, fit for log lines and for the name of a memfd."""
    return "".join(char if " " <= char <= "~" else "?" for char in name[:64]) or "unnamed"
