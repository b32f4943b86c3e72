"""Who a caller is, and which secret its keys start from."""

from kvstored.tenants.directory import Tenant, TenantDirectory
from kvstored.tenants.peer import Peer, read_peer

__all__ = ["Peer", "Tenant", "TenantDirectory", "read_peer"]
