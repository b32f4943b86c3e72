"""Slots, and slot images in host memory or a file: a header page and a payload, whole.

The module owns the rules of a valid image: the check of its header, the check of the payload against it, and that the
header is written last. It does not move payload bytes. Invariant: an image whose header passes `image_header` had its
whole payload in place before that header was written.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from kvstore_proto.arena import ALIGNMENT_BYTES, HEADER_BYTES, BlockHeader, read_header
from kvstore_tiers.segments import Segment, buffer_at, put_bytes


def require_slot_size(nbytes: int) -> None:
    """Raise ValueError unless `nbytes` is a size a slot can have."""
    if nbytes <= 0 or nbytes % ALIGNMENT_BYTES:
        raise ValueError(f"a slot is a positive multiple of {ALIGNMENT_BYTES} bytes, not {nbytes}")


def aligned_up(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def aligned_down(nbytes: int) -> int:
    return nbytes // ALIGNMENT_BYTES * ALIGNMENT_BYTES


class Slot(NamedTuple):
    """A place for one block. `nbytes` includes header and padding; `generation` grows each time a place is reused."""

    container: int  # arena or slab number
    offset: int
    nbytes: int
    generation: int


@dataclass(frozen=True, slots=True)
class FileImage:
    """An image that a tier may read by itself: from `offset` on a header page with this `generation`, then
    `payload_bytes` of payload and zeros up to the end of the page. `descriptor` can read the file and not write it,
    past the page cache if the file system supports that.
    """

    descriptor: int
    offset: int
    payload_bytes: int
    generation: int

    @property
    def nbytes(self) -> int:
        return HEADER_BYTES + aligned_up(self.payload_bytes)


FIXED_BYTES = 256  # the part of a header page before the token ids
FLAGS_OFFSET = 6
RETIRED = (1).to_bytes(2, "little")  # in the flags: the block is gone, the bytes are kept for readers that hold a lease


def judge_header(raw: bytes, expect_key: bytes, room_bytes: int, generation: int | None = None) -> BlockHeader | str:
    """Return the header in 4096 raw bytes, or a sentence about its fault.

    It must hold its own checksum, name `expect_key`, describe at most `room_bytes` stored bytes and, where
    `generation` is given, belong to that use of the slot.
    """
    header = read_header(raw)
    if isinstance(header, str):
        return header
    if header.key != expect_key:
        return f"the slot holds block {header.key.hex()}, not {expect_key.hex()}"
    if generation is not None and header.generation != generation:
        return f"the slot holds generation {header.generation}, not {generation}"
    if header.stored_bytes > room_bytes:
        return f"the header says {header.stored_bytes} stored bytes, the slot has room for {room_bytes}"
    return header


def image_header(image: Segment, expect_key: bytes) -> BlockHeader | str:
    """Return the header of a slot image in host memory, or its fault, which includes a wrong generation and any
    difference from the vouched header.
    """
    raw = buffer_at(image.address, HEADER_BYTES).raw
    if image.vouched is not None and raw != image.vouched.pack():
        return "the header was written to"
    return judge_header(raw, expect_key, image.nbytes - HEADER_BYTES, image.generation or None)


def false_checksum(header: BlockHeader) -> str:
    """Return the sentence for stored bytes that do not have the checksum of their header."""
    whose = "stored bytes'" if header.codec else "payload's"
    return f"the {whose} checksum does not hold"


def stamp_header(image: Segment, header: BlockHeader, checksum: int | None = None) -> BlockHeader:
    """Write `header` to the front of an image with the image's own generation (and the payload's checksum, if given),
    and return the stamped header.
    """
    stamped = header.stamped(image.generation, header.checksum if checksum is None else checksum)
    put_bytes(image.address, stamped.pack())
    return stamped


def erase_header(image: Segment) -> None:
    """Make an image hold no block: a later scan of the memory finds none there."""
    put_bytes(image.address, bytes(FIXED_BYTES))


def mark_retired(image: Segment) -> None:
    """Set the retired flag of a header in place. Its checksum does not match afterwards, and should not: only a reader
    with a lease, which compares key and generation, still sees a block here.
    """
    put_bytes(image.address + FLAGS_OFFSET, RETIRED)
