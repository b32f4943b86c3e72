"""The log of what a process did to the files below one directory, and the marks it left between.

Owns the record format that shim.c writes, and the rules of order. Never judges and never touches the recorded files.

A record: 48 bytes (`_HEADER`, little-endian), the path, the data. `start` and `end` are ticks of one counter that all
recorded processes share, taken before the call began and after it returned, so that
- an effect may reach the medium at any tick after its `start`;
- a sync vouches for what had `end`ed before the sync's `start`, from the sync's `end` on.
Invariants: records of one thread are in order; ticks are unique; a record that a killed process wrote half is skipped.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

MAGIC = 0x53534C50
THROUGH = 1  # a flag: the data was on the medium when the call returned
_HEADER = struct.Struct("<IHHQQQqII")
_MAGIC_BYTES = MAGIC.to_bytes(4, "little")


class Kind(IntEnum):
    CREATE = 1
    WRITE = 2
    TRUNCATE = 3
    ALLOCATE = 4
    SYNC = 5
    RENAME = 6
    UNLINK = 7
    MKDIR = 8
    RMDIR = 9
    MARK = 10
    UNSEEN = 11
    SYNC_ALL = 12


NAMING = frozenset({Kind.CREATE, Kind.RENAME, Kind.UNLINK, Kind.MKDIR, Kind.RMDIR})


@dataclass(frozen=True, slots=True)
class Operation:
    """One recorded file operation. `start` and `end` are the moments (ticks of the log) at which the call began and
    returned. For TRUNCATE and ALLOCATE `offset` is the new length; for RENAME `data` is the new path. `through`: the
    data was on the disk when the call returned.
    """

    kind: Kind
    start: int
    end: int
    inode: int = 0
    offset: int = 0
    path: str = ""
    data: bytes = b""
    through: bool = False

    def mark(self) -> dict[str, Any]:
        """Return the dictionary that the recorded process attached to this operation, which is a MARK (a note in the
        log).
        """
        said = json.loads(self.data)
        assert isinstance(said, dict)
        return said


def pack_mark(said: dict[str, Any]) -> bytes:
    """Return the dictionary `said` as the data bytes of a MARK (a note in the log)."""
    return json.dumps(said, separators=(",", ":")).encode()


class UnseenChange(Exception):
    """An error: the recorded process changed files in a way that the recorder does not follow, so that the log is
    incomplete and proves nothing.
    """


def pack(operation: Operation) -> bytes:
    """Return `operation` as the bytes of one log record."""
    path = operation.path.encode()
    flags = THROUGH if operation.through else 0
    return (
        _HEADER.pack(
            MAGIC, operation.kind, flags, operation.start, operation.end, operation.inode, operation.offset,
            len(path), len(operation.data),
        )
        + path
        + operation.data
    )  # fmt: skip


def read_log(path: Path) -> list[Operation]:
    """Return all operations in the log file `path`, in the order in which they began. Raises UnseenChange if the log is
    incomplete.
    """
    operations = sorted(_records(path.read_bytes()), key=lambda one: one.start)
    unseen = next((one for one in operations if one.kind is Kind.UNSEEN), None)
    if unseen is not None:
        raise UnseenChange(f"{path}: the recorder does not follow {unseen.path}")
    return operations


def write_log(path: Path, operations: Iterable[Operation]) -> None:
    """Write `operations` to the log file `path`, which replaces it."""
    path.write_bytes(b"".join(map(pack, operations)))


def _records(raw: bytes) -> Iterator[Operation]:
    at = 0
    while at + _HEADER.size <= len(raw):
        magic, kind, flags, start, end, inode, offset, path_bytes, data_bytes = _HEADER.unpack_from(raw, at)
        body = at + _HEADER.size
        following = body + path_bytes + data_bytes
        whole = following == len(raw) or raw[following : following + 4] == _MAGIC_BYTES
        if magic != MAGIC or not whole:
            at = raw.find(_MAGIC_BYTES, at + 1)  # the writer was killed in the middle of it
            if at < 0:
                return
            continue
        yield Operation(
            Kind(kind), start, end, inode, offset,
            raw[body : body + path_bytes].decode(), raw[body + path_bytes : following], bool(flags & THROUGH),
        )  # fmt: skip
        at = following
