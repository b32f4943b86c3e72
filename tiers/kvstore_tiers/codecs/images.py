"""Coded images are slot images in the form of a codec: they are encoded in memory outside the slots, and decoded while
they are read.

The module owns the two checksums of a coded image, one of the payload and one of the stored bytes; the decoder verifies
both. It also owns the slot sizes of coded images. Payloads of one size share few slot sizes, `SIZES_A_PAYLOAD` at most,
so that few slabs and arenas serve all stored sizes; up to 1 / `SIZES_A_PAYLOAD` of the payload is lost to rounding.
Invariant: a payload is delivered only if the stored bytes and the payload both had the right checksum. In the form of
a lossy codec the payload is what decoding gives: it is decoded once before it is stored, and has a checksum of its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from kvstore_proto.arena import HEADER_BYTES, BlockHeader, Coded, slot_bytes
from kvstore_tiers.base import Outcome, OutcomeKind
from kvstore_tiers.codecs import Codec, CodingError, NotReadable, ShapeOf, Undecodable, codec_name, codec_numbered
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

SIZES_A_PAYLOAD = 64


def image_bytes(codec: Codec, payload_bytes: int) -> int:
    """Return the bytes of memory that `encode_image` needs for a payload."""
    decoded_bytes = aligned_up(payload_bytes) if codec.is_lossy else 0
    return HEADER_BYTES + aligned_up(codec.bound(payload_bytes)) + decoded_bytes


def coded_slot_bytes(payload_bytes: int, stored_bytes: int) -> int:
    """Return the size of a slot for `stored_bytes` that a codec wrote. It is at most the size of a slot for the payload
    as it is; 0 stored bytes give that size."""
    whole = slot_bytes(payload_bytes)
    step = aligned_up(-(-(whole - HEADER_BYTES) // SIZES_A_PAYLOAD))
    return min(whole, HEADER_BYTES + -(-stored_bytes // step) * step) if stored_bytes else whole


def encode_image(codec: Codec, shape_of: ShapeOf, source: Segment, expect_key: bytes, target: Segment) -> Outcome:
    """Write the image `source`, whose payload is stored as it is, to `target` in the form of `codec`.

    `target` has `image_bytes` bytes. `shape_of` gives the shape of a fingerprint's payloads. The outcome DONE has the
    header of the new image. A header without a codec says that the block would take no smaller slot in this form, or
    would have a larger error than the codec may make; `target` then holds no image. The error of a lossy image comes on
    top of the error of `source`. FAILED: the codec failed. CORRUPT: `source` does not hold the block `expect_key`.
    """
    header = image_header(source, expect_key)
    if isinstance(header, str):
        return Outcome(OutcomeKind.CORRUPT, message=header)
    outcome = _encoded(codec, shape_of, header, source.address + HEADER_BYTES, target)
    # Last, as the codec reads the payload too: what changed before that is not passed off as what was put.
    if checksum_at(source.address + HEADER_BYTES, header.payload_bytes) != header.checksum:
        return Outcome(OutcomeKind.CORRUPT, message="the payload's checksum does not hold")
    return outcome


def _encoded(codec: Codec, shape_of: ShapeOf, header: BlockHeader, payload_address: int, target: Segment) -> Outcome:
    """Do what `encode_image` says with the payload at `payload_address`, whose checksum the caller verifies."""
    target_address = target.address + HEADER_BYTES
    if not header.payload_bytes or image_bytes(codec, header.payload_bytes) > target.nbytes:
        return Outcome(OutcomeKind.DONE, header)
    bound = codec.bound(header.payload_bytes)
    payload, room = view(payload_address, header.payload_bytes), view(target_address, bound)
    try:
        shape = shape_of(header.fingerprint, header.group, header.payload_bytes)
        encoded = codec.encode(header, shape, payload, room)
        length = encoded.nbytes
        if not 0 <= length <= bound:
            raise ValueError(f"it gave {length} bytes, {bound} were its bound")
        if not length or coded_slot_bytes(header.payload_bytes, length) >= slot_bytes(header.payload_bytes):
            return Outcome(OutcomeKind.DONE, header)
        checksum, error = header.checksum, header.error
        if codec.is_lossy:
            decoded = target_address + aligned_up(bound)
            codec.decode(room[:length], view(decoded, header.payload_bytes))
            checksum = checksum_at(decoded, header.payload_bytes)
            if checksum != header.checksum:
                made = judge_error(codec, encoded.error)
                if made is None:
                    return Outcome(OutcomeKind.DONE, header)
                error = float32_above(error + made)
    except Exception as failure:  # of a library, perhaps: the block is stored as it is
        return Outcome(OutcomeKind.FAILED, message=f"{type(failure).__name__}: {failure}")
    form = Coded(codec.number, length, checksum_at(target_address, length))
    coded = replace(header, checksum=checksum, coded=form, error=error)
    put_bytes(target.address, coded.pack())
    return Outcome(OutcomeKind.DONE, coded, length)


def judge_error(codec: Codec, error: CodingError | None) -> float | None:
    """Return the bound of the differences that a lossy codec made in a block; None when they are larger than it may
    make. Raises ValueError for an error that is no bound."""
    if error is None or not (0 < error.max_abs < math.inf and math.isfinite(error.relative_rms)):
        raise ValueError(f"it changed the payload, by {error}")
    return error.max_abs if error.relative_rms <= codec.most_error else None


def float32_above(number: float) -> float:
    """Return the least float32 that is not below `number`."""
    nearest = np.float32(number)
    return float(nearest if nearest >= number else np.nextafter(nearest, np.float32(math.inf)))


def judge_stored(header: BlockHeader, stored: Sequence[Segment]) -> Outcome | None:
    """Return the outcome CORRUPT when the checksum of a block's stored bytes is wrong; None when it is right."""
    if checksum_of(stored, header.stored_bytes) == header.stored_checksum:
        return None
    return Outcome(OutcomeKind.CORRUPT, message=false_checksum(header))


def decode_image(header: BlockHeader, stored: Segment, segments: Sequence[Segment]) -> Outcome:
    """Fill `segments` with the payload of a block. `stored` has its encoded bytes, whose checksum was verified before.

    The outcome DONE has the header of the payload as it is. After CORRUPT or UNREADABLE the segments hold garbage.
    FAILED: the payload does not fit into the segments, or the codec failed, perhaps for lack of memory.
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
        checksum = codec.decode_and_hash(view(stored.address, header.stored_bytes), view(whole.address, nbytes))
    except NotReadable as error:
        return Outcome(OutcomeKind.UNREADABLE, message=f"codec {codec.name} cannot read its bytes here: {error}")
    except Undecodable as error:
        return Outcome(OutcomeKind.CORRUPT, message=f"codec {codec.name} cannot read its bytes: {error}")
    except Exception as error:  # of a library, or a lack of memory, which may pass: the bytes may be as they were put
        return Outcome(OutcomeKind.FAILED, message=f"codec {codec.name} failed: {type(error).__name__}: {error}")
    if checksum != header.checksum:
        return Outcome(OutcomeKind.CORRUPT, message=f"what codec {codec.name} gives back is not the payload")
    if len(own) > 1:
        scatter(whole.address, nbytes, own)
    return Outcome(OutcomeKind.DONE, header.without_codec(), nbytes)


def view(address: int, nbytes: int) -> memoryview:
    """Return a writable view of the `nbytes` bytes at `address`. The caller keeps this memory alive."""
    return memoryview(buffer_at(address, nbytes)).cast("B")
