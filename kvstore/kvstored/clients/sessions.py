"""Sessions, one for each handshake connection: a session is a client's identity, and everything it holds depends on it.

The module owns loan and staging of each client, and makes a session from a tenant, a fingerprint and staging memory.
When a connection ends, it ends everything that the client held. It never speaks to a client.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from kvstore_proto.errors import ErrorKind, KVStoreError
from kvstore_proto.fingerprint import Fingerprint
from kvstored.clients.containers import SeenContainers
from kvstored.clients.shares import TenantShares
from kvstored.clients.staging import StagingMemory, StagingPool
from kvstored.clients.tenants import Peer, Tenant, TenantDirectory
from kvstored.clients.tenants.peer import has_exited
from kvstored.clients.weights import WeightVersions
from kvstored.clock import NS_PER_MS
from kvstored.store.assembly import Store
from kvstored.store.operations.client import Client

FULL_RETRY_MS = 250  # for a client that finds no place
LOOK_AGAIN_S = 0.25  # for a client that has left, until the kernel says that its process has exited


@dataclass(slots=True, kw_only=True, eq=False)
class ClientSession(Client):
    """The session of one client, from its handshake to the end of its connection. `staging` is the memory from which it
    puts blocks; it is None for a client that only reads, and for a unary call. `loan` is the number under which the
    client may use its staging at present, 0 before the first; puts under an earlier number are void."""

    token: bytes = field(repr=False)  # who has it is this session's client on data.sock
    peer: Peer
    tenant: Tenant
    staging: StagingMemory | None
    give_back_staging: Callable[[int], None]
    caller_id: int = -1  # the number of the caller's own tenant, under which its work is counted
    in_flight: int = 0  # requests that wait for bytes, over all streams
    loan: int = 0
    is_over_leases: bool = False  # once it was, which is logged
    on_close: list[Callable[[], None]] = field(default_factory=list)

    def put_ended(self) -> None:
        """Note that a put has ended. Release the staging memory if the session has ended, too, and nothing is copied
        from the memory any more."""
        if self.closed and not self.copying and self.staging is not None:
            staging, self.staging = self.staging, None
            staging.forget_fd()
            self.give_back_staging(staging.size_bytes)


class ReturningClients(Protocol):
    """A record of clients of an earlier daemon process whose leases are still valid."""

    keeps_leases: bool

    @property
    def epoch(self) -> bytes:
        """The bytes that identify the numbering of arenas, which stays the same over a warm restart."""
        ...

    def arrived(self, session: ClientSession, token: bytes) -> list[int]:
        """Note that the client of `session` connects. If `token` is a session token that it got from an earlier daemon
        process, return the numbers of its leases that are still valid."""
        ...

    def left(self, session: ClientSession) -> None:
        """Forget the client of `session`, which has left while the daemon was serving."""
        ...


class ClientSessions:
    """The table of the sessions of all connected clients. A session is found by its token, 16 random bytes that only
    its client knows. `weights` says which versions of weights clients may compute with. `former` has the clients of the
    former daemon process that may return; it is None if no memory is kept over a restart. New sessions get numbers
    above `last_id`."""

    def __init__(
        self,
        store: Store,
        tenants: TenantDirectory,
        shares: TenantShares,
        staging_pool: StagingPool,
        weights: WeightVersions,
        former: ReturningClients | None = None,
        last_id: int = 0,
    ) -> None:
        self._store = store
        self._tenants = tenants
        self._shares = shares
        self._staging_pool, self._weights = staging_pool, weights
        self._former = former
        self._last_id = last_id
        self._by_token: dict[bytes, ClientSession] = {}
        self.containers = SeenContainers()

    def __len__(self) -> int:
        return len(self._by_token)

    def all(self) -> list[ClientSession]:
        return list(self._by_token.values())

    def find(self, token: bytes) -> ClientSession | None:
        return self._by_token.get(token)

    def tenant_of(self, peer: Peer) -> Tenant:
        """Return the tenant of the process `peer`. Raises KVStoreError for a user without a tenant."""
        tenant = self._tenants.resolve(peer)
        if tenant is None:
            raise KVStoreError(ErrorKind.FORBIDDEN, self._tenants.why_refused(peer))
        return tenant

    def pool_for(self, caller: Tenant, pool: str) -> tuple[Tenant, bool]:
        """Return the tenant that is the shared pool `pool`, and whether `caller` may put blocks there; for a pool ""
        the caller itself. Raises KVStoreError, in the same words whether the pool exists or not."""
        if not pool:
            return caller, True
        found = self._tenants.pool(pool, caller)
        if found is None:
            raise KVStoreError(ErrorKind.FORBIDDEN, f"tenant {caller.name} has no shared pool of this name")
        return found

    def open(
        self,
        caller: Tenant,
        fingerprint: Fingerprint,
        peer: Peer,
        name: str,
        staging_bytes: int,
        pool: str = "",
    ) -> ClientSession:
        """Return a new session for the client process `peer`, called `name`, of the tenant `caller`, about its own
        blocks or the blocks of `pool`. It gets up to `staging_bytes` of staging memory, less if the budget for all
        clients has less left, and none if it may not put. Raises KVStoreError for a pool that is not the caller's, for
        one client of the tenant too many, and for a client that computes with weights of which there are newer ones."""
        tenant, may_write = self.pool_for(caller, pool)
        caller_id, most = self._store.residency.tenant(caller.index_name), self._store.config.limits.clients_per_tenant
        if sum(session.caller_id == caller_id for session in self._by_token.values()) >= most:
            raise KVStoreError(
                ErrorKind.THROTTLED,
                f"{most} clients of tenant {caller.name} are connected already, limits.clients_per_tenant",
                FULL_RETRY_MS,
            )
        self._weights.admit(tenant, fingerprint, may_write=may_write)
        staging_bytes = staging_bytes if may_write else 0
        staging = self._make_staging(staging_bytes, name)
        session = self._session(tenant, fingerprint, self._tenants.remember(fingerprint), peer, name, staging)
        session.pool, session.may_write, session.caller_id = pool, may_write, caller_id
        self._name(session)
        self._by_token[session.token] = session
        is_meant = peer.socket_of or (peer.control_group and caller.limits.cgroups)
        if not is_meant:  # that containers are one tenant
            self.containers.note(caller.name, peer.uid, peer.cgroup)
        return session

    def open_call(
        self, caller: Tenant, fingerprint: Fingerprint, name: str, *, pool: str = "", exact: bool = True
    ) -> ClientSession:
        """Return a session for one unary call of `caller`, which needs no end, about its own blocks or the blocks of
        `pool`. Its fingerprint is not remembered, so that made-up ones cost nothing: call `note_fingerprint` before
        blocks are stored under it. Raises KVStoreError for a pool that is not the caller's.
        """
        tenant, may_write = self.pool_for(caller, pool)
        self._weights.admit(tenant, fingerprint, may_write=may_write)
        session = self._session(tenant, fingerprint, fingerprint.digest(), Peer(0, -1, -1), name, None)
        session.pool, session.may_write = pool, may_write
        session.caller_id = self._store.residency.tenant(caller.index_name)
        session.exact = exact or not tenant.limits.lossy
        return session

    def note_fingerprint(self, session: ClientSession) -> None:
        """Remember the fingerprint of a session made by `open_call`, and give the session the fingerprint's number.
        Raises KVStoreError if there are newer weights by now."""
        self._weights.admit(session.tenant, session.fingerprint, may_write=session.may_write)
        self._tenants.remember(session.fingerprint)
        self._name(session)

    def renew_tenants(self) -> None:
        """Give open sessions the present settings of their tenants. Who accepted lossy copies gets exact ones from now
        on if the tenant disallows them; the other way round counts from the next connection."""
        for session in self._by_token.values():
            tenant = self._tenants.by_digest(session.tenant.digest)
            if tenant is not None and tenant is not session.tenant:
                session.tenant = tenant
                session.exact = session.exact or not tenant.limits.lossy

    def close(self, session: ClientSession) -> None:
        """End `session`, whose client has gone: run the functions in its `on_close`, and release its staging memory,
        reserved slots and leases. When the daemon stops, leases are kept if its next process shall take them over. A
        second call does nothing."""
        if session.closed:
            return
        session.closed = True
        self._by_token.pop(session.token, None)
        actions, session.on_close = session.on_close, []  # they hold tasks, whose frames hold the session
        for action in actions:
            action()
        clock, limits = self._store.clock, self._store.config.limits
        self._free_reserved(session, clock.monotonic_ns() + limits.lease_ttl_ms * NS_PER_MS)
        if self._former is None or not self._former.keeps_leases:
            self._store.leases.release_session(session.session_id)
            if self._former is not None:
                self._former.left(session)
        session.put_ended()

    def _free_reserved(self, session: ClientSession, done_ns: int) -> None:
        """Free the slots that a client had reserved. Its process may live on with the arenas mapped, with a thread in
        the middle of a write: the slots are freed when it has exited, or at `done_ns`. A process that ends closes
        its sockets before the kernel reports its exit, so this looks again later.
        """
        reservations = self._store.reservations
        if has_exited(session.peer) or self._store.clock.monotonic_ns() >= done_ns:
            reservations.end_session(session.session_id)
        elif reservations.held_bytes(session.session_id):
            asyncio.get_running_loop().call_later(LOOK_AGAIN_S, self._free_reserved, session, done_ns)

    def _session(
        self,
        tenant: Tenant,
        fingerprint: Fingerprint,
        digest: bytes,
        peer: Peer,
        name: str,
        staging: StagingMemory | None,
    ) -> ClientSession:
        tenant_id = self._store.residency.tenant(tenant.index_name)
        self._shares.set(tenant, tenant_id)
        self._last_id += 1
        roots = zip(fingerprint.groups, tenant.roots(fingerprint), strict=True)
        return ClientSession(
            session_id=self._last_id,
            token=os.urandom(16),
            peer=peer,
            client_name=name,
            tenant=tenant,
            tenant_id=tenant_id,
            fingerprint=fingerprint,
            fingerprint_digest=digest,
            fingerprint_id=self._tenants.known_number(digest),
            family=self._tenants.family(fingerprint),
            roots={group.group_id: root for group, root in roots},
            staging=staging,
            give_back_staging=self._staging_pool.give_back,
        )

    def _name(self, session: ClientSession) -> None:
        """Give a session the number of its fingerprint, which is remembered, and the fields that follow from it."""
        session.fingerprint_id = self._tenants.fingerprint_number(session.fingerprint_digest)
        session.family = self._tenants.family(session.fingerprint)
        if any(group.window_blocks(1) for group in session.fingerprint.groups):
            self._store.boundaries.learn_soon()

    def _make_staging(self, wanted_bytes: int, name: str) -> StagingMemory | None:
        granted_bytes = self._staging_pool.take(wanted_bytes)
        if not granted_bytes:
            return None
        try:
            return StagingMemory(granted_bytes, name)
        except OSError as error:
            self._staging_pool.give_back(granted_bytes)
            raise KVStoreError(ErrorKind.UNAVAILABLE, f"no staging memory can be made: {error.strerror}") from None
