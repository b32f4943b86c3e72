"""The bytes of a slab file: superblock, record region, slots, second superblock. docs/format.md describes them.

    offset 0                superblock, 4096 bytes
    4096                    records, 256 bytes a slot, padded to a multiple of 4096
    slots_offset            slots, `slot_bytes` each (kvstore_proto.arena layout)
    file_bytes - 4096       copy of the superblock

Owns packing, parsing and the arithmetic; never touches a file.
Invariants: little-endian; reserved bytes zero; everything carries a checksum; a record's checksum is seeded with the
slab's `format_id` and the record's place, so that a record of an earlier format of the file, or one that was written
to a wrong place, does not hold. A slot image has no seed; there its generation is of its place.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt
import xxhash

from kvstore_proto.arena import ALIGNMENT_BYTES, SEALED, BlockHeader, Coded
from kvstore_tiers.image import aligned_down, aligned_up

FORMAT_VERSION = 2
SUPERBLOCK_BYTES = 4096
RECORD_BYTES = 256
GENERATION_SPREAD = 1 << 28
CODEC_SHIFT = 48  # in a `stored_word`
STORED_MASK = (1 << CODEC_SHIFT) - 1
_SUPERBLOCK_MAGIC = b"KVSLAB\r\n"
_RECORD_MAGIC = b"KVR1"
RECORD_MAGIC_WORD = int.from_bytes(_RECORD_MAGIC, "little")
_SUPERBLOCK = struct.Struct("<8sHHIQ16sQQQQQ")  # the rest is zero up to the checksum in the last 8 bytes
_RECORD = struct.Struct("<4sHBBQQ16s16s16s32s16sHHIIfQQQQQQ8s")
KEY_NUMBER_BYTES = 8  # of the key that sealed a block; zeros: it is not sealed
_RECORD_CHECKSUM_OFFSET = RECORD_BYTES - 8
assert _RECORD.size <= _RECORD_CHECKSUM_OFFSET

RECORD_DTYPE = np.dtype(  # the fields that recovery looks at in bulk
    {
        "names": ["state", "generation", "sequence", "key", "payload_bytes"],
        "formats": ["u1", "<u8", "<u8", "V16", "<u8"],
        "offsets": [6, 8, 16, 24, 136],
        "itemsize": RECORD_BYTES,
    }
)
Records = npt.NDArray[np.void]


class RecordState(IntEnum):
    FREE = 0
    LIVE = 1
    QUARANTINED = 2


@dataclass(frozen=True, slots=True)
class Superblock:
    """The description of a slab file, which its first and its last page contain: slot size, number of slots, file size
    in bytes and identity. `first_generation` is higher than any generation before the file got this layout.
    """

    uuid: bytes
    format_id: int
    number: int
    slot_bytes: int
    slots: int
    first_generation: int
    file_bytes: int
    created_ns: int

    @property
    def slots_offset(self) -> int:
        return SUPERBLOCK_BYTES + aligned_up(self.slots * RECORD_BYTES)

    def slot_offset(self, index: int) -> int:
        return self.slots_offset + index * self.slot_bytes

    def index_of(self, offset: int) -> int:
        """Return the number of the slot that begins at the byte `offset` of the slab file. Raises RuntimeError if no
        slot begins there.
        """
        index, misplaced = divmod(offset - self.slots_offset, self.slot_bytes)
        if misplaced or not 0 <= index < self.slots:
            raise RuntimeError(f"no slot of slab {self.number} begins at offset {offset}")
        return index

    def record_seed(self, index: int) -> int:
        return (self.format_id + index) & (2**64 - 1)

    def first_generations(self) -> npt.NDArray[np.uint64]:
        """Return the first generation of each slot, uint64 of the shape (slots,). The numbers differ from slot to slot,
        so that a block written to a wrong place is detected by its generation.
        """
        words = np.arange(self.slots, dtype=np.uint64) + np.uint64(self.format_id)
        return np.uint64(self.first_generation) + _mixed(words) % np.uint64(GENERATION_SPREAD)

    def pack(self) -> bytes:
        raw = bytearray(SUPERBLOCK_BYTES)
        _SUPERBLOCK.pack_into(
            raw, 0, _SUPERBLOCK_MAGIC, FORMAT_VERSION, 0, self.number, self.format_id, self.uuid, self.slot_bytes,
            self.slots, self.first_generation, self.file_bytes, self.created_ns,
        )  # fmt: skip
        raw[-8:] = xxhash.xxh3_64_intdigest(raw[:-8]).to_bytes(8, "little")
        return bytes(raw)


def _mixed(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Return the words mixed by the finalizer of SplitMix64 (Steele et al., OOPSLA 2014): neighbouring numbers give
    numbers far from each other.
    """
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def stored_word(nbytes: int, codec: int) -> int:
    """Pack the length `nbytes` of stored bytes and the number of their `codec` (0 for none) into one 64-bit number."""
    return codec << CODEC_SHIFT | nbytes


def slots_that_fit(file_bytes: int, slot_bytes: int) -> int:
    """Return how many slots of `slot_bytes` bytes a slab file of `file_bytes` bytes has room for, beside its
    superblocks and records.
    """
    room_bytes = aligned_down(file_bytes) - 2 * SUPERBLOCK_BYTES
    slots = max(0, room_bytes // (slot_bytes + RECORD_BYTES))
    while slots and aligned_up(slots * RECORD_BYTES) + slots * slot_bytes > room_bytes:
        slots -= 1
    return slots


def smallest_file_bytes(slot_bytes: int) -> int:
    """Return the size in bytes of a slab file that has one slot of `slot_bytes` bytes."""
    return 2 * SUPERBLOCK_BYTES + ALIGNMENT_BYTES + slot_bytes


def read_superblock(raw: bytes) -> Superblock | int | str:
    """Parse the bytes `raw` of a superblock, the description of a slab file. Return it as an object, or its format
    version as a number if this code does not read that version, or a sentence about what is wrong.
    """
    if len(raw) < SUPERBLOCK_BYTES:
        return f"superblock cut short: {len(raw)} of {SUPERBLOCK_BYTES} bytes"
    magic, version, _flags, number, format_id, uuid, slot_bytes, slots, generation, file_bytes, created = (
        _SUPERBLOCK.unpack_from(raw)
    )
    if magic != _SUPERBLOCK_MAGIC:
        return "no superblock here: wrong magic"
    if xxhash.xxh3_64_intdigest(raw[: SUPERBLOCK_BYTES - 8]) != int.from_bytes(raw[SUPERBLOCK_BYTES - 8 :], "little"):
        return "superblock checksum does not hold"
    if version != FORMAT_VERSION:
        return int(version)
    return Superblock(uuid, format_id, number, slot_bytes, slots, generation, file_bytes, created)


def pack_record(header: BlockHeader, state: RecordState, sequence: int, seed: int) -> bytes:
    """Return the 256-byte record of a slot in `state`, with the `header` of its block but without token ids. `sequence`
    is the commit's number; `seed` is the slot's `Superblock.record_seed`, which goes into the checksum.
    """
    raw = bytearray(RECORD_BYTES)
    codec, stored_bytes, stored_checksum = header.coded or (0, header.payload_bytes, header.checksum)
    _RECORD.pack_into(
        raw, 0, _RECORD_MAGIC, FORMAT_VERSION, state, 0, header.generation, sequence, header.key, header.parent,
        header.extra, header.fingerprint, header.tenant, header.group, codec, header.depth,
        len(header.tokens) // 4, header.error, header.payload_bytes, header.checksum, header.created_ns, stored_bytes,
        stored_checksum, header.kept, header.seal[:KEY_NUMBER_BYTES],
    )  # fmt: skip
    raw[_RECORD_CHECKSUM_OFFSET:] = _record_checksum(raw, seed).to_bytes(8, "little")
    return bytes(raw)


def nothing_at(generation: int) -> BlockHeader:
    """Return the header for the record of a slot without a block. It contains only the slot's `generation`."""
    return BlockHeader(bytes(16), bytes(16), bytes(32), bytes(16), 0, generation=generation)


def record_holds(raw: bytes, seed: int) -> bool:
    """Return True if the 256 bytes `raw` are a valid record of one certain slot. `seed` is the slot's
    `Superblock.record_seed`; with it, a record of another slot or slab is not valid.
    """
    if raw[:4] != _RECORD_MAGIC:
        return False
    return _record_checksum(raw, seed) == int.from_bytes(raw[_RECORD_CHECKSUM_OFFSET:], "little")


def record_header(raw: bytes) -> BlockHeader:
    """Return the block header that the valid 256-byte record `raw` describes, without token ids."""
    values = _RECORD.unpack_from(raw)
    generation, _sequence, key, parent, extra, fingerprint, tenant, group, codec, depth = values[4:14]
    _tokens, error, payload_bytes, checksum, created_ns, stored_bytes, stored_checksum, kept, number = values[14:23]
    return BlockHeader(
        key=key, parent=parent, extra=extra, fingerprint=fingerprint, tenant=tenant, group=group, depth=depth,
        payload_bytes=payload_bytes, generation=generation, checksum=checksum, created_ns=created_ns,
        coded=Coded(codec, stored_bytes, stored_checksum) if codec else None, kept=kept, error=error,
        seal=number if codec & SEALED else b"",
    )  # fmt: skip


def key_number(header: BlockHeader) -> bytes:
    """Return the number of the key that encrypts the block with this `header` on the medium; b"" if none does."""
    return header.seal[:KEY_NUMBER_BYTES]


def disagree(header: BlockHeader, named: BlockHeader) -> bool:
    """Return whether the header in a slot and what its record names differ in payload, stored bytes or error."""
    said = (header.payload_bytes, header.checksum, header.coded, header.error)
    return said != (named.payload_bytes, named.checksum, named.coded, named.error)


def _record_checksum(raw: bytes | bytearray, seed: int) -> int:
    return xxhash.xxh3_64_intdigest(raw[:_RECORD_CHECKSUM_OFFSET], seed=seed)
