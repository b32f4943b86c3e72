"""Named objects: any bytes under a name of the user's choice, as a chain of blocks like any other.

Owns how a name becomes keys and how bytes become payloads:

    fingerprint   `OBJECTS`: blocks of eight token ids, payload size open
    token ids     of block i: BLAKE2b-256 of (i as 8 bytes little-endian, name in UTF-8) as eight int32
    payload       a 32-byte head and then the bytes, cut every `block_bytes`; the last block may be shorter
    head          "KVO1", version, two reserved bytes, block_bytes, reserved, size in bytes, xxh3_64 of the bytes

So a name needs no catalogue, and the daemon checks these token ids against their keys as it checks an engine's.
Never does: trust a block without the head's checksum over the whole object, since blocks of two puts under one name
could meet. Names are per tenant.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import xxhash

from kvstore_client.lease import Lease
from kvstore_client.memory import Bytes
from kvstore_client.session import Session
from kvstore_client.payload import Payload
from kvstore_proto.fingerprint import Fingerprint, LayerGroup

NAME_TOKENS: Final = 8
OBJECTS: Final = Fingerprint(
    "named objects",
    "kvstore named object 1",
    kv_dtype="u8",
    layout="opaque",
    block_tokens=NAME_TOKENS,
    engine_block_tokens=NAME_TOKENS,
    groups=(LayerGroup(0),),
)
DEFAULT_BLOCK_BYTES: Final = 1 << 20
MAX_NAME_BYTES: Final = 4096
MAX_OBJECT_BLOCKS: Final = 1 << 20
_HEAD = struct.Struct("<4sHHIIQQ")
_MAGIC, _VERSION = b"KVO1", 1
HEAD_BYTES: Final = _HEAD.size


@dataclass(frozen=True, slots=True)
class ObjectHead:
    """What the first block says about the whole object."""

    size_bytes: int
    block_bytes: int
    checksum: int

    @property
    def blocks(self) -> int:
        return -(-(HEAD_BYTES + self.size_bytes) // self.block_bytes)

    def pack(self) -> bytes:
        return _HEAD.pack(_MAGIC, _VERSION, 0, self.block_bytes, 0, self.size_bytes, self.checksum)


def read_head(payload: Bytes) -> ObjectHead | None:
    """The head at the front of a first block; None for bytes that are none, or of a version we do not know."""
    if len(payload) < HEAD_BYTES:
        return None
    magic, version, _, block_bytes, _, size_bytes, checksum = _HEAD.unpack(payload[:HEAD_BYTES].tobytes())
    if magic != _MAGIC or version != _VERSION or block_bytes <= HEAD_BYTES:
        return None
    head = ObjectHead(size_bytes, block_bytes, checksum)
    return head if head.blocks <= MAX_OBJECT_BLOCKS else None


def object_tokens(name: str, blocks: int) -> npt.NDArray[np.int32]:
    """Token ids of the first `blocks` blocks of the object called `name`."""
    encoded = name.encode()
    digests = (
        hashlib.blake2b(block.to_bytes(8, "little") + encoded, digest_size=4 * NAME_TOKENS, person=b"kvstore object")
        for block in range(blocks)
    )
    return np.frombuffer(b"".join(digest.digest() for digest in digests), dtype="<i4").astype(np.int32, copy=False)


def head_of(data: Bytes, block_bytes: int = DEFAULT_BLOCK_BYTES) -> ObjectHead:
    """The head for `data` (uint8). A small object gets one block of its own size."""
    size = min(block_bytes, HEAD_BYTES + len(data))
    return ObjectHead(len(data), max(size, HEAD_BYTES + 1), xxhash.xxh3_64_intdigest(data.data))


def payloads_of(head: ObjectHead, data: Bytes) -> list[Payload]:
    """The blocks of an object, without copying it."""

    def first(destination: Bytes) -> None:
        np.copyto(destination[:HEAD_BYTES], np.frombuffer(head.pack(), np.uint8))
        np.copyto(destination[HEAD_BYTES:], data[: len(destination) - HEAD_BYTES])

    rest: Sequence[Payload] = [
        data[start : start + head.block_bytes]
        for start in range(head.block_bytes - HEAD_BYTES, len(data), head.block_bytes)
    ]
    return [first, *rest]


def block_bytes_of(head: ObjectHead, block: int) -> int:
    """Payload bytes of one block: all but the last are of one size."""
    return min(head.block_bytes, HEAD_BYTES + head.size_bytes - block * head.block_bytes)


def get_head(session: Session, name: str, deadline_s: float) -> tuple[ObjectHead | None, str]:
    """The head of a stored object, or None and the reason; "no_object" when other bytes lie under its key."""
    with session.get(object_tokens(name, 1), deadline_s=deadline_s) as lease:
        return _head_in(lease)


def _head_in(lease: Lease) -> tuple[ObjectHead | None, str]:
    if not len(lease):
        return None, lease.reason
    head = read_head(lease.payload(0))
    return (head, "") if head is not None and lease.valid else (None, "no_object")
