"""Named objects: bytes that are no K/V, under a name of the user's choice, as a chain of blocks like any other.

Owns the ways from a name to keys and from bytes to payloads, for every client and for the daemon's unary calls:

    fingerprint   `OBJECTS`: blocks of eight token ids, payload size open.
    token ids     of block i: BLAKE2b-256 of (i as 8 bytes little-endian, name in UTF-8) as eight int32.
    keys          the keys of these token ids under this fingerprint, from the tenant's root: `kvstore_proto.identity`.
    payload       a 32-byte head and then the bytes, cut every `block_bytes`; the last block may be shorter.
    head          little-endian: "KVO1", version u16, kind of checksum u16, block_bytes u32, zero u32, size in bytes
                  u64, checksum u64 of all bytes.

So a name needs no catalogue, two tenants may use equal names and never share a key, and the daemon checks these
token ids against their keys as it checks an engine's. No block may be trusted before the checksum over the whole
object, since blocks of two puts under one name could meet. docs/objects.md describes this for other languages.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Sequence
from enum import IntEnum
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from kvstore_proto.errors import InvalidValue
from kvstore_proto.fingerprint import Fingerprint, LayerGroup

Buffer = bytes | bytearray | memoryview
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


class ChecksumKind(IntEnum):
    """The kind of checksum in the head of a stored object. Readers accept both kinds. SHA-256 is for writers without
    xxh3; its first eight bytes count.
    """

    XXH3 = 0
    SHA256 = 1


class ObjectChecksum:
    """A checksum of an object's bytes, of the kind `kind`, to which the bytes are added piece by piece."""

    def __init__(self, kind: ChecksumKind = ChecksumKind.XXH3) -> None:
        self._kind = kind
        self._hash: Any = xxhash.xxh3_64() if kind is ChecksumKind.XXH3 else hashlib.sha256()

    def update(self, piece: Buffer) -> None:
        self._hash.update(piece)

    @property
    def value(self) -> int:
        if self._kind is ChecksumKind.XXH3:
            return int(self._hash.intdigest())
        return int.from_bytes(self._hash.digest()[:8], "little")


class ObjectHead(NamedTuple):
    """The head of a stored object, which is stored in front of the object's bytes: its size `size_bytes`, the size
    `block_bytes` of its blocks, and the `checksum` of its bytes.
    """

    size_bytes: int
    block_bytes: int
    checksum: int
    checksum_kind: ChecksumKind = ChecksumKind.XXH3

    @property
    def blocks(self) -> int:
        return -(-(HEAD_BYTES + self.size_bytes) // self.block_bytes)

    def payload_bytes(self, block: int) -> int:
        """Return the payload bytes of block number `block` of the object. All blocks have one size, except the last,
        which may be shorter.
        """
        return min(self.block_bytes, HEAD_BYTES + self.size_bytes - block * self.block_bytes)

    def pack(self) -> bytes:
        return _HEAD.pack(_MAGIC, _VERSION, self.checksum_kind, self.block_bytes, 0, self.size_bytes, self.checksum)

    def is_of(self, content: Buffer) -> bool:
        """Return whether `content` has the size and the checksum of this head, so that it is the whole object."""
        return self.size_bytes == len(content) and self.checksum == checksum_of(content, self.checksum_kind)


def checksum_of(content: Buffer, kind: ChecksumKind = ChecksumKind.XXH3) -> int:
    checksum = ObjectChecksum(kind)
    checksum.update(content)
    return checksum.value


def head_of(
    content: Buffer, block_bytes: int = DEFAULT_BLOCK_BYTES, kind: ChecksumKind = ChecksumKind.XXH3
) -> ObjectHead:
    """Return the head of an object with the bytes `content`, to be cut into blocks of `block_bytes` bytes. A small
    object gets one block of its own size. `kind` is the kind of checksum.
    """
    size = min(block_bytes, HEAD_BYTES + len(content))
    return ObjectHead(len(content), max(size, HEAD_BYTES + 1), checksum_of(content, kind), kind)


def read_head(payload: Buffer) -> ObjectHead | None:
    """Return the object head at the front of `payload`, the first block of an object. Return None for bytes that are no
    head, or a head of an unknown version.
    """
    if len(payload) < HEAD_BYTES:
        return None
    magic, version, kind, block_bytes, _, size_bytes, checksum = _HEAD.unpack(bytes(payload[:HEAD_BYTES]))
    if magic != _MAGIC or version != _VERSION or kind not in set(ChecksumKind) or block_bytes <= HEAD_BYTES:
        return None
    head = ObjectHead(size_bytes, block_bytes, checksum, ChecksumKind(kind))
    return head if head.blocks <= MAX_OBJECT_BLOCKS else None


def object_tokens(name: str, blocks: int, first: int = 0) -> npt.NDArray[np.int32]:
    """Return the token ids that stand for blocks of the object `name` in the store: for `blocks` blocks, from block
    number `first` on, as int32[8 * blocks]. The name is hashed once for each block, which takes 10 us for a name of
    4096 bytes. Raises KVStoreError(INVALID) if `name` is not a valid name.
    """
    encoded = _encoded(name)
    digests = (
        hashlib.blake2b(block.to_bytes(8, "little") + encoded, digest_size=4 * NAME_TOKENS, person=b"kvstore object")
        for block in range(first, first + blocks)
    )
    return np.frombuffer(b"".join(digest.digest() for digest in digests), dtype="<i4").astype(np.int32, copy=False)


def _encoded(name: str) -> bytes:
    try:
        encoded = name.encode()
    except (AttributeError, UnicodeEncodeError):
        raise InvalidValue(f"the name of an object is text, got {name!r}") from None
    if len(encoded) > MAX_NAME_BYTES:
        raise InvalidValue(f"the name of an object has at most {MAX_NAME_BYTES} bytes, got {len(encoded)}")
    return encoded


def payloads_of(content: bytes, head: ObjectHead) -> list[bytes]:
    """Cut the object with the bytes `content` and the head `head` into the payloads of its blocks, and return them. The
    first one begins with the head.
    """
    whole = head.pack() + content
    return [whole[start : start + head.block_bytes] for start in range(0, len(whole), head.block_bytes)]


def content_of(payloads: Sequence[bytes] | Iterable[bytes]) -> bytes | None:
    """Return the bytes of an object, given the payloads of all its blocks in order. Return None if they are not one
    whole object.
    """
    whole = b"".join(payloads)
    head = read_head(whole)
    content = whole[HEAD_BYTES:]
    return content if head is not None and head.is_of(content) else None
