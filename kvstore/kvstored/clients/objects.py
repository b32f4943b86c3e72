"""The catalogue of tenants' objects: which names and versions there are, and which blocks hold each one's manifest.

Parts and manifests are ordinary blocks, under the fingerprint of objects. So quotas, eviction, tiers, encryption and
explanations are theirs, and the catalogue holds entries of some hundred bytes alone. An entry survives a loss of power
before the call that made it is answered. Invariants: a version's number is never given twice while a newer version of
its name is there; no expired version is listed.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Iterable, Iterator
from typing import Protocol

from kvstore_proto.errors import ErrorKind, KVStoreError
from kvstore_proto.identity import chain
from kvstore_proto.manifest import DIGEST_BYTES, OBJECT_NAMES, is_object_name, split_digests
from kvstore_proto.objects import OBJECTS as FINGERPRINT
from kvstore_proto.v1 import kvstore_pb2 as pb
from kvstored.clients.tenants import Tenant
from kvstored.clock import NS_PER_S, Clock

OBJECTS = "objects"  # the database
MOST_VERSIONS = 8192  # of one tenant: each is in the daemon's memory
MOST_MANIFEST_PARTS = 64
PAGE = 256  # entries in one answer
_VERSION = struct.Struct(">Q")  # the end of an entry's key
_END = b"\0"  # of the tenant's and of the object's name, in a key


class Saved(Protocol):
    """Entries of the small state, by database, which outlive the daemon: `read` reads them, unless that was done, and
    `save` and `remove` make a change survive a loss of power, `remove` of all keys or none. They raise OSError or
    KVStoreError."""

    entries: dict[str, dict[bytes, bytes]]

    async def read(self) -> None: ...

    async def save(self, name: str, key: bytes, value: bytes | None) -> None: ...

    async def remove(self, name: str, keys: Iterable[bytes]) -> None: ...


class ObjectCatalogue:
    """The names and versions of each tenant's objects. `orders` keeps them over a restart."""

    def __init__(self, orders: Saved, clock: Clock) -> None:
        self._orders, self._clock, self._turn = orders, clock, asyncio.Lock()

    async def answer(self, tenant: Tenant, request: pb.Catalogue) -> pb.CatalogueReply:
        """Carry out `request` for `tenant`. Raises KVStoreError, having changed nothing."""
        try:
            await self._orders.read()
        except OSError as error:
            why = error.strerror or error
            raise KVStoreError(ErrorKind.UNAVAILABLE, f"the catalogue of objects cannot be read: {why}") from None
        if request.action == pb.Catalogue.ACTION_LIST:
            return self._list(tenant, request)
        if not is_object_name(request.name):
            raise KVStoreError(
                ErrorKind.INVALID,
                f"an object's name has {OBJECT_NAMES}",
            )
        async with self._turn:
            if request.action == pb.Catalogue.ACTION_PUT:
                changed = [await self._put(tenant, request.name, request.object)]
            elif request.action == pb.Catalogue.ACTION_KEEP:
                changed = [await self._keep(tenant, request)]
            else:
                changed = await self._remove(tenant, request.name, request.version)
        return pb.CatalogueReply(objects=changed)

    def _list(self, tenant: Tenant, request: pb.Catalogue) -> pb.CatalogueReply:
        after = _key(tenant, request.after_name, request.after_version) if request.after_name else b""
        reply = pb.CatalogueReply()
        for key, entry in self._versions(tenant, request.name):
            if key <= after or (request.version and entry.version != request.version):
                continue
            if len(reply.objects) == PAGE:
                reply.more = True
                break
            reply.objects.append(entry)
        return reply

    def _versions(self, tenant: Tenant, name: str = "") -> Iterator[tuple[bytes, pb.ObjectVersion]]:
        """Yield key and entry of each version of `name`, or of every name of `tenant`, that has not expired, in
        order."""
        first = _key(tenant, name)[: -_VERSION.size] if name else of_tenant(tenant.index_name)
        now_s = self._clock.wall_ns() // NS_PER_S
        entries = self._orders.entries[OBJECTS]
        for key in sorted(key for key in entries if key.startswith(first)):
            entry = pb.ObjectVersion.FromString(entries[key])
            if not 0 < entry.expires_s <= now_s:
                yield key, entry

    async def _put(self, tenant: Tenant, name: str, entry: pb.ObjectVersion) -> pb.ObjectVersion:
        """Make `entry` the newest version of `name`, and return it. If the newest version has the same digest, that one
        gets the longer terms of the two."""
        _check(entry)
        versions = [version for _, version in self._versions(tenant, name)]
        newest = versions[-1] if versions else None
        if newest is not None and newest.digest == entry.digest:
            newest.manifest_parts, newest.manifest_bytes = entry.manifest_parts, entry.manifest_bytes
            newest.pinned |= entry.pinned
            newest.expires_s = max(newest.expires_s, entry.expires_s) if newest.expires_s and entry.expires_s else 0
            return await self._save(tenant, newest)
        await self._drop_expired(tenant)
        if sum(key.startswith(of_tenant(tenant.index_name)) for key in self._orders.entries[OBJECTS]) >= MOST_VERSIONS:
            raise KVStoreError(
                ErrorKind.TOO_LARGE, f"tenant {tenant.name} has {MOST_VERSIONS} versions of objects: remove some"
            )
        made = pb.ObjectVersion()
        made.CopyFrom(entry)
        made.name, made.version = name, newest.version + 1 if newest is not None else 1
        made.created_s = self._clock.wall_ns() // NS_PER_S
        return await self._save(tenant, made)

    async def _keep(self, tenant: Tenant, request: pb.Catalogue) -> pb.ObjectVersion:
        found = [entry for _, entry in self._versions(tenant, request.name)]
        if request.version:
            found = [entry for entry in found if entry.version == request.version]
        if not found:
            raise KVStoreError(ErrorKind.NOT_FOUND, f"no object {request.name!r} of this version is listed")
        found[-1].pinned, found[-1].expires_s = request.object.pinned, request.object.expires_s
        return await self._save(tenant, found[-1])

    async def _remove(self, tenant: Tenant, name: str, version: int) -> list[pb.ObjectVersion]:
        going = {key: entry for key, entry in self._versions(tenant, name) if version in (0, entry.version)}
        if going:
            await self._orders.remove(OBJECTS, going)
        return list(going.values())

    async def _drop_expired(self, tenant: Tenant) -> None:
        listed, first = {key for key, _ in self._versions(tenant)}, of_tenant(tenant.index_name)
        if expired := [key for key in self._orders.entries[OBJECTS] if key.startswith(first) and key not in listed]:
            await self._orders.remove(OBJECTS, expired)

    async def _save(self, tenant: Tenant, entry: pb.ObjectVersion) -> pb.ObjectVersion:
        key, value = _key(tenant, entry.name, entry.version), entry.SerializeToString()
        await self._orders.save(OBJECTS, key, value)
        self._orders.entries[OBJECTS][key] = value
        return entry


def _check(entry: pb.ObjectVersion) -> None:
    """Check an entry that a client made. Raises KVStoreError."""
    parts, rest = divmod(len(entry.manifest_parts), DIGEST_BYTES)
    if len(entry.digest) != DIGEST_BYTES or rest or not 1 <= parts <= MOST_MANIFEST_PARTS or not entry.manifest_bytes:
        raise KVStoreError(
            ErrorKind.INVALID,
            f"an object has a digest of {DIGEST_BYTES} bytes, and 1 to {MOST_MANIFEST_PARTS} blocks of its manifest",
        )
    if len(entry.kind) > 32 or not entry.kind.isprintable():
        raise KVStoreError(ErrorKind.INVALID, "an object's kind has at most 32 printable characters")


def manifest_keys(tenant: Tenant, entry: pb.ObjectVersion) -> bytes:
    """Return the packed keys of the blocks that hold the manifest of `entry`."""
    (root,), tokens = tenant.roots(FINGERPRINT), split_digests(entry.manifest_parts)
    step, hash_name = FINGERPRINT.engine_block_tokens, FINGERPRINT.key_hash
    return b"".join(chain(root, each, engine_block_tokens=step, hash_name=hash_name) for each in tokens)


def of_tenant(index_name: str) -> bytes:
    """Return the beginning of the keys of a tenant's entries, by the tenant's name in the block index."""
    return index_name.encode() + _END


def _key(tenant: Tenant, name: str, version: int = 0) -> bytes:
    return of_tenant(tenant.index_name) + name.encode() + _END + _VERSION.pack(version)
