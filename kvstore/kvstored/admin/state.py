"""The operator's view of the saved state: its databases, and the entries of one database. It keeps nothing."""

from __future__ import annotations

import json
from pathlib import Path

from kvstore_proto.errors import ErrorKind, KVStoreError
from kvstore_proto.v1 import admin_pb2 as pb
from kvstored.state.databases import BY_NAME, DATABASES
from kvstored.state.process import StateProcess
from kvstored.state.saver import StateSaver
from kvstored.state.shown import shown

MOST, USUAL = 10_000, 100
PAGE_BYTES = 4096


async def state(saver: StateSaver, request: pb.StateRequest) -> pb.StateReply:
    """Return the databases of the saved state, or the entries of the one that `request` names, for an operator. Raises
    KVStoreError for a database that does not exist, and when the state cannot be read.
    """
    try:
        reply = await look(saver.process, request)
    except OSError as error:
        raise KVStoreError(ErrorKind.UNAVAILABLE, f"{error.filename}: {error.strerror}") from None
    reply.is_read, reply.wrong_rows = saver.is_read, saver.wrong_rows
    return reply


async def look(process: StateProcess, request: pb.StateRequest) -> pb.StateReply:
    """Return the databases of the saved state, or the entries of the one that `request` names. `process` is the process
    that reads them. Raises KVStoreError for a database that does not exist, and OSError."""
    if request.database and request.database not in BY_NAME:
        known = ", ".join(BY_NAME)
        raise KVStoreError(ErrorKind.NOT_FOUND, f"no database {request.database!r}; there are {known}")
    try:
        first = bytes.fromhex(request.first)
    except ValueError:
        raise KVStoreError(ErrorKind.INVALID, f"{request.first!r} is no key: give hex digits") from None
    found = await process.contents()
    reply = pb.StateReply(
        path=found["path"], bytes=found["bytes"], set_aside=process.was_aside, pid=process.pid,
        rss_bytes=_resident_bytes(process.pid), wrong_values=process.wrong_values,
    )  # fmt: skip
    for each in DATABASES:
        entries, nbytes = found["databases"].get(each.name, (0, 0))
        reply.databases.add(name=each.name, holds=each.holds, values=entries, bytes=nbytes)
    if request.database:
        limit = min(request.limit or USUAL, MOST)
        entries = await process.read(request.database, first=first, limit=limit + 1)
        reply.values.extend(json.dumps(shown(request.database, *entry)) for entry in entries[:limit])
        reply.next = entries[limit][0].hex() if len(entries) > limit else ""
    return reply


def _resident_bytes(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE_BYTES
    except OSError:
        return 0
