"""Tenants and fingerprints by name and digest, and the master secret behind all root keys.

Owns STATE_DIR/secret (32 random bytes, mode 0600) and STATE_DIR/names.json. Blocks on disk carry digests only; the
names file turns them back into names after a restart. Never does: decide what a tenant may hold.

Invariant: the secret never changes while a directory of blocks lives. A lost secret makes blocks unreachable, never
wrong.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import os
import re
from dataclasses import dataclass, field
from pathlib import Path

from kvstore_proto.errors import ErrorKind, KVStoreError
from kvstore_proto.fingerprint import Fingerprint, parse_fingerprint
from kvstore_proto.identity import root_key
from kvstored.config import TenantSection
from kvstored.residency import Residency
from kvstored.tenants.peer import Peer

SECRET_BYTES = 32
UNKNOWN_FINGERPRINT = 1 << 40
MAX_NAMED_FINGERPRINTS = 4096  # labels only; a client that makes up more of them still stores and finds its blocks
_UID_TENANT = re.compile(r"uid-(0|[1-9]\d{0,9})\Z")
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Tenant:
    """`digest` (16 bytes) stands in block headers and in the index; `secret` never leaves the daemon."""

    name: str
    digest: bytes
    secret: bytes = field(repr=False)
    limits: TenantSection

    @property
    def index_name(self) -> str:
        """The tenant's name in the residency index and as an owner of arenas: its digest, which outlives labels."""
        return self.digest.hex()

    def roots(self, fingerprint: Fingerprint) -> list[bytes]:
        digest = fingerprint.digest()
        return [root_key(self.secret, digest, group.group_id) for group in fingerprint.groups]


def tenant_digest(name: str) -> bytes:
    return hashlib.blake2b(name.encode(), digest_size=16, person=b"kvstore tenant").digest()


class TenantDirectory:
    """Resolves callers to tenants; remembers the names behind digests."""

    def __init__(self, state_dir: Path, listed: tuple[TenantSection, ...], default: str) -> None:
        self._names_path = state_dir / "names.json"
        self._master = _load_or_create_secret(state_dir / "secret")
        self._listed = listed
        self._default = default
        self._tenants: dict[str, Tenant] = {}
        self._fingerprints: dict[bytes, Fingerprint] = {}
        self._fingerprint_numbers: dict[bytes, int] = {}
        self._load_names()
        for section in listed:
            self._tenant(section)
        self._save_names()

    def resolve(self, peer: Peer) -> Tenant | None:
        """The tenant of a caller: listed by uid, else by gid, else the default; None = refused."""
        for section in self._listed:
            if peer.uid in section.uids:
                return self._tenant(section)
        for section in self._listed:
            if peer.gid in section.gids:
                return self._tenant(section)
        if self._default == "refuse":
            return None
        name = f"uid-{peer.uid}"
        known = self._tenants.get(name)
        if known is None:
            known = self._tenant(TenantSection(name, uids=(peer.uid,)))
            self._note_names()
        return known

    def named(self, name: str) -> Tenant | None:
        """The tenant that an operator may hand a token to: a listed one, or, where users are tenants, "uid-N"."""
        for section in self._listed:
            if section.name == name:
                return self._tenant(section)
        if self._default == "refuse" or not _UID_TENANT.match(name):
            return None
        return self._tenant(TenantSection(name, uids=(int(name.removeprefix("uid-")),)))

    def by_digest(self, digest: bytes) -> Tenant | None:
        return next((tenant for tenant in self._tenants.values() if tenant.digest == digest), None)

    def number(self, name: str, residency: Residency) -> int:
        """The residency's number of a tenant by name. Raises KVStoreError when there is no such tenant."""
        tenant = self._tenants.get(name)
        if tenant is None:
            known = ", ".join(sorted(self._tenants)) or "none yet"
            raise KVStoreError(ErrorKind.NOT_FOUND, f"no tenant {name!r}; known: {known}")
        return residency.tenant(tenant.index_name)

    def name_of_index(self, index_name: str) -> str:
        """What people call the tenant that the residency index knows by `index_name`."""
        return self.name_of(bytes.fromhex(index_name))

    def name_of(self, digest: bytes) -> str:
        tenant = self.by_digest(digest)
        return tenant.name if tenant else f"unknown-{digest.hex()[:8]}"

    def all(self) -> list[Tenant]:
        return list(self._tenants.values())

    def remember(self, fingerprint: Fingerprint) -> bytes:
        """Note a fingerprint so that listings can name it; returns its digest."""
        digest = fingerprint.digest()
        if digest not in self._fingerprints and len(self._fingerprints) < MAX_NAMED_FINGERPRINTS:
            self._fingerprints[digest] = fingerprint
            self._note_names()
        return digest

    def fingerprint_number(self, digest: bytes) -> int:
        """A small number for a fingerprint digest, stable while the daemon runs."""
        return self._fingerprint_numbers.setdefault(digest, len(self._fingerprint_numbers))

    def known_number(self, digest: bytes) -> int:
        """The same for one that may never have been noted: a number that no block has, then."""
        return self._fingerprint_numbers.get(digest, UNKNOWN_FINGERPRINT)

    def fingerprint_digest(self, number: int) -> bytes:
        """The inverse of `fingerprint_number`."""
        return next(digest for digest, known in self._fingerprint_numbers.items() if known == number)

    def fingerprint(self, digest: bytes) -> Fingerprint | None:
        return self._fingerprints.get(digest)

    def fingerprint_label(self, digest: bytes) -> str:
        known = self._fingerprints.get(digest)
        return f"{known.model_name}:{digest.hex()[:12]}" if known else digest.hex()[:12]

    def fingerprints(self) -> dict[bytes, Fingerprint]:
        return dict(self._fingerprints)

    def _tenant(self, section: TenantSection) -> Tenant:
        known = self._tenants.get(section.name)
        if known is None or known.limits != section:
            secret = hmac.new(self._master, b"tenant\0" + section.name.encode(), hashlib.sha256).digest()
            known = Tenant(section.name, tenant_digest(section.name), secret, section)
            self._tenants[section.name] = known
        return known

    def _load_names(self) -> None:
        """A lost or damaged names file costs labels, never blocks."""
        try:
            raw = json.loads(self._names_path.read_bytes())
            for name in raw["tenants"]:
                self._tenant(TenantSection(str(name)))
            for text in raw["fingerprints"]:
                fingerprint = parse_fingerprint(str(text).encode())
                self._fingerprints[fingerprint.digest()] = fingerprint
        except (OSError, ValueError, KeyError, TypeError):
            return

    def _note_names(self) -> None:
        """Save, while serving: a full disk costs labels after the next start, not this client's session."""
        try:
            self._save_names()
        except OSError as error:
            log.warning("%s cannot be written: %s", self._names_path, error.strerror)

    def _save_names(self) -> None:
        content = {
            "tenants": sorted(self._tenants),
            "fingerprints": [item.canonical().decode() for item in self._fingerprints.values()],
        }
        _write_private(self._names_path, json.dumps(content, indent=1).encode())


def _load_or_create_secret(path: Path) -> bytes:
    try:
        secret = path.read_bytes()
    except FileNotFoundError:
        secret = os.urandom(SECRET_BYTES)
        _write_private(path, secret)
        return secret
    if len(secret) != SECRET_BYTES:
        raise ValueError(
            f"{path} holds {len(secret)} bytes instead of {SECRET_BYTES}: restore it from a backup, or remove it "
            "to start with a new secret (blocks stored under the old one become unreachable)"
        )
    return secret


def _write_private(path: Path, content: bytes) -> None:
    """Atomic and durable replacement, mode 0600."""
    temporary = path.with_name(path.name + ".new")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        left = memoryview(content)
        while left:  # a disk that fills up takes part of a write before it refuses
            left = left[os.write(descriptor, left) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    os.replace(temporary, path)
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
