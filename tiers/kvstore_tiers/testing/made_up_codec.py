"""The made-up codec is for tests only: nobody can foretell the size of its output. It proves the use of codecs, and
saves little.

A frame is a mark, eight bytes of the block's key, the payload (deflated if that makes it shorter), and padding. A hash
of the payload gives the length of the padding: none, some bytes, up to the payload's size, or up to the bound, which is
larger than the payload. So payloads of one size take slots of many sizes, and some are stored as they are.
"""

from __future__ import annotations

import os
import struct
import zlib

import numpy as np
import xxhash

from kvstore_proto.arena import BlockHeader
from kvstore_tiers.codecs import TESTING_ENVIRONMENT, Codec, Encoded, Undecodable


def allow_made_up_codec() -> None:
    """Make the codec for tests usable in this process and in the processes that it starts."""
    os.environ[TESTING_ENVIRONMENT] = "1"


_FRAME = struct.Struct("<4s8sBIIQ")  # mark, key, whether deflated, lengths of body and padding, xxh3_64 of the payload
_MARK = b"MADE"
_FASTEST = 1


class MadeUpCodec(Codec):
    """A codec for tests, whose output has a length that cannot be predicted: it deflates a payload and adds padding."""

    name = "made-up"
    number = 255

    def bound(self, payload_bytes: int) -> int:
        return _FRAME.size + payload_bytes + payload_bytes // 8 + 100

    def encode(self, header: BlockHeader, _shape: object, payload: memoryview, target: memoryview) -> Encoded:
        digest = xxhash.xxh3_64_intdigest(payload)
        body: bytes | memoryview = zlib.compress(payload, _FASTEST)
        is_deflated = len(body) < len(payload)
        body = body if is_deflated else payload
        end = _FRAME.size + len(body)
        most = (end, min(len(target), end + 5000), max(end, len(payload)), len(target))[digest % 4]
        padding = (digest >> 8) % (most - end + 1)
        _FRAME.pack_into(target, 0, _MARK, header.key[:8], is_deflated, len(body), padding, digest)
        made = np.frombuffer(target, np.uint8)
        np.copyto(made[_FRAME.size : end], np.frombuffer(body, np.uint8))
        made[end : end + padding].fill(digest & 0xFF)
        return Encoded(end + padding)

    def decode(self, stored: memoryview, payload: memoryview) -> None:
        if len(stored) < _FRAME.size:
            raise Undecodable(f"{len(stored)} bytes are no frame")
        mark, _key, is_deflated, length, padding, _digest = _FRAME.unpack_from(stored)
        if mark != _MARK:
            raise Undecodable("it is none of its frames")
        if _FRAME.size + length + padding != len(stored):
            raise Undecodable("its lengths do not add up")
        body = stored[_FRAME.size : _FRAME.size + length]
        if is_deflated:
            inflate = zlib.decompressobj()
            try:
                body = memoryview(inflate.decompress(body, len(payload) + 1))
            except zlib.error as error:
                raise Undecodable(str(error)) from None
        if len(body) != len(payload):
            raise Undecodable(f"it holds {len(body)} bytes, not {len(payload)}")
        np.copyto(np.frombuffer(payload, np.uint8), np.frombuffer(body, np.uint8))
