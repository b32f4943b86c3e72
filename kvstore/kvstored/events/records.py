"""What the daemon writes to the process that publishes events: a stream of records, each a change of one block.

    kind     u8 1, u32 number, u32 tokens a block, u16 group, u16 length, topic
    stored   u8 2, u8 mask, u32 kind, 16 key, 16 parent, u16 count, count * 4 bytes of token ids
    changed  u8 3, u8 mask, u32 kind, 16 key            a block that has been `stored` before; mask 0: gone
    reset    u8 4                                       forget everything: all blocks are `stored` again
The first message of a connection is the settings: u32 length, JSON. Little-endian.
Invariants: a kind comes before its first block; a block's `stored` before its `changed`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

KIND, STORED, CHANGED, RESET = 1, 2, 3, 4
KIND_HEAD = struct.Struct("<BIIHH")
STORED_HEAD = struct.Struct("<BBI16s16sH")
CHANGED_HEAD = struct.Struct("<BBI16s")
_SIZES = {KIND: KIND_HEAD.size, STORED: STORED_HEAD.size, CHANGED: CHANGED_HEAD.size, RESET: 1}
STATISTICS = struct.Struct("<QQQ")  # from the process: events published, batches replayed, snapshots; since its start


class KindRecord(NamedTuple):
    number: int
    block_tokens: int
    group: int
    topic: bytes


class StoredRecord(NamedTuple):
    mask: int
    kind: int
    key: bytes
    parent: bytes
    tokens: bytes


class ChangedRecord(NamedTuple):
    mask: int
    kind: int
    key: bytes


class ResetRecord(NamedTuple):
    pass


Record = KindRecord | StoredRecord | ChangedRecord | ResetRecord


def pack_kind(number: int, block_tokens: int, group: int, topic: bytes) -> bytes:
    return KIND_HEAD.pack(KIND, number, block_tokens, group, len(topic)) + topic


def unpack(data: bytearray) -> Iterator[Record]:
    """The whole records at the start of `data`, which keeps what is after them."""
    at, end = 0, len(data)
    try:
        while at < end:
            form = data[at]
            begin, at_next = at, at + _SIZES[form]
            if at_next > end:
                return
            if form == CHANGED:
                _, mask, kind, key = CHANGED_HEAD.unpack_from(data, begin)
                at = at_next
                yield ChangedRecord(mask, kind, key)
            elif form == STORED:
                _, mask, kind, key, parent, count = STORED_HEAD.unpack_from(data, begin)
                if at_next + 4 * count > end:
                    return
                at = at_next + 4 * count
                yield StoredRecord(mask, kind, key, parent, bytes(data[at_next:at]))
            elif form == KIND:
                _, number, block_tokens, group, length = KIND_HEAD.unpack_from(data, begin)
                if at_next + length > end:
                    return
                at = at_next + length
                yield KindRecord(number, block_tokens, group, bytes(data[at_next:at]))
            else:
                at = at_next
                yield ResetRecord()
    finally:
        del data[:at]
