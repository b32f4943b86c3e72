"""The seal of an index: size and checksum of its database file, which say that it was closed in order.

Owns the bytes of `index/seal` and the reading of an index that nobody has open. Never changes a database.
Invariant: an index is only read here after its seal was found to hold; LMDB does not checksum its pages.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import lmdb
import xxhash

from kvstore_tiers.nvme.slab import Location

VALUE = struct.Struct("<IIQ")  # of a block: slab, slot, generation
PLACE = struct.Struct("<II")  # of a reason: slab, slot
_HASH_CHUNK_BYTES = 1 << 20


def write_seal(path: Path, seal: bytes | None = None) -> None:
    """Vouch for the index in this directory as it is now; or write back a seal of it that is known to hold."""
    if seal is None:
        database = path / "data.mdb"
        seal = json.dumps({"bytes": database.stat().st_size, "xxh3_64": _checksum(database)}).encode()
    temporary = path / "seal.new"
    temporary.write_bytes(seal)
    temporary.replace(path / "seal")


def told_seal(path: Path) -> bytes | None:
    """The bytes of the seal, whatever they say; None when there is none."""
    try:
        return (path / "seal").read_bytes()
    except FileNotFoundError:
        return None


def seal_holds(path: Path, seal: bytes | None = None) -> bool:
    """Whether the index in this directory was closed cleanly and not one bit changed since, by its seal or this one."""
    database = path / "data.mdb"
    try:
        told = json.loads((path / "seal").read_bytes() if seal is None else seal)
        return bool(database.stat().st_size == told["bytes"] and _checksum(database) == told["xxh3_64"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return False


def read_sealed(path: Path) -> dict[bytes, Location] | None:
    """All blocks of a cleanly closed index, read without changing it; None when it has no seal that holds."""
    if not seal_holds(path):
        return None
    with _read_only(path, b"blocks") as transaction:
        return {bytes(key): Location(*VALUE.unpack(raw)) for key, raw in transaction.cursor()}


def read_sealed_reasons(path: Path) -> dict[tuple[int, int], str] | None:
    """Why slots are in quarantine, by (slab, slot), as `read_sealed`."""
    if not seal_holds(path):
        return None
    with _read_only(path, b"quarantine") as transaction:
        return {PLACE.unpack(place): bytes(why).decode() for place, why in transaction.cursor()}


@contextmanager
def _read_only(path: Path, table: bytes) -> Iterator[lmdb.Transaction]:
    length_bytes = (path / "data.mdb").stat().st_size
    with lmdb.open(str(path), map_size=length_bytes, max_dbs=3, readonly=True, lock=False) as environment:
        opened = environment.open_db(table, create=False)
        with environment.begin(db=opened) as transaction:
            yield transaction


def _checksum(path: Path) -> int:
    digest = xxhash.xxh3_64()
    with open(path, "rb", buffering=0) as file:
        while chunk := file.read(_HASH_CHUNK_BYTES):
            digest.update(chunk)
    return digest.intdigest()
