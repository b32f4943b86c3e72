"""The rounding codec is for tests only: it is lossy, quick, and its error is known exactly.

A frame is a mark, eight bytes of the block's key, and the high byte of each 16-bit number of the payload; the low byte
comes back as 0. A payload of an odd length keeps its last byte.
"""

from __future__ import annotations

import struct
from typing import ClassVar

import numpy as np

from kvstore_proto.arena import BlockHeader
from kvstore_tiers.codecs import Codec, Encoded, Undecodable

_FRAME = struct.Struct("<4s8s")
_MARK = b"ROUN"
MOST_ERROR = 255.0


class RoundingCodec(Codec):
    """Encodes and decodes the frames that the module describes."""

    name: ClassVar[str] = "rounding"
    number: ClassVar[int] = 254
    is_lossy: ClassVar[bool] = True

    def bound(self, payload_bytes: int) -> int:
        return _FRAME.size + payload_bytes // 2 + payload_bytes % 2

    def encode(self, header: BlockHeader, payload: memoryview, target: memoryview) -> Encoded:
        _FRAME.pack_into(target, 0, _MARK, header.key[:8])
        numbers, end = np.frombuffer(payload, np.uint8), self.bound(len(payload))
        made = np.frombuffer(target, np.uint8)[_FRAME.size : end]
        made[: len(numbers) // 2] = numbers[1::2]
        made[len(numbers) // 2 :] = numbers[len(numbers) & ~1 :]
        return Encoded(end, MOST_ERROR)

    def decode(self, header: BlockHeader, stored: memoryview, payload: memoryview) -> None:
        if len(stored) != self.bound(len(payload)):
            raise Undecodable(f"{len(stored)} bytes are no frame of {len(payload)}")
        mark, key = _FRAME.unpack_from(stored)
        if mark != _MARK or key != header.key[:8]:
            raise Undecodable("the frame is none of this block")
        numbers, kept = np.frombuffer(payload, np.uint8), np.frombuffer(stored, np.uint8)[_FRAME.size :]
        numbers[0 : len(numbers) & ~1 : 2] = 0
        numbers[1::2] = kept[: len(numbers) // 2]
        numbers[len(numbers) & ~1 :] = kept[len(numbers) // 2 :]
