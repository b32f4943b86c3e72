"""The tenant of a caller, and the secret that its keys start from."""

from kvstored.clients.tenants.directory import Tenant, TenantDirectory
from kvstored.clients.tenants.peer import Peer, ourselves, read_peer

__all__ = ["Peer", "Tenant", "TenantDirectory", "ourselves", "read_peer"]
