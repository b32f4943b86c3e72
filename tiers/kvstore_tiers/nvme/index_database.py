"""The index's database as LMDB has it: opened, refused when a newer version wrote it, deleted.

Owns the names in it and its version. Never judges whether it may be opened: LMDB does not checksum its pages, index.py
looks at the seal first.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lmdb

from kvstore_tiers.nvme.directory import write_durably
from kvstore_tiers.nvme.errors import FormatUnsupported
from kvstore_tiers.nvme.version_number import version_number, version_text

INDEX_FORMAT_VERSION = 1
_VERSION_KEY = b"format_version"


def refuse_newer(path: Path) -> bool:
    """Look at the version beside the database, and write it where there is none. False where the file is damaged: then
    it is written anew, and the database is to be made anew. Raises FormatUnsupported."""
    found = version_text(path / "version")
    number = version_number(found)
    if number is not None and number > INDEX_FORMAT_VERSION:
        raise FormatUnsupported(str(path), number, INDEX_FORMAT_VERSION)
    if number != INDEX_FORMAT_VERSION:  # lost, perhaps with its bytes in a power loss: nothing newer vouches for itself
        write_durably(path / "version", f"{INDEX_FORMAT_VERSION}\n")
    return number == INDEX_FORMAT_VERSION or not found


def open_database(path: Path, budget_bytes: int) -> tuple[lmdb.Environment, Any, Any, Any]:
    """The environment, with its tables of blocks, of quarantined slots and of what else there is to say.

    Raises FormatUnsupported, lmdb.Error (also for a version in it that cannot be read).
    """
    environment = lmdb.open(
        str(path),
        map_size=budget_bytes,
        max_dbs=3,
        mode=0o600,
        readahead=False,
        meminit=False,
        sync=False,  # what a crash leaves of it is not used: it has no seal then
    )
    blocks, quarantine, meta = (environment.open_db(name) for name in (b"blocks", b"quarantine", b"meta"))
    with environment.begin(write=True, db=meta) as transaction:
        version = bytes(transaction.get(_VERSION_KEY) or b"")
        if not version:
            transaction.put(_VERSION_KEY, str(INDEX_FORMAT_VERSION).encode())
    number = version_number(version) if version else INDEX_FORMAT_VERSION
    if number != INDEX_FORMAT_VERSION:
        environment.close()
        if number is not None and number > INDEX_FORMAT_VERSION:
            raise FormatUnsupported(str(path), number, INDEX_FORMAT_VERSION)
        raise lmdb.CorruptedError("the version in it cannot be read")
    return environment, blocks, quarantine, meta


def look_of(path: Path) -> tuple[int, int, int]:
    """What tells whether anybody wrote to the database, cut it or replaced it; LMDB itself changes it in commits alone.

    Raises OSError.
    """
    status = (path / "data.mdb").stat()
    return status.st_ino, status.st_size, status.st_mtime_ns


def delete_database(path: Path) -> None:
    for name in ("data.mdb", "lock.mdb"):
        (path / name).unlink(missing_ok=True)
