"""Grants of the arenas that a client may map: its own tenant's read-only, and, if its tenant may put in place, the
arenas for such puts writable. A client on a device may import memory of its tenant there.
"""

from __future__ import annotations

from kvstore_proto.arena import DEVICE_ARENAS
from kvstore_proto.errors import ErrorKind, KVStoreError
from kvstore_proto.v1 import handshake_pb2 as hs
from kvstore_tiers.arena import open_owner, writable_owner
from kvstored.clients.sessions import ClientSession
from kvstored.clients.tenants import Tenant
from kvstored.store.assembly import Store


class ArenaGrants:
    """A component that grants clients access to arenas (shared memory for blocks) of `store`: it decides which arenas a
    client may map, and whether the client may write there."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._host = store.host

    def puts_in_place(self, tenant: Tenant) -> bool:
        return tenant.puts_in_place(self._store.config.put)

    def prepare(self, tenant: Tenant) -> None:
        """Create arenas for `tenant` if it has none, before its first client that stores."""
        owner = writable_owner(tenant.index_name) if self.puts_in_place(tenant) else tenant.index_name
        if all(report.owner != owner for report in self._host.containers()):
            self._host.precreate(owner, self._store.config.host.prefault_ahead_bytes)

    def announce(self, session: ClientSession, welcome: hs.Welcome) -> None:
        """Enter the numbers of all arenas that the tenant of `session` has now into the message `welcome`."""
        tenant = session.tenant
        writable = self._arenas_of(writable_owner(tenant.index_name))
        welcome.arena_ids.extend([*self._arenas_of(tenant.index_name), *writable])
        welcome.put_in_place = session.may_write and self.puts_in_place(tenant)
        if welcome.put_in_place:
            welcome.writable_arena_ids.extend(writable)

    def grant(self, session: ClientSession, request: hs.ArenaRequest) -> tuple[hs.ArenaGrant, int]:
        """Return the grant of the arena that `request` names, and a descriptor of its memory. Raises KVStoreError for
        an arena of another tenant, in the words used for an arena that does not exist.
        """
        number, index_name = request.arena_id, session.tenant.index_name
        exporter = self._store.exporter_of(number, session.device_tiers) if not request.writable else None
        if exporter is not None and exporter.owner(number) == index_name:
            try:
                descriptor, nbytes = exporter.export(number)
            except OSError as error:
                raise KVStoreError(ErrorKind.UNAVAILABLE, str(error)) from None
            return hs.ArenaGrant(arena_id=number, size_bytes=nbytes), descriptor
        owners = {writable_owner(index_name)} if request.writable else {index_name, writable_owner(index_name)}
        if open_owner(self._host.owner(number) or "") not in owners:
            what = "arena" if number < DEVICE_ARENAS else "chunk of device memory"
            raise KVStoreError(ErrorKind.NOT_FOUND, f"this tenant has no {what} {number}")
        if request.writable:
            session.require_writer()
        if request.writable and not self.puts_in_place(session.tenant):
            raise KVStoreError(ErrorKind.FORBIDDEN, f"put.in_place is off for tenant {session.tenant.name}")
        arena = self._host.arena(number)
        grant = hs.ArenaGrant(arena_id=number, size_bytes=arena.nbytes, writable=request.writable)
        return grant, arena.writable_fd() if request.writable else arena.readonly_fd()

    def shut(self, index_name: str) -> None:
        """Put no more blocks into the arenas that clients of the tenant with this `index_name` may have mapped."""
        for owner in (index_name, writable_owner(index_name)):
            self._host.shut(owner)

    def _arenas_of(self, owner: str) -> list[int]:
        return [report.container for report in self._host.containers() if open_owner(report.owner) == owner]
