"""The messages between the daemon and the process that has the environment open.

A message is a verb, a length and a body. The daemon sends OPEN first. PUT, KEEP and REMOVE belong to one transaction:
the first of them, or REWRITE, begins it, and COMMIT or ABORT ends it. READ, LIST and COPY need no transaction. An
answer is JSON; entries are packed bytes.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Iterator, Sequence
from enum import IntEnum
from typing import Any

HEAD = struct.Struct("<BI")
_KEY = struct.Struct("<HI")
NO_LMDB = 3  # the exit status of a process that cannot import it
BODY_BYTES = 1 << 20  # of entries in one message, and one entry more
Entry = tuple[bytes, bytes]


class Verb(IntEnum):
    """The kind of a message between the daemon and the state process. ANSWER and ENTRIES are answers, the others
    requests.
    """

    OPEN = 1
    PUT = 2  # database and entries
    KEEP = 3  # database and the keys that stay in it, with empty values
    REWRITE = 4  # with the key of the new file, if it is to be encrypted
    COMMIT = 5
    ABORT = 6
    READ = 7
    LIST = 8
    COPY = 9
    REMOVE = 10  # database and the keys to remove, with empty values
    ANSWER = 20
    ENTRIES = 21


def packed(verb: Verb, body: bytes = b"") -> bytes:
    return HEAD.pack(verb, len(body)) + body


def packed_json(verb: Verb, **fields: object) -> bytes:
    return packed(verb, json.dumps(fields).encode())


def packed_entries(verb: Verb, database: str, entries: Sequence[Entry]) -> bytes:
    name = database.encode()
    parts = [bytes([len(name)]), name]
    for key, value in entries:
        parts += (_KEY.pack(len(key), len(value)), key, value)
    return packed(verb, b"".join(parts))


def unpacked_entries(body: bytes) -> tuple[str, list[Entry]]:
    end = 1 + body[0]
    name, at, entries = body[1:end].decode(), end, []
    while at < len(body):
        key_bytes, value_bytes = _KEY.unpack_from(body, at)
        at += _KEY.size
        entries.append((body[at : at + key_bytes], body[at + key_bytes : at + key_bytes + value_bytes]))
        at += key_bytes + value_bytes
    return name, entries


def in_parts(entries: Iterable[Entry]) -> Iterator[list[Entry]]:
    """Yield `entries`, in their order, as lists of about `BODY_BYTES` bytes each."""
    part: list[Entry] = []
    nbytes = 0
    for entry in entries:
        part.append(entry)
        nbytes += len(entry[0]) + len(entry[1])
        if nbytes >= BODY_BYTES:
            yield part
            part, nbytes = [], 0
    if part:
        yield part


def fields_of(body: bytes) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(body)
    return found
