"""Opening sessions: of a client that has connected, and of one unary call.

Owns how a tenant, a fingerprint and staging memory become a session. Never speaks to a client.
"""

from __future__ import annotations

from kvstore_proto.errors import ErrorKind, KVStoreError
from kvstore_proto.fingerprint import Fingerprint
from kvstored.clients.sessions import Session, SessionTable
from kvstored.clients.shares import TenantShares
from kvstored.clients.staging import Staging, StagingPool
from kvstored.clients.tenants import Peer, Tenant, TenantDirectory
from kvstored.store.blocks import Residency


class SessionFactory:
    """See the module."""

    def __init__(
        self,
        sessions: SessionTable,
        tenants: TenantDirectory,
        residency: Residency,
        shares: TenantShares,
        staging_pool: StagingPool,
    ) -> None:
        self._sessions = sessions
        self._tenants = tenants
        self._residency = residency
        self._shares = shares
        self._staging_pool = staging_pool

    def tenant_of(self, peer: Peer) -> Tenant:
        """Raises KVStoreError for a user without a tenant."""
        tenant = self._tenants.resolve(peer)
        if tenant is None:
            raise KVStoreError(ErrorKind.FORBIDDEN, self._tenants.why_refused(peer))
        return tenant

    def open(self, tenant: Tenant, fingerprint: Fingerprint, peer: Peer, name: str, staging_bytes: int) -> Session:
        """A session of a client that has connected, with as much staging memory as it wants and may have."""
        session = self._session(tenant, fingerprint, peer, name, self._make_staging(staging_bytes, name))
        self._sessions.add(session)
        return session

    def open_call(self, tenant: Tenant, fingerprint: Fingerprint, name: str) -> Session:
        """A session for one unary call, in no table: nothing follows its end. Its fingerprint is not noted, so that
        asking for made-up ones costs nothing: `note_fingerprint` before blocks are stored under it."""
        return self._session(tenant, fingerprint, Peer(0, -1, -1), name, None, is_noted=False)

    def note_fingerprint(self, session: Session) -> None:
        """Remember the fingerprint of a session that `open_call` made, and give it its number."""
        digest = self._tenants.remember(session.fingerprint)
        session.fingerprint_id = self._tenants.fingerprint_number(digest)
        session.family = self._tenants.family(session.fingerprint)

    def close(self, session: Session) -> None:
        """Forget the session, and run what was attached to its end. Idempotent."""
        self._sessions.close(session)

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
        self._shares.set(tenant, tenant_id)
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
