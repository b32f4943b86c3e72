"""Slot images in the form of a codec: made in memory beside the slots, and turned back while they are read.

Owns the two checksums of such an image: of the payload and of the stored bytes, both verified by who turns it back.
Also the size of a slot for it: payloads of one size share a few slot sizes, `SIZES_A_PAYLOAD` at most, so that few
slabs and arenas serve any number of stored sizes, at the price of up to one part in that many of the payload.
Invariant: a payload is delivered only if the stored bytes had their checksum and the payload has its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kvstore_proto.arena import HEADER_BYTES, BlockHeader, Coded, slot_bytes
from kvstore_tiers.base import Outcome, OutcomeKind
from kvstore_tiers.codecs import Codec, Undecodable, codec_name, codec_numbered
from kvstore_tiers.image import aligned_up, false_checksum, image_header
from kvstore_tiers.segments import (
    AlignedBuffer,
    Segment,
    buffer_at,
    checksum_at,
    checksum_of,
    clipped,
    put_bytes,
    scatter,
    total_bytes,
)

SIZES_A_PAYLOAD = 32


def image_bytes(codec: Codec, payload_bytes: int) -> int:
    """Return the memory that `encode_image` needs for a payload."""
    return HEADER_BYTES + aligned_up(codec.bound(payload_bytes))


def coded_slot_bytes(payload_bytes: int, stored_bytes: int) -> int:
    """Return the size of a slot for `stored_bytes` of a codec: at most that of the payload as it is."""
    whole = slot_bytes(payload_bytes)
    step = aligned_up(-(-(whole - HEADER_BYTES) // SIZES_A_PAYLOAD))
    return min(whole, HEADER_BYTES + -(-stored_bytes // step) * step) if stored_bytes else whole


def encode_image(codec: Codec, source: Segment, expect_key: bytes, target: Segment) -> Outcome:
    """Write the image `source`, whose payload is stored as it is, to `target` in the form of `codec`.

    `target` has `image_bytes`. DONE has the header that is there now; one without a codec says that the block takes no
    smaller slot in this form: then `target` holds nothing. FAILED when the codec did; CORRUPT when `source` does not
    hold the block `expect_key`.
    """
    header = image_header(source, expect_key)
    if isinstance(header, str):
        return Outcome(OutcomeKind.CORRUPT, message=header)
    payload_address, target_address = source.address + HEADER_BYTES, target.address + HEADER_BYTES
    if checksum_at(payload_address, header.payload_bytes) != header.checksum:
        return Outcome(OutcomeKind.CORRUPT, message="the payload's checksum does not hold")
    bound = codec.bound(header.payload_bytes)
    if not header.payload_bytes or HEADER_BYTES + bound > target.nbytes:
        return Outcome(OutcomeKind.DONE, header)
    try:
        length = codec.encode(header, view(payload_address, header.payload_bytes), view(target_address, bound))
    except Exception as error:  # of a library, perhaps: the block is stored as it is
        return Outcome(OutcomeKind.FAILED, message=f"{type(error).__name__}: {error}")
    if not 0 < length <= bound:
        return Outcome(OutcomeKind.FAILED, message=f"codec {codec.name} gave {length} bytes, {bound} were its bound")
    if coded_slot_bytes(header.payload_bytes, length) >= slot_bytes(header.payload_bytes):
        return Outcome(OutcomeKind.DONE, header)
    coded = replace(header, coded=Coded(codec.number, length, checksum_at(target_address, length)))
    put_bytes(target.address, coded.pack())
    return Outcome(OutcomeKind.DONE, coded, length)


def judge_stored(header: BlockHeader, stored: Sequence[Segment]) -> Outcome | None:
    """Return what is wrong with the stored bytes of a block; None when nothing is."""
    if checksum_of(stored, header.stored_bytes) == header.stored_checksum:
        return None
    return Outcome(OutcomeKind.CORRUPT, message=false_checksum(header))


def decode_image(header: BlockHeader, stored: Segment, segments: Sequence[Segment]) -> Outcome:
    """Fill `segments` with the payload of a block whose bytes a codec made and are at `stored`, judged already.

    DONE has the header of the payload as it is. CORRUPT and UNREADABLE say that the segments hold garbage.
    """
    nbytes = header.payload_bytes
    if total_bytes(segments) < nbytes:
        return Outcome(OutcomeKind.FAILED, message=f"{nbytes} payload bytes do not fit the destination")
    codec = codec_numbered(header.codec)
    if codec is None:
        message = f"its bytes are in {codec_name(header.codec)}, which this kvstored does not have"
        return Outcome(OutcomeKind.UNREADABLE, message=message)
    own = list(clipped(segments, nbytes))
    whole = own[0] if len(own) == 1 else AlignedBuffer(nbytes).segment(nbytes)
    try:
        codec.decode(header, view(stored.address, header.stored_bytes), view(whole.address, nbytes))
    except Undecodable as error:
        return Outcome(OutcomeKind.CORRUPT, message=f"codec {codec.name} cannot read its bytes: {error}")
    except Exception as error:  # of a library, perhaps: neither the bytes nor the medium are known to be at fault
        return Outcome(OutcomeKind.UNREADABLE, message=f"codec {codec.name} failed: {type(error).__name__}: {error}")
    if checksum_at(whole.address, nbytes) != header.checksum:
        return Outcome(OutcomeKind.CORRUPT, message=f"what codec {codec.name} gives back is not the payload")
    if len(own) > 1:
        scatter(whole.address, nbytes, own)
    return Outcome(OutcomeKind.DONE, replace(header, coded=None), nbytes)


def view(address: int, nbytes: int) -> memoryview:
    """Return the `nbytes` at `address`, writable. The caller keeps that memory alive."""
    return memoryview(buffer_at(address, nbytes)).cast("B")
