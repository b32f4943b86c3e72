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

INDEX_FORMAT_VERSION = 1
_VERSION_KEY = b"format_version"


def refuse_newer(path: Path) -> None:
    """Look at the version beside the database, and write it where there is none. Raises FormatUnsupported."""
    version_path = path / "version"
    found = version_path.read_text(errors="replace").strip("\0 \n") if version_path.exists() else ""
    if not found:  # none, or one whose bytes a power loss took: nothing newer vouches for itself
        write_durably(version_path, f"{INDEX_FORMAT_VERSION}\n")
    elif found != str(INDEX_FORMAT_VERSION):
        raise FormatUnsupported(str(path), found, INDEX_FORMAT_VERSION)


def open_database(path: Path, budget_bytes: int) -> tuple[lmdb.Environment, Any, Any, Any]:
    """The environment, with its tables of blocks, of quarantined slots and of what else there is to say.

    Raises FormatUnsupported, lmdb.Error.
    """
    environment = lmdb.open(
        str(path),
        map_size=budget_bytes,
        max_dbs=3,
        mode=0o600,
        readahead=False,
        meminit=False,
    )
    blocks, quarantine, meta = (environment.open_db(name) for name in (b"blocks", b"quarantine", b"meta"))
    with environment.begin(write=True, db=meta) as transaction:
        version = bytes(transaction.get(_VERSION_KEY) or b"").decode(errors="replace")
        if not version:
            transaction.put(_VERSION_KEY, str(INDEX_FORMAT_VERSION).encode())
    if version not in ("", str(INDEX_FORMAT_VERSION)):
        environment.close()
        raise FormatUnsupported(str(path), version, INDEX_FORMAT_VERSION)
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
