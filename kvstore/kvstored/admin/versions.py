"""Versions of weights for an operator or a trainer: a list of the namespaces, and the bump of one."""

from __future__ import annotations

from kvstore_proto.errors import ErrorKind, KVStoreError
from kvstore_proto.v1 import admin_pb2 as pb
from kvstored.admin.accounts import count_kinds
from kvstored.admin.views import DaemonParts
from kvstored.clients.weights import WeightVersions


class Versions:
    """A service that lists the namespaces of weights, and makes a new version of one the newest."""

    def __init__(self, parts: DaemonParts, weights: WeightVersions) -> None:
        self._parts, self._weights = parts, weights

    async def versions(self, request: pb.VersionsRequest) -> pb.VersionsReply:
        """Bump the namespace that `request` names, if it names one, and return the namespaces of its tenant, or of all.
        Raises KVStoreError for a tenant that does not exist, and for a version that is not newer."""
        tenants, reply = self._parts.tenants, pb.VersionsReply()
        if request.tenant or request.weights:
            meant = next((tenant for tenant in tenants.all() if tenant.name == request.tenant), None)
            if meant is None:
                known = ", ".join(sorted(tenant.name for tenant in tenants.all())) or "none yet"
                raise KVStoreError(ErrorKind.NOT_FOUND, f"no tenant {request.tenant!r}; known: {known}")
            if request.weights:
                bumped = await self._weights.bump(meant, request.weights, request.version)
                reply.clients, reply.blocks, reply.bytes = bumped.clients, bumped.blocks, bumped.nbytes
        residency = self._parts.store.residency
        blocks, _ = await count_kinds(residency)
        for tenant in tenants.all():
            for weights in self._weights.names(tenant) if request.tenant in ("", tenant.name) else ():
                if request.weights in ("", weights):
                    status = reply.versions.add(tenant=tenant.name, weights=weights)
                    status.version = self._weights.newest(tenant, weights)
        by_name = {(each.tenant, each.weights): each for each in reply.versions}
        for number, kind in enumerate(residency.kinds[: len(blocks)]):
            fingerprint = tenants.fingerprint(tenants.fingerprint_digest(kind.fingerprint_id))
            name = tenants.name_of_index(residency.tenants[kind.tenant].name)
            if fingerprint is not None and (found := by_name.get((name, fingerprint.weights))) is not None:
                is_newest = fingerprint.weights_version == found.version
                found.blocks += int(blocks[number]) if is_newest else 0
                found.older_blocks += 0 if is_newest else int(blocks[number])
        for session in self._parts.sessions.all():
            if (found := by_name.get((session.tenant.name, session.fingerprint.weights))) is not None:
                found.clients += 1
        return reply
