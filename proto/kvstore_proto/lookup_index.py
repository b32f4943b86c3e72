"""The layout of the lookup index: a table in shared memory from which a client reads where blocks are.

    offset  size  field
    0       4     magic "KVI1"
    4       2     version (1)
    6       2     bytes of a bucket (64)
    8       4     bytes of this header (4096): the first bucket follows
    12      4     number of buckets, a power of two
    16      8     seed of the tags
    24      16    tenant: its digest
    40      16    reserved: zero
    56      8     xxh3_64 of the 56 bytes before
    64      8     state: 0 closed, 1 building, 2 serving
    72      8     keys that have a slot
    80      8     keys that found their bucket full
    88      8     changes: how often a bucket was written
    96            reserved: zero
    4096          buckets

    in a bucket
    0       8     xxh3_64 of the 56 bytes after, xor the xxh3_64 of 56 zero bytes
    8       6     for each slot, the tier code of the fastest readable copy (kvstore.v1.TierCode)
    14      2     overflow: how many keys found this bucket full, saturating
    16      48    six slots: the tag of a key, or 0

A key's tag is `xxh3_64(key, seed)`, 1 in place of 0; its low bits choose the only bucket in which it can be.

One process writes, any number read, without a lock or an atomic instruction: a bucket is copied out, and its checksum
says whether the copy is whole. A copy taken while the bucket was being written mixes words of two states and fails
(once in 2^64 it does not). A bucket that was never written is all zero and its checksum holds. An answer is a hint
all the same: it may be old by the time it is used, and bytes are read through a lease only.

Never does: hold memory, or say what an answer is good for. Invariants: little-endian; reserved bytes zero; pure.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

import xxhash

MAGIC = b"KVI1"
VERSION = 1
HEADER_BYTES = 4096
BUCKET_BYTES = 64
SLOTS_A_BUCKET = 6
MAX_BUCKETS = 1 << 26
MAX_OVERFLOW = 0xFFFF
FIXED_BYTES = 64  # of the header: what never changes, with its checksum
ABSENT = 0  # the wire's TIER_CODE_ABSENT
UNKNOWN = 0xFF  # no tier: the index has no answer

BUCKET = struct.Struct("<Q56s")  # checksum, body
BODY = struct.Struct("<7Q")  # tiers and overflow, tags
LIVE = struct.Struct("<QQQQ")  # state, keys, overflowed keys, changes
LIVE_OFFSET = 64
CHECKSUM_BYTES = 8  # of a bucket, before its body
_TIERS_MASK = (1 << 8 * SLOTS_A_BUCKET) - 1
_FIXED = struct.Struct("<4sHHIIQ16s16xQ")
_STATE = struct.Struct("<Q")
_digest = xxhash.xxh3_64_intdigest
_EMPTY_DIGEST = _digest(bytes(BUCKET_BYTES - 8))
assert (BUCKET.size, BODY.size, _FIXED.size) == (BUCKET_BYTES, BUCKET_BYTES - 8, FIXED_BYTES)

Buffer = bytes | bytearray | memoryview


class IndexState(IntEnum):
    CLOSED = 0  # nothing in the table is kept up any more
    BUILDING = 1  # what is found is there; what is not found may be
    SERVING = 2


class IndexLayout(NamedTuple):
    """The fixed fields in the header of a lookup index: the number of its `buckets`, the `seed` of its hash, and the
    digest of its `tenant`.
    """

    buckets: int
    seed: int
    tenant: bytes

    @property
    def size_bytes(self) -> int:
        return HEADER_BYTES + self.buckets * BUCKET_BYTES

    def pack(self) -> bytes:
        """Return the first 64 bytes of the index's header, which never change, with their checksum."""
        raw = _FIXED.pack(MAGIC, VERSION, BUCKET_BYTES, HEADER_BYTES, self.buckets, self.seed, self.tenant, 0)[:-8]
        return raw + _digest(raw).to_bytes(8, "little")


def read_layout(raw: Buffer) -> IndexLayout | str:
    """Return the layout of the lookup index in `raw`, or a string that says why this code cannot read it."""
    if len(raw) < HEADER_BYTES:
        return f"cut short: {len(raw)} bytes"
    magic, version, bucket_bytes, header_bytes, buckets, seed, tenant, checksum = _FIXED.unpack_from(raw)
    if magic != MAGIC:
        return "no lookup index here: wrong magic"
    if version != VERSION:
        return f"lookup index version {version}, this code reads {VERSION}"
    if _digest(bytes(raw[: FIXED_BYTES - 8])) != checksum:
        return "header checksum does not hold"
    if (bucket_bytes, header_bytes) != (BUCKET_BYTES, HEADER_BYTES) or buckets & (buckets - 1) or not buckets:
        return f"{buckets} buckets of {bucket_bytes} bytes after {header_bytes}: not this layout"
    layout = IndexLayout(buckets, seed, tenant)
    return layout if layout.size_bytes <= len(raw) else f"cut short: {len(raw)} of {layout.size_bytes} bytes"


def read_state(raw: Buffer) -> int:
    """Return the state of the lookup index in `raw`: an `IndexState`, or a number that this code does not know."""
    return int(_STATE.unpack_from(raw, LIVE_OFFSET)[0])


def buckets_for(slots: int, most_bytes: int) -> int:
    """Return the number of buckets, a power of two, of a lookup index for `slots` keys that takes at most `most_bytes`
    bytes. If the bytes do not suffice, the number is smaller; 0 means that not even one bucket fits.
    """
    wanted = -(-slots // SLOTS_A_BUCKET)
    buckets = 1 << max(wanted - 1, 0).bit_length()
    affordable = (most_bytes - HEADER_BYTES) // BUCKET_BYTES
    if wanted < 1 or affordable < 1:
        return 0
    return min(buckets, 1 << affordable.bit_length() - 1, MAX_BUCKETS)


def key_tag(key: bytes, seed: int) -> int:
    return _digest(key, seed) or 1


def bucket_offset(tag: int, buckets: int) -> int:
    return HEADER_BYTES + (tag & (buckets - 1)) * BUCKET_BYTES


def pack_bucket(control: int, tags: Sequence[int]) -> tuple[int, bytes]:
    """Return the checksum and the 56 bytes of one bucket of the lookup index, for `BUCKET.pack_into`. `control` is the
    word with the tiers and the overflow, `tags` has the tag of each of the bucket's six slots.
    """
    body = BODY.pack(control, *tags)
    return _digest(body) ^ _EMPTY_DIGEST, body


def with_tier(control: int, slot: int, tier: int) -> int:
    """Return the word `control` of a bucket with the number `tier` for its `slot`."""
    return control & ~(0xFF << 8 * slot) | tier << 8 * slot


def with_overflow(control: int, keys: int) -> int:
    """Return the word `control` of a bucket that found no room for this number of `keys`."""
    return control & _TIERS_MASK | min(keys, MAX_OVERFLOW) << 8 * SLOTS_A_BUCKET


def find(raw: Buffer, mask: int, seed: int, key: bytes) -> int:
    """Return the number of the tier that has the block `key`, by the lookup index in `raw`, or ABSENT if the index does
    not have the key. Return UNKNOWN if the index cannot say: the bucket of the key overflowed, is being written at this
    moment, or is damaged. `mask` is the number of buckets less one, and `seed` the seed of the index's hash.
    """
    tag = _digest(key, seed) or 1
    checksum, body = BUCKET.unpack_from(raw, HEADER_BYTES + (tag & mask) * BUCKET_BYTES)
    if _digest(body) ^ _EMPTY_DIGEST != checksum:
        return UNKNOWN
    words = BODY.unpack(body)
    if tag in words:
        slot = words.index(tag) - 1
        return body[slot] or UNKNOWN if slot >= 0 else UNKNOWN  # -1: tiers and overflow happen to look like the tag
    return UNKNOWN if words[0] >> 48 else ABSENT
