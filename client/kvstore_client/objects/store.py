"""The tenant's objects: put, list, map, pin, verify, prefetch and remove them.

An object's version is its manifest's digest, which the catalogue has; its parts are blocks. A put stores the parts,
then the manifest, and names them last, so a version that is listed was whole when it was put. What the daemon evicted
since is a miss, and a put of the same content brings it back. A thread renews the leases of live mappings.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from kvstore_client.arguments import positive_seconds, shown
from kvstore_client.entry import connect
from kvstore_client.errors import DaemonUnavailable, invalid, no_answer
from kvstore_client.lease import Lease
from kvstore_client.objects.filling import Filled, Filling, Progress, largest_part, pin_parts, put_terms
from kvstore_client.objects.mapped import MappedObject
from kvstore_client.objects.mapping import ObjectMapping, lease_whole
from kvstore_client.objects.sources import BytesSource, Source
from kvstore_client.requests import catalogue
from kvstore_client.results import REASON_NO_DAEMON, Lookup
from kvstore_client.session import Session
from kvstore_proto.errors import ErrorKind, KVStoreError
from kvstore_proto.identity import BlockKeys
from kvstore_proto.manifest import (
    OBJECT_NAMES,
    PART_CLASSES,
    PIN_OWNER,
    Manifest,
    is_object_name,
    manifest_digest,
    parse_manifest,
    part_digest,
    part_tokens,
    split_digests,
)
from kvstore_proto.objects import OBJECTS
from kvstore_proto.v1 import kvstore_pb2 as wire

STAGING_BYTES = 72 << 20  # four parts
DEADLINE_S = 60.0
RETRY_S = 0.02
RENEW_LEAST_S, RENEW_MOST_S = 0.05, 5.0
VERSION_DIGITS = 18  # of a number of 64 bits


class PutObject(NamedTuple):
    """The outcome of a put: the version in the catalogue, and what was stored for it."""

    version: wire.ObjectVersion
    filled: Filled


class Removed(NamedTuple):
    """The outcome of a removal: the versions, and how many of their parts are mapped still."""

    versions: list[wire.ObjectVersion]
    mapped_parts: int


class ObjectStore:
    """The objects of the tenant of `session`, which was opened with the fingerprint `OBJECTS`. A name may end in "@"
    and the number of a version; without, it means the newest. Methods raise KVStoreError: NOT_FOUND for a name that is
    not listed, and UNAVAILABLE when the daemon does not answer, or not all of an object is stored.
    """

    def __init__(self, session: Session, *, deadline_s: float = DEADLINE_S) -> None:
        self.session, self._deadline_s = session, positive_seconds("deadline_s", deadline_s)
        self._mappings: list[ObjectMapping] = []
        self._lock = threading.Lock()
        self._keeper: threading.Thread | None = None
        self._is_closing = False

    # Catalogue

    def listed(self, name: str = "") -> list[wire.ObjectVersion]:
        """Return the versions of `name`, or of all objects, by name, the oldest first."""
        return [*self.catalogue(name).objects]

    def catalogue(self, name: str = "") -> wire.CatalogueReply:
        """Return the versions of `name`, or of all objects, and the bytes of removed blocks that are in use still."""
        name, version = named(name) if name else ("", 0)
        request, whole = wire.Catalogue(name=name, version=version), wire.CatalogueReply(more=True)
        while whole.more:
            whole.MergeFrom(reply := self._ask(request))
            whole.more = reply.more
            if reply.more:
                request.after_name, request.after_version = whole.objects[-1].name, whole.objects[-1].version
        return whole

    def find(self, name: str) -> wire.ObjectVersion:
        """Return the version that `name` means. Raises KVStoreError(NOT_FOUND)."""
        found = self.listed(name)
        if not found:
            raise KVStoreError(ErrorKind.NOT_FOUND, f"{name}: no object of this name is listed")
        return found[-1]

    def manifest(self, entry: wire.ObjectVersion) -> Manifest:
        """Return the manifest of the version `entry`."""
        with self._leased(entry, split_digests(entry.manifest_parts), self._deadline_s) as lease:
            packed = b"".join(lease.payload(block).tobytes() for block in range(len(lease)))[: entry.manifest_bytes]
            manifest = parse_manifest(packed, entry.digest) if lease.valid else None
        if manifest is None:
            raise KVStoreError(ErrorKind.UNAVAILABLE, f"{label(entry)}: its manifest is damaged: put it again")
        return manifest

    def _ask(self, request: wire.Catalogue) -> wire.CatalogueReply:
        daemon = self.session.daemon
        try:
            reply = REASON_NO_DAEMON if daemon is None else catalogue(daemon, request, self._deadline_s)
        except KVStoreError as error:
            if error.kind is not ErrorKind.INVALID or request.action != wire.Catalogue.ACTION_LIST:
                raise
            said = "this daemon is older than objects: install the release that this client has, and restart it"
            raise DaemonUnavailable(said, is_refused=True) from None
        if isinstance(reply, str):
            raise no_answer(reply)
        return reply

    # Put

    def put(
        self,
        name: str,
        source: Source,
        *,
        pin: bool = False,
        ttl: float | None = None,
        durability: str = "always",
        part_bytes: int = 0,
        progress: Progress = lambda done, total: None,
    ) -> PutObject:
        """Store the content of `source` as the newest version of `name`; if the newest has that very content, it stays.
        Parts that are stored already are not written. With `pin` no part is evicted; it expires after `ttl` seconds,
        or never. `durability` is a put's. `part_bytes` is a size of `PART_CLASSES`, by default the largest that can be
        put. Raises KVStoreError, having named and pinned nothing, if the parts cannot be stored, or do not stay.
        """
        if named(name)[1]:
            raise invalid(f"{name}: a put makes a version of its own: leave @ out")
        self.listed(name)  # a daemon without a catalogue says so before anything is stored
        part_bytes = part_bytes or largest_part(self.session)
        if part_bytes not in PART_CLASSES:
            raise invalid(f"part_bytes must be one of {', '.join(map(str, PART_CLASSES))}")
        filling = Filling(self.session, part_bytes, durability, put_terms(pin, ttl), self._deadline_s)
        try:
            return self._put(name, source, filling, progress)
        except DaemonUnavailable:
            raise
        except BaseException:
            filling.let_go()
            raise

    def _put(self, name: str, source: Source, filling: Filling, progress: Progress) -> PutObject:
        filled = filling.fill(source, progress)
        parts, ttl = filled.parts, filling.terms["ttl"]
        manifest = Manifest(source.kind, source.nbytes, filling.part_bytes, parts, source.tensors, source.metadata)
        packed = BytesSource(content := manifest.pack())
        described = filling.fill(packed)
        entry = wire.ObjectVersion(
            digest=manifest_digest(content), manifest_parts=b"".join(described.parts), manifest_bytes=len(content),
            kind=source.kind, nbytes=source.nbytes, parts=len(parts), pinned=bool(filling.terms.get("pin")),
            expires_s=int(time.time() + ttl) if ttl else 0,
        )  # fmt: skip
        keys = self._keys([*parts, *described.parts])
        filling.make_whole(name, keys, (source, packed), progress)
        reply = self._ask(wire.Catalogue(action=wire.Catalogue.ACTION_PUT, name=name, object=entry))
        if not ttl:
            self.session.touch(keys=keys, ttl=0)  # a remove may have ended what was mapped
        filling.make_whole(name, keys, (source, packed), progress)
        if entry.pinned:
            filling.pin(label(reply.objects[0]), keys, packed)
        return PutObject(reply.objects[0], filled._replace(durable_parts=filling.durable(keys[: len(parts)])))

    # Read

    def map(self, name: str | wire.ObjectVersion, *, deadline_s: float | None = None) -> MappedObject:
        """Bring the whole object to DRAM, and return it mapped. No part is evicted while an array over it is in use."""
        entry = name if isinstance(name, wire.ObjectVersion) else self.find(name)
        deadline_s = self._deadline_s if deadline_s is None else deadline_s
        manifest = self.manifest(entry)

        def lease_again() -> Lease | None:
            try:
                return self._leased(entry, manifest.parts, deadline_s)
            except KVStoreError:
                return None

        lease = self._leased(entry, manifest.parts, deadline_s)
        try:
            mapping = ObjectMapping(lease, manifest.nbytes, lease_again)
        except BaseException:
            lease.release()
            raise
        content = mapping.show()
        with self._lock:
            self._mappings.append(mapping)
            if self._keeper is None:
                self._keeper = threading.Thread(target=self._keep, name="kvstore-objects", daemon=True)
                self._keeper.start()
        return MappedObject(entry, manifest, mapping, content)

    def _leased(self, entry: wire.ObjectVersion, digests: Sequence[bytes], deadline_s: float) -> Lease:
        return lease_whole(self.session, self._keys(digests), label(entry), deadline_s)

    def _keys(self, digests: Sequence[bytes]) -> BlockKeys:
        keys = [self.session.keys(part_tokens(digest)) for digest in digests]
        if any(key is None for key in keys):
            raise no_answer(REASON_NO_DAEMON)
        return BlockKeys(b"".join(key.packed for key in keys if key is not None))

    def located(self, entry: wire.ObjectVersion) -> tuple[BlockKeys, Lookup]:
        """Return the keys of the parts of the version `entry`, and in which tiers they are."""
        keys = self._keys(self.manifest(entry).parts)
        return keys, self.session.lookup(keys=keys, deadline_s=self._deadline_s)

    def prefetch(self, name: str, *, wait_s: float = 0.0) -> Lookup:
        """Bring the object's parts to DRAM, and wait up to `wait_s` seconds for them. Return where the parts are."""
        keys, until = self._keys(self.manifest(self.find(name)).parts), time.monotonic() + wait_s
        while True:
            self.session.prefetch(keys=keys)
            found = self.session.lookup(keys=keys, deadline_s=self._deadline_s)
            if time.monotonic() >= until or all(tier == "host" for tier in found.tiers):
                return found
            time.sleep(RETRY_S)

    def verify(self, name: str, progress: Progress = lambda done, total: None) -> dict[int, str]:
        """Read every part and compare it with its digest. Return what is wrong, by the part's number."""
        manifest, wrong, done = self.manifest(self.find(name)), dict[int, str](), 0
        for number, digest in enumerate(manifest.parts):
            with self.session.get(keys=self._keys([digest]), deadline_s=self._deadline_s) as lease:
                if not len(lease):
                    wrong[number] = lease.reason or "not stored"
                elif part_digest(lease.payload(0)) != digest and lease.valid:
                    wrong[number] = "its bytes are not those that were put"
            done += manifest.payload_bytes(number)
            progress(min(done, manifest.nbytes), manifest.nbytes)
        return wrong

    # Keep and remove

    def pin(self, name: str) -> wire.ObjectVersion:
        """Keep the object's parts from eviction. Raises KVStoreError if some are not stored, or are too many bytes."""
        entry = self.find(name)
        keys = self._keys([*self.manifest(entry).parts, *split_digests(entry.manifest_parts)])
        changed = self._change(entry, pinned=True)
        try:
            pin_parts(self.session, label(entry), keys)
        except KVStoreError:
            self._change(entry, pinned=entry.pinned)
            raise
        return changed

    def unpin(self, name: str) -> wire.ObjectVersion:
        """End the pin of an object; parts that another pinned object has too stay pinned."""
        entry = self.find(name)
        changed = self._change(entry, pinned=False)
        self._unpin([*split_digests(entry.manifest_parts), *self.manifest(entry).parts])
        return changed

    def _unpin(self, digests: Iterable[bytes]) -> None:
        """End the pins of the parts `digests` that no object has which is listed as pinned."""
        shared = {part for each in self.listed() if each.pinned for part in self._parts_or_none(each)}
        for digest in set(digests) - shared:
            self.session.touch(keys=self._keys([digest]), unpin=PIN_OWNER)

    def expire(self, name: str, ttl: float) -> wire.ObjectVersion:
        """Let the object expire in `ttl` seconds, or never for 0; parts that others have too are kept as they are."""
        entry = self.find(name)
        for digest in self._only_of([entry], [each for each in self.listed() if each.digest != entry.digest]):
            self.session.touch(keys=self._keys([digest]), ttl=ttl)
        return self._change(entry, expires_s=int(time.time() + ttl) if ttl else 0)

    def remove(self, name: str) -> list[wire.ObjectVersion]:
        """Remove the versions that `name` means, and return them, as `take_away` does."""
        return self.take_away(name).versions

    def take_away(self, name: str) -> Removed:
        """Remove the versions that `name` means (all, without @), and the parts that no other object has. Memory of
        mapped parts counts as the tenant's until they are not mapped any more."""
        bare, version = named(name)
        going = self.listed(name)
        if not going:
            raise KVStoreError(ErrorKind.NOT_FOUND, f"{name}: no object of this name is listed")
        manifests = {each.digest: self._parts_or_none(each) for each in going}
        request = wire.Catalogue(action=wire.Catalogue.ACTION_REMOVE, name=bare, version=version)
        removed = list(self._ask(request).objects)
        left, mapped = self.listed(), 0
        for digest in self._only_of([each for each in removed if each.digest in manifests], left, manifests):
            keys = self._keys([digest])
            self.session.touch(keys=keys, unpin=PIN_OWNER)  # what is pinned cannot be deleted
            if self.session.delete(keys=keys, deadline_s=self._deadline_s).leased:
                mapped += 1
                self.session.touch(keys=keys, ttl=1)  # readers keep the memory
        return Removed(removed, mapped)

    def _only_of(
        self,
        entries: Sequence[wire.ObjectVersion],
        others: Sequence[wire.ObjectVersion],
        known: dict[bytes, tuple[bytes, ...]] | None = None,
    ) -> list[bytes]:
        """Return the digests of the parts of `entries`, and of their manifests, that none of `others` has. `known` has
        parts by the digest of a manifest."""
        shared: set[bytes] = set()
        for each in others:
            shared.update(self._parts_or_none(each))
        found = [part for each in entries for part in (known or {}).get(each.digest) or self._parts_or_none(each)]
        return [part for part in dict.fromkeys(found) if part not in shared]

    def _parts_or_none(self, entry: wire.ObjectVersion) -> tuple[bytes, ...]:
        """Return the digests of an object's parts and of its manifest's; of a lost manifest, its own alone."""
        own = split_digests(entry.manifest_parts)
        try:
            return own + self.manifest(entry).parts
        except KVStoreError:
            return own

    def _change(self, entry: wire.ObjectVersion, **fields: Any) -> wire.ObjectVersion:
        asked = wire.ObjectVersion(pinned=entry.pinned, expires_s=entry.expires_s)
        for name, value in fields.items():
            setattr(asked, name, value)
        request = wire.Catalogue(
            action=wire.Catalogue.ACTION_KEEP, name=entry.name, version=entry.version, object=asked
        )
        return self._ask(request).objects[0]

    # The life of mappings

    def _keep(self) -> None:
        """Renew the leases of live mappings until the store is closed and none is left."""
        while True:
            with self._lock:
                self._mappings = live = [each for each in self._mappings if each.is_live]
                if not live:
                    self._keeper = None
                    if self._is_closing:
                        self.session.close()
                    return
            for mapping in live:
                mapping.keep()
            soonest_s = min((each.usable_s for each in live), default=RENEW_MOST_S)
            time.sleep(min(max(soonest_s / 4, RENEW_LEAST_S), RENEW_MOST_S))

    def close(self) -> None:
        """Close the session, once no array over a mapped object is in use."""
        with self._lock:
            self._is_closing = True
            if self._keeper is not None:
                return
        self.session.close()

    def __enter__(self) -> ObjectStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_objects(
    socket: str | os.PathLike[str] | None = None,
    *,
    pool: str = "",
    staging_bytes: int = 0,
    deadline_s: float = DEADLINE_S,
    connect_timeout_s: float = 5.0,
) -> ObjectStore:
    """Connect to the daemon whose sockets are in the directory `socket`, and return the objects of this user's tenant,
    or of the shared pool `pool`. To put, ask for `staging_bytes`, such as `STAGING_BYTES`. Raises DaemonUnavailable.
    """
    session = connect(
        socket, fingerprint=OBJECTS, client_name="objects", required=True, staging_bytes=staging_bytes, pool=pool,
        connect_timeout_s=connect_timeout_s, deadline_s=deadline_s,
    )  # fmt: skip
    return ObjectStore(session, deadline_s=deadline_s)


def named(name: str) -> tuple[str, int]:
    """Return the name and the version in `name`, as in "llama@3"; the version is 0 if there is none. Raises
    KVStoreError(INVALID).
    """
    bare, at, version = name.partition("@")
    if not is_object_name(bare):
        raise invalid(f"{shown(bare)} names no object: a name has {OBJECT_NAMES}")
    if at and not (version.isdecimal() and len(version) <= VERSION_DIGITS and int(version)):
        raise invalid(f"{shown(name)}: behind @ stands the number of a version, from 1 on")
    return bare, int(version or 0)


def label(entry: wire.ObjectVersion) -> str:
    """Return the name and the version of `entry` as one word."""
    return f"{entry.name}@{entry.version}"
