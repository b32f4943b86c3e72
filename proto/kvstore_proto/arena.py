"""The layout of a slot: a 4096-byte header, then the payload. One layout in staging, arenas and NVMe slabs.

    offset  size  field
    0       4     magic "KVB1"
    4       2     version (2)
    6       2     flags
    8       16    key
    24      16    parent: a key
    40      16    extra
    56      32    fingerprint digest
    88      16    tenant digest
    104     2     group
    106     2     codec that made the stored bytes; 0: they are the payload
    108     4     token count
    112     8     payload bytes
    120     8     generation of the slot
    128     8     checksum: xxh3_64 of the payload
    136     8     created, ns since the epoch
    144     4     depth: blocks before it in its chain.
    148     4     error bound of the payload, float32; 0: it is what was put
    152     8     xxh3_64 of the header with this field zero
    160     8     stored bytes: what follows the header
    168     8     xxh3_64 of the stored bytes
    176     8     expiry, seconds since the epoch in the low 32 bits, and priority, signed, in the next 8; 0: none
    184     68    seal of an encrypted block, on NVMe alone
    252     4     reserved, zero.
    256     3840  token ids, little-endian int32, up to 960
    4096          stored bytes, then padding to a multiple of 4096

Slots start on 4096-byte boundaries everywhere, so that a whole slot moves between DRAM and NVMe in one direct I/O.
A client writes only the token ids and the payload of its staging slot; the daemon writes every other field itself.
Without a codec the stored bytes are the payload, and size and checksum of both are equal. Clients see such slots alone.
Invariants: little-endian; all reserved bytes zero; `read` never trusts a length before the header's checksum holds.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

ALIGNMENT_BYTES = 4096
DEVICE_ARENAS = 1 << 31  # numbers of arenas from here on name chunks of device memory
HEADER_BYTES = 4096
TOKEN_COUNT_OFFSET, ERROR_OFFSET = 108, 148
TOKENS_OFFSET = 256
MAX_TOKENS = (HEADER_BYTES - TOKENS_OFFSET) // 4
SEALED = 0x100  # in the number of a codec: token ids, keys and stored bytes are encrypted
SEAL_OFFSET, SEAL_BYTES = 184, 68
MAGIC = b"KVB1"
VERSION = 2
_FIXED = struct.Struct("<4sHH16s16s16s32s16sHHIQQQQIfQQQQ")
_COMPARED = struct.Struct("<4sHH16s84xIQQ20xf")  # magic, version, flags, key, token count, size, generation, error
_SIZES = struct.Struct("<106xHIQQQQIfQQQ")  # of _FIXED, from the codec to the stored bytes' checksum
_OWN = np.dtype({  # the fields that differ between blocks which are stored together
    "names": ["key", "parent", "extra", "token_count", "generation", "depth"],
    "formats": ["V16", "V16", "V16", "<u4", "<u8", "<u4"],
    "offsets": [8, 24, 40, TOKEN_COUNT_OFFSET, 120, 144], "itemsize": HEADER_BYTES,
})  # fmt: skip
_CHECKSUM = struct.Struct("<Q")
_CHECKSUM_OFFSET = 152
assert _FIXED.size == _CHECKSUM_OFFSET + 32

Bytes = npt.NDArray[np.uint8]


def slot_bytes(payload_bytes: int) -> int:
    """Return the bytes of a slot (the place of one block in any tier) for a payload of `payload_bytes` bytes: a header
    of 4096 bytes, and the payload rounded up to a multiple of 4096.
    """
    return HEADER_BYTES + -(-payload_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def payload_checksum(payload: Bytes | bytes | memoryview) -> int:
    return xxhash.xxh3_64_intdigest(payload.data if isinstance(payload, np.ndarray) else payload)


class Coded(NamedTuple):
    """A description of stored bytes that a codec (a compression) wrote: `codec` is the codec's number, `nbytes` the
    number of stored bytes, and `checksum` their xxh3_64.
    """

    codec: int
    nbytes: int
    checksum: int


@dataclass(frozen=True)
class BlockHeader:
    """The header of a slot, which describes the block in the slot. `tokens` holds the block's token ids, packed as
    little-endian int32.

    `coded` is None when the payload is stored as it is. `payload_bytes` and `checksum` always describe the payload.
    `kept` is a word of `kvstore_proto.terms.kept_word`. `error` is above 0 for a lossy copy, whose payload is not what
    was put: the bound of the difference, in the unit of `kvstore_tiers.codecs`, rounded up to a float32. `seal` belongs
    to an encrypted block: see `kvstore_tiers.nvme.seals`; a record has its first 8 bytes, the number of the key.
    """

    key: bytes
    parent: bytes
    fingerprint: bytes
    tenant: bytes
    payload_bytes: int
    tokens: bytes = b""
    extra: bytes = bytes(16)
    group: int = 0
    depth: int = 0
    generation: int = 0
    checksum: int = 0
    created_ns: int = 0
    coded: Coded | None = None
    kept: int = 0  # how long: see `kvstore_proto.terms.kept_word`
    error: float = 0.0
    seal: bytes = b""

    @property
    def codec(self) -> int:
        """The number of the codec (compression) that wrote the stored bytes. 0 means that the payload is stored as it
        is.
        """
        return 0 if self.coded is None else self.coded.codec

    @property
    def stored_bytes(self) -> int:
        """The number of stored bytes, which follow the header in the slot."""
        return self.payload_bytes if self.coded is None else self.coded.nbytes

    @property
    def stored_checksum(self) -> int:
        """The xxh3_64 of the stored bytes, which follow the header in the slot."""
        return self.checksum if self.coded is None else self.coded.checksum

    def pack(self) -> bytes:
        """Return the header as 4096 bytes, with its checksum. Raises ValueError for a field of a wrong size."""
        if len(self.tokens) > MAX_TOKENS * 4 or len(self.tokens) % 4:
            raise ValueError(f"{len(self.tokens)} bytes of token ids; at most {MAX_TOKENS} ids of 4 bytes fit")
        if (len(self.key), len(self.parent), len(self.extra), len(self.tenant)) != (16, 16, 16, 16):
            raise ValueError("key, parent, extra and tenant are 16 bytes each")
        if len(self.fingerprint) != 32:
            raise ValueError("the fingerprint digest is 32 bytes")
        codec, stored_bytes, stored_checksum = self.coded or (0, self.payload_bytes, self.checksum)
        raw = bytearray(HEADER_BYTES)
        _FIXED.pack_into(
            raw, 0, MAGIC, VERSION, 0, self.key, self.parent, self.extra, self.fingerprint, self.tenant,
            self.group, codec, len(self.tokens) // 4, self.payload_bytes, self.generation, self.checksum,
            self.created_ns, self.depth, self.error, 0, stored_bytes, stored_checksum, self.kept,
        )  # fmt: skip
        raw[SEAL_OFFSET : SEAL_OFFSET + len(self.seal)] = self.seal
        raw[TOKENS_OFFSET : TOKENS_OFFSET + len(self.tokens)] = self.tokens
        _CHECKSUM.pack_into(raw, _CHECKSUM_OFFSET, xxhash.xxh3_64_intdigest(raw))
        return bytes(raw)

    def stamped(self, generation: int, checksum: int) -> BlockHeader:
        """Return a copy of this header with the slot generation `generation` and the payload checksum `checksum`."""
        return _header({**self.__dict__, "generation": generation, "checksum": checksum})

    def without_tokens(self) -> BlockHeader:
        """Return a copy of this header without token ids, which takes less memory."""
        return _header({**self.__dict__, "tokens": b""})

    def without_codec(self) -> BlockHeader:
        """Return a copy of this header for the payload as it is."""
        return _header({**self.__dict__, "coded": None})

    @property
    def token_ids(self) -> npt.NDArray[np.int32]:
        return np.frombuffer(self.tokens, dtype="<i4").astype(np.int32, copy=False)


def read_header(raw: bytes | memoryview | Bytes) -> BlockHeader | str:
    """Return the block header in the first 4096 bytes of `raw`, or a string that says what is wrong with them. Damaged
    bytes raise no error.
    """
    data = bytes(raw[:HEADER_BYTES])
    if len(data) < HEADER_BYTES:
        return f"header cut short: {len(data)} of {HEADER_BYTES} bytes"
    magic, version = data[:4], int.from_bytes(data[4:6], "little")
    if magic != MAGIC:
        return "no block here: wrong magic"
    if version != VERSION:
        return f"header version {version}, this code reads {VERSION}"
    zeroed = bytearray(data)
    _CHECKSUM.pack_into(zeroed, _CHECKSUM_OFFSET, 0)
    if xxhash.xxh3_64_intdigest(zeroed) != _CHECKSUM.unpack_from(data, _CHECKSUM_OFFSET)[0]:
        return "header checksum does not hold"
    codec, count, payload_bytes, _, checksum, _, _, error, _, stored_bytes, stored_checksum = _SIZES.unpack_from(data)
    if count > MAX_TOKENS:
        return f"header counts {count} tokens, at most {MAX_TOKENS} fit"
    if not codec and (stored_bytes != payload_bytes or stored_checksum != checksum):
        return "the header names no codec, and sizes or checksums that differ"
    if not 0 <= error < math.inf:
        return f"the header says an error bound of {error}"
    return unjudged_header(data)


def mismatch(
    arena: memoryview,
    offset: int,
    key: bytes,
    tokens: bytes | None,
    payload_bytes: int,
    generation: int,
    *,
    exact: bool = False,
) -> str:
    """Compare the block header at `offset` of `arena` with a block's `key`, packed `tokens`, `payload_bytes` and
    `generation`. Return a word for the first difference, or "" if all agree. Without `tokens` they are not compared. A
    lossy copy differs from a block that has to be `exact`.
    """
    magic, version, _, found_key, count, found_bytes, found_generation, error = _COMPARED.unpack_from(arena, offset)
    if magic != MAGIC or version != VERSION:
        return "no block header"
    if found_key != key:
        return "key"
    if found_generation != generation:
        return "generation"
    if found_bytes != payload_bytes:
        return "payload size"
    if error and exact:
        return "exactness"
    if tokens is None:
        return ""
    start = offset + TOKENS_OFFSET
    # tobytes: comparing memoryviews goes item by item, and takes four times as long
    if count * 4 != len(tokens) or arena[start : start + len(tokens)].tobytes() != tokens:
        return "token ids"
    return ""


def pack_unsummed(
    headers: Bytes,
    *,
    keys: Sequence[bytes],
    parents: Sequence[bytes],
    extras: Sequence[bytes],
    fingerprint: bytes,
    tenant: bytes,
    group: int,
    payload_bytes: int,
    tokens: Sequence[bytes],
    depth: int,
    generations: Sequence[int],
    created_ns: int,
    kept: int,
) -> None:
    """Write the headers of blocks whose payloads are stored as they are to the zeros `headers`, uint8[blocks, 4096].
    The first block has `depth`, and each of the others one more. Checksums are left out: they are not known before the
    payload is in its slot. The fields have the sizes that `pack` asks for.
    """
    count, sizes = len(keys), set(map(len, tokens))
    alike = sizes.pop() if len(sizes) == 1 else 0
    same = _FIXED.pack(
        MAGIC, VERSION, 0, b"", b"", b"", fingerprint, tenant, group, 0, alike // 4, payload_bytes, 0, 0, created_ns, 0,
        0.0, 0, payload_bytes, 0, kept,
    )  # fmt: skip
    headers[:, : len(same)] = np.frombuffer(same, np.uint8)
    own = headers.view(_OWN)[:, 0]
    for name, values in (("key", keys), ("parent", parents), ("extra", extras)):
        own[name] = np.frombuffer(b"".join(values), "V16")
    own["generation"], own["depth"] = generations, np.arange(depth, depth + count)
    if sizes:  # some blocks have token ids, others have none
        own["token_count"] = [len(ids) // 4 for ids in tokens]
        for header, ids in zip(headers, tokens, strict=True):
            header[TOKENS_OFFSET : TOKENS_OFFSET + len(ids)] = np.frombuffer(ids, np.uint8)
    elif alike:
        packed = np.frombuffer(b"".join(tokens), np.uint8)
        headers[:, TOKENS_OFFSET : TOKENS_OFFSET + alike] = packed.reshape(count, alike)


def unjudged_header(raw: bytes) -> BlockHeader:
    """Return the header in the 4096 bytes `raw`, which this process wrote. Nothing is checked."""
    values = _FIXED.unpack_from(raw)
    _, _, _, key, parent, extra, fingerprint, tenant, group, codec, count, payload_bytes = values[:12]
    generation, checksum, created_ns, depth, error, _, stored_bytes, stored_checksum, kept = values[12:]
    return _header({
        "key": key, "parent": parent, "extra": extra, "fingerprint": fingerprint, "tenant": tenant, "group": group,
        "depth": depth, "tokens": raw[TOKENS_OFFSET : TOKENS_OFFSET + count * 4],
        "payload_bytes": payload_bytes, "generation": generation, "checksum": checksum, "created_ns": created_ns,
        "coded": Coded(codec, stored_bytes, stored_checksum) if codec else None, "kept": kept, "error": error,
        "seal": raw[SEAL_OFFSET : SEAL_OFFSET + SEAL_BYTES] if codec & SEALED else b"",
    })  # fmt: skip


def _header(fields: dict[str, object]) -> BlockHeader:
    """Return a header with `fields`, all of them: in a fifth of the time that the constructor of a frozen class
    takes."""
    header = object.__new__(BlockHeader)
    header.__dict__.update(fields)
    return header
