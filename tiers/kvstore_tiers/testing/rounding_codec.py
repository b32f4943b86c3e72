"""The rounding codec is for tests only: it is lossy, quick, and its error is known exactly.

A frame is a mark, and the high byte of each 16-bit number of the payload; the low byte
comes back as 0. A payload of an odd length keeps its last byte.
"""

from __future__ import annotations

import numpy as np

from kvstore_proto.arena import BlockHeader
from kvstore_tiers.codecs import Codec, CodingError, Encoded, Undecodable

_MARK = b"ROUN"
_ERROR = CodingError(1 / 256, 255.0)


class RoundingCodec(Codec):
    """Encodes and decodes the frames that the module describes."""

    name = "rounding"
    number = 254
    is_lossy = True

    def bound(self, payload_bytes: int) -> int:
        return len(_MARK) + payload_bytes // 2 + payload_bytes % 2

    def encode(self, _header: BlockHeader, _shape: object, payload: memoryview, target: memoryview) -> Encoded:
        np.copyto(np.frombuffer(target, np.uint8)[: len(_MARK)], np.frombuffer(_MARK, np.uint8))
        numbers, end = np.frombuffer(payload, np.uint8), self.bound(len(payload))
        made = np.frombuffer(target, np.uint8)[len(_MARK) : end]
        made[: len(numbers) // 2] = numbers[1::2]
        made[len(numbers) // 2 :] = numbers[len(numbers) & ~1 :]
        return Encoded(end, _ERROR)

    def decode(self, stored: memoryview, payload: memoryview) -> None:
        if len(stored) != self.bound(len(payload)):
            raise Undecodable(f"{len(stored)} bytes are no frame of {len(payload)}")
        if stored[: len(_MARK)] != _MARK:
            raise Undecodable("it is none of its frames")
        numbers, kept = np.frombuffer(payload, np.uint8), np.frombuffer(stored, np.uint8)[len(_MARK) :]
        numbers[0 : len(numbers) & ~1 : 2] = 0
        numbers[1::2] = kept[: len(numbers) // 2]
        numbers[len(numbers) & ~1 :] = kept[len(numbers) // 2 :]

    def error(self, stored: memoryview) -> CodingError | None:
        return _ERROR
