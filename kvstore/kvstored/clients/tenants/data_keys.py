"""The keys that encrypt what is at rest: one for each tenant's blocks on NVMe, and one for each file of small state.

The module owns STATE/keys. Its keys are random, and encrypted with the master key, which an operator keeps elsewhere.
A key's number is in all that the key encrypts. Destroying a key makes all of that unreadable, wherever copies of the
bytes are; the place of the former file is overwritten. Invariants: a key is on the medium before anything is encrypted
with it; with a wrong master key nothing is changed; a tenant has one key at a time.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from kvstore_proto.replaced_file import remove_leftover
from kvstore_tiers import failpoints
from kvstore_tiers.nvme.data_keys import DataKeys
from kvstore_tiers.nvme.seals import DATA_KEY_BYTES, DataKey
from kvstore_tiers.replaced_file import replace_file
from kvstored.config import ConfigError

KEYS_FILE, STATE_OWNER = "keys", b"state"
_NONCE_BYTES, _NUMBER_BYTES = 12, 8
_CHECK = b"kvstore.v1 master key check\0"


class _Key(NamedTuple):
    """A key with its owner: the digest of a tenant, or `STATE_OWNER`."""

    owner: bytes
    secret: bytes


class DataKeyFile(DataKeys):
    """The keys in `directory`/keys under the key `master`, 32 bytes. `encrypts` says by a tenant's digest whether its
    new blocks are encrypted. Any thread may call it. `are_complete` is False when there was no file, so that keys may
    be lost. `rewrapped` says that the file was under `former`, another master key, until now."""

    def __init__(
        self,
        directory: Path,
        master: bytes,
        encrypts: Callable[[bytes], bool],
        *,
        former: bytes | None = None,
        anew: bool = False,
    ) -> None:
        """Read the keys. With `anew` a file that cannot be used is replaced by one without keys. Raises OSError, and
        ConfigError for another master key or a damaged file."""
        self.path = directory / KEYS_FILE
        self._master, self.encrypts = master, encrypts
        self._changing = threading.Lock()
        self._unsaved: dict[bytes, DataKey] = {}  # of tenants that are being dropped
        remove_leftover(self.path)
        found, self.rewrapped = self._read(former, anew=anew)
        self.are_complete = found is not None or anew
        self._set(found or {})
        if self.rewrapped or (found is None and anew):
            self._save(self._keys)

    def of_tenant(self, digest: bytes) -> DataKey | None:
        """Return the key for new blocks of the tenant with this `digest`, a new one if it has none. Return None for a
        tenant whose blocks are not encrypted. Raises OSError when a new key cannot be saved."""
        if not self.encrypts(digest):
            return None
        return self._unsaved.get(digest) or self._of_tenants.get(digest) or self._made(digest)

    def numbered(self, number: bytes) -> DataKey | None:
        return self._numbered.get(number)

    def destroy(self, digest: bytes) -> bool:
        """Destroy the key of the tenant with this `digest`. Until `begin_anew`, a key that is never saved encrypts what
        is still written for the tenant. Return whether it had a key. Raises OSError when it keeps its key."""
        with self._changing:
            kept = {number: key for number, key in self._keys.items() if key.owner != digest}
            had_one = len(kept) < len(self._keys)
            try:
                if had_one:
                    self._save(kept)
            except OSError:
                with suppress(OSError):
                    self._save(self._keys)  # the file may be without the key already, which stays in use
                raise
            self._unsaved[digest] = DataKey(os.urandom(_NUMBER_BYTES), os.urandom(DATA_KEY_BYTES))
            self._set(kept)
            return had_one

    def begin_anew(self, digest: bytes) -> None:
        """Let the tenant with this `digest`, whose key was destroyed, have a new key. It never waits."""
        self._unsaved.pop(digest, None)

    def state_keys(self) -> dict[bytes, bytes]:
        """Return the keys of small state by number, the newest last."""
        return {number: key.secret for number, key in self._keys.items() if key.owner == STATE_OWNER}

    def new_state_key(self) -> bytes:
        """Make one more key for small state and return its number. Raises OSError."""
        with self._changing:
            return self._add(STATE_OWNER)

    def keep_state_key(self, number: bytes) -> None:
        """Destroy the keys of small state but the one with this `number`. Raises OSError."""
        with self._changing:
            kept = {each: key for each, key in self._keys.items() if key.owner != STATE_OWNER or each == number}
            if len(kept) < len(self._keys):
                self._save(kept)
                self._set(kept)

    def _made(self, digest: bytes) -> DataKey:
        with self._changing:
            unsaved = self._unsaved.get(digest)
            if unsaved is None and digest not in self._of_tenants:
                self._add(digest)
            return unsaved or self._of_tenants[digest]

    def _add(self, owner: bytes) -> bytes:
        number = os.urandom(_NUMBER_BYTES)
        keys = {**self._keys, number: _Key(owner, os.urandom(DATA_KEY_BYTES))}
        self._save(keys)
        self._set(keys)
        return number

    def _set(self, keys: dict[bytes, _Key]) -> None:
        self._keys = keys
        tenants = {number: DataKey(number, key.secret) for number, key in keys.items() if key.owner != STATE_OWNER}
        self._of_tenants = {keys[number].owner: key for number, key in tenants.items()}
        self._numbered = tenants

    # The file

    def _read(self, former: bytes | None, *, anew: bool) -> tuple[dict[bytes, _Key] | None, bool]:
        try:
            raw = self.path.read_bytes()
        except FileNotFoundError:
            return None, False
        try:
            document = json.loads(raw)
            for master in filter(None, (self._master, former)):
                if hmac.compare_digest(str(document["check"]), _check(master)):
                    return _unwrapped(document["keys"], master), master is not self._master
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError, InvalidTag):
            if anew:
                return None, False
            raise ConfigError(
                f"{self.path} is damaged: restore it from a backup, or run `kvstored serve --new-secret` once, which "
                "drops the encrypted blocks"
            ) from None
        if anew:
            return None, False
        raise ConfigError(
            f"encryption.key_file is not the key under which {self.path} was written: restore that one, name it as "
            "encryption.former_key_file, or run `kvstored serve --new-secret` once, which drops the encrypted blocks"
        )

    def _save(self, keys: dict[bytes, _Key]) -> None:
        wrapping = AESGCM(self._master)
        entries = {}
        for number, (owner, secret) in keys.items():
            nonce = os.urandom(_NONCE_BYTES)
            wrapped = nonce + wrapping.encrypt(nonce, secret, number + owner)
            entries[number.hex()] = {"owner": owner.hex(), "wrapped": wrapped.hex()}
        content = json.dumps({"check": _check(self._master), "keys": entries}, indent=1).encode() + b"\n"
        try:
            former = os.open(self.path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            former = -1
        try:
            replace_file(self.path, content)
            failpoints.hit("keys.written")
            if former >= 0:
                os.pwrite(former, bytes(os.fstat(former).st_size), 0)
                os.fdatasync(former)
        finally:
            if former >= 0:
                os.close(former)


def _check(master: bytes) -> str:
    return hmac.new(master, _CHECK, hashlib.sha256).hexdigest()[:32]


def _unwrapped(keys: dict[str, dict[str, str]], master: bytes) -> dict[bytes, _Key]:
    found, wrapping = {}, AESGCM(master)
    for digits, entry in keys.items():
        number, owner, wrapped = bytes.fromhex(digits), bytes.fromhex(entry["owner"]), bytes.fromhex(entry["wrapped"])
        secret = wrapping.decrypt(wrapped[:_NONCE_BYTES], wrapped[_NONCE_BYTES:], number + owner)
        found[number] = _Key(owner, secret)
    return found
