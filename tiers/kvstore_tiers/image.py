"""Slots, and slot images in host memory or a file: a header page and a payload, whole.

The module owns the rules of a valid image: the check of its header, the check of the payload against it, and that the
header is written last. It does not move payload bytes. Invariant: an image whose header passes `image_header` had its
whole payload in place before that header was written.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

from kvstore_proto.arena import ALIGNMENT_BYTES, HEADER_BYTES, BlockHeader, read_header
from kvstore_tiers.segments import Segment, buffer_at, put_bytes


def require_slot_size(nbytes: int) -> None:
    """Raise ValueError unless `nbytes` is a positive multiple of 4096, which every slot's size must be."""
    if nbytes <= 0 or nbytes % ALIGNMENT_BYTES:
        raise ValueError(f"a slot is a positive multiple of {ALIGNMENT_BYTES} bytes, not {nbytes}")


def aligned_up(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def aligned_down(nbytes: int) -> int:
    return nbytes // ALIGNMENT_BYTES * ALIGNMENT_BYTES


class Slot(NamedTuple):
    """The address of the place of one block in a tier: a container (an arena or a slab file) and an offset in bytes.
    `nbytes` includes the header page and padding. `generation` grows each time the place is used again.
    """

    container: int  # arena or slab number
    offset: int
    nbytes: int
    generation: int


class FileImage(NamedTuple):
    """The place of a stored block in a file, which another tier may read itself. At `offset` of the file is a header
    page with this `generation`, then `payload_bytes` bytes of payload, then zeros up to a whole page. `descriptor` is
    read-only, and bypasses the page cache if the file system can.
    """

    descriptor: int
    offset: int
    payload_bytes: int
    generation: int

    @property
    def nbytes(self) -> int:
        return HEADER_BYTES + aligned_up(self.payload_bytes)


def require_fits(slot: Slot, header: BlockHeader, segments: Sequence[Segment]) -> None:
    """Raise RuntimeError unless `segments` together have as many bytes as `header` says are stored, and these fit
    `slot` behind a header page of 4096 bytes.
    """
    given_bytes = sum(segment.nbytes for segment in segments)
    if given_bytes != header.stored_bytes:
        raise RuntimeError(f"the header says {header.stored_bytes} stored bytes, the segments hold {given_bytes}")
    if HEADER_BYTES + given_bytes > slot.nbytes:
        raise RuntimeError(f"{given_bytes} stored bytes and a header do not fit a slot of {slot.nbytes}")


FIXED_BYTES = 256  # the part of a header page before the token ids
FLAGS_OFFSET = 6
RETIRED = (1).to_bytes(2, "little")  # in the flags: the block is gone, the bytes are kept for readers that hold a lease


def judge_header(raw: bytes, expect_key: bytes, room_bytes: int, generation: int | None = None) -> BlockHeader | str:
    """Return the block header in the 4096 bytes `raw`, or a sentence about its fault. A valid header has a right
    checksum, the key `expect_key`, at most `room_bytes` stored bytes and, if it is given, this `generation`.
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
    """Return the header of the slot image `image` in host memory, or a sentence about its fault. The header must have
    the key `expect_key` and the image's generation. If the image has a vouched header (which this process wrote), the
    header must equal it. The payload is not checked.
    """
    raw = buffer_at(image.address, HEADER_BYTES).raw
    if image.vouched is not None and raw != image.vouched.ljust(HEADER_BYTES, b"\0"):
        return "the header was written to"
    return judge_header(raw, expect_key, image.nbytes - HEADER_BYTES, image.generation or None)


def false_checksum(header: BlockHeader) -> str:
    """Return a sentence for an operator which says that a block's stored bytes do not have the checksum in its
    `header`.
    """
    whose = "stored bytes'" if header.codec else "payload's"
    return f"the {whose} checksum does not hold"


def stamp_header(image: Segment, header: BlockHeader, checksum: int | None = None) -> BlockHeader:
    """Write `header` to the first page of `image`, with the generation of `image` and, if given, the payload's
    `checksum`. Return the header as written.
    """
    stamped = header.stamped(image.generation, header.checksum if checksum is None else checksum)
    put_bytes(image.address, stamped.pack())
    return stamped


def erase_header(address: int) -> None:
    """Overwrite the header of the slot image at `address` with zeros, so that no later scan of the memory finds a block
    in this slot."""
    ctypes.memset(address, 0, FIXED_BYTES)


def mark_retired(image: Segment) -> None:
    """Set the flag in the header of `image` that says that its block is gone. The header's checksum is then wrong, on
    purpose: only a reader with a lease, which compares key and generation alone, still reads this block.
    """
    put_bytes(image.address + FLAGS_OFFSET, RETIRED)
