"""Seals of the entries of small state: a checksum, or with a key AES-256-GCM under it.

Entries of the database `about` have checksums always: it says with which key the others are encrypted. An encrypted
entry has a nonce before it and a tag behind it; database and key of the entry are authenticated. Where the key of an
entry names a block, its last 16 bytes are encrypted alone, by AES; so an entry is found by its key, and not read.
"""

from __future__ import annotations

import hashlib
import os
from typing import Protocol

import xxhash

from kvstored.state.databases import BY_NAME

CHECK_BYTES, NONCE_BYTES, NAME_BYTES = 8, 12, 16


class Seals(Protocol):
    """The form of entries in the file, of the database `database`."""

    def name(self, database: str, key: bytes) -> bytes:
        """Return the key under which the entry `key` is in the file."""

    def named(self, database: str, name: bytes) -> bytes:
        """Return the key of the entry that is in the file under `name`."""

    def sealed(self, database: str, key: bytes, value: bytes) -> bytes:
        """Return the form of `value` in the file."""

    def unsealed(self, database: str, key: bytes, stored: bytes) -> bytes | None:
        """Return the value in `stored`; None when it is damaged, or not of this entry."""


class Checksums(Seals):
    """Seals by checksum. A database that checks itself has none."""

    def name(self, database: str, key: bytes) -> bytes:
        return key

    def named(self, database: str, name: bytes) -> bytes:
        return name

    def sealed(self, database: str, key: bytes, value: bytes) -> bytes:
        return value if BY_NAME[database].checks_itself else value + _check(database, key, value)

    def unsealed(self, database: str, key: bytes, stored: bytes) -> bytes | None:
        if BY_NAME[database].checks_itself:
            return stored
        value, check = stored[:-CHECK_BYTES], stored[-CHECK_BYTES:]
        return value if check == _check(database, key, value) else None


class Encryption(Seals):
    """Seals by encryption with `secret`, 32 bytes."""

    def __init__(self, secret: bytes) -> None:
        from cryptography.exceptions import InvalidTag
        from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        derived = hashlib.blake2b(b"names", key=secret, digest_size=32, person=b"kvstore state").digest()
        self._names, self._values = Cipher(algorithms.AES(derived), modes.ECB()), AESGCM(secret)
        self._broken = InvalidTag

    def name(self, database: str, key: bytes) -> bytes:
        names_block = BY_NAME[database].names_blocks and len(key) > NAME_BYTES
        return key[:-NAME_BYTES] + self._names.encryptor().update(key[-NAME_BYTES:]) if names_block else key

    def named(self, database: str, name: bytes) -> bytes:
        names_block = BY_NAME[database].names_blocks and len(name) > NAME_BYTES
        return name[:-NAME_BYTES] + self._names.decryptor().update(name[-NAME_BYTES:]) if names_block else name

    def sealed(self, database: str, key: bytes, value: bytes) -> bytes:
        nonce = os.urandom(NONCE_BYTES)
        return nonce + self._values.encrypt(nonce, value, _place(database, key))

    def unsealed(self, database: str, key: bytes, stored: bytes) -> bytes | None:
        try:
            return self._values.decrypt(stored[:NONCE_BYTES], stored[NONCE_BYTES:], _place(database, key))
        except (self._broken, ValueError):  # a nonce that is cut
            return None


CHECKSUMS = Checksums()


def _place(database: str, key: bytes) -> bytes:
    return database.encode() + b"\0" + key


def _check(database: str, key: bytes, value: bytes) -> bytes:
    whole = xxhash.xxh3_64(database.encode())
    for part in (len(key).to_bytes(2, "little"), key, value):
        whole.update(part)
    digest: bytes = whole.digest()
    return digest
