"""Whether a mapped block is the requested one, checked in its header before a byte is used.

Compares magic, version, key, generation, payload size and, where the caller knows them, the token ids: a
stale offset, a recycled slot, a colliding key or a daemon's mistake becomes a miss. The payload's checksum is
the daemon's to verify whenever bytes come from a slower medium. Layout: `kvstore_proto.arena` (a test holds
the two together).
"""

from __future__ import annotations

import struct

from kvstore_proto.arena import MAGIC, TOKENS_OFFSET, VERSION

_HEAD = struct.Struct("<4sHH16s84xIQQ")  # magic, version, flags, key, …, token count, payload bytes, generation


def mismatch(
    arena: memoryview, offset: int, key: bytes, tokens: bytes | None, payload_bytes: int, generation: int
) -> str:
    """What differs between the header at `offset` and the requested block; empty when nothing does."""
    magic, version, _, found_key, count, found_bytes, found_generation = _HEAD.unpack_from(arena, offset)
    if magic != MAGIC or version != VERSION:
        return "no block header"
    if found_key != key:
        return "key"
    if found_generation != generation:
        return "generation"
    if found_bytes != payload_bytes:
        return "payload size"
    if tokens is None:
        return ""
    start = offset + TOKENS_OFFSET
    # tobytes: comparing memoryviews goes item by item, and takes four times as long
    if count * 4 != len(tokens) or arena[start : start + len(tokens)].tobytes() != tokens:
        return "token ids"
    return ""
