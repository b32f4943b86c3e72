"""The messages from the daemon to the process that publishes events; each has changes that are sent together.

    kind     u8 1, u32 number, u32 tokens a block, u16 group, u16 length, topic
    changes  u8 2, u32 each: gone, changed, stored, parents, token ids; then columns, of as many entries:
             gone     u32 row                           its block is stored nowhere now
             changed  u32 row; u8 mask                  its block is stored elsewhere now
             stored   u32 row; u32 kind; u8 mask; u16 token ids; u8 follows; 16 key
             parents  16 key                            in order, of the stored that do not follow the one before
             tokens   i32                               in order
    reset    u8 3                                       forget everything: all blocks are `stored` again
The first message of a connection is the settings: u32 length, JSON. Little-endian.
Invariants: a kind comes before its first block. In `changes` what is gone is to be applied first, then what changed,
then what is stored: a row that is gone may be another block's already.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvstore_proto.identity import KEY_BYTES
from kvstored.events.encoding import Hashes, hashes_of

KIND, CHANGES, RESET = 1, 2, 3
KIND_HEAD = struct.Struct("<BIIHH")
CHANGES_HEAD = struct.Struct("<BIIIII")
_SIZES = {KIND: KIND_HEAD.size, CHANGES: CHANGES_HEAD.size, RESET: 1}
GONE_BYTES, CHANGED_BYTES, STORED_BYTES = 4, 5, 12 + KEY_BYTES
STATISTICS = struct.Struct("<QQQ")  # from the process: events published, batches replayed, snapshots; since its start


class KindRecord(NamedTuple):
    number: int
    block_tokens: int
    group: int
    topic: bytes


class StoredBlocks(NamedTuple):
    """Columns of blocks: the block of `rows[i]` is stored in the tiers of `masks[i]`. `hashes` are the blocks' numbers
    in events, `parents` the numbers of the blocks before them in their chains, 0 for none. `counts` says how many of
    `tokens`, the token ids of all, belong to each."""

    rows: npt.NDArray[np.uint32]
    kinds: npt.NDArray[np.uint32]
    masks: npt.NDArray[np.uint8]
    counts: npt.NDArray[np.uint16]
    hashes: Hashes
    parents: Hashes
    tokens: bytes


class Changes(NamedTuple):
    """A message about changed blocks. `gone` has rows whose blocks were removed, `changed` rows whose blocks are in the
    tiers of `masks` now, and `stored` new blocks."""

    gone: npt.NDArray[np.uint32]
    changed: npt.NDArray[np.uint32]
    masks: npt.NDArray[np.uint8]
    stored: StoredBlocks


class ResetRecord(NamedTuple):
    pass


Record = KindRecord | Changes | ResetRecord


def pack_kind(number: int, block_tokens: int, group: int, topic: bytes) -> bytes:
    return KIND_HEAD.pack(KIND, number, block_tokens, group, len(topic)) + topic


def unpack(data: bytearray) -> Iterator[Record]:
    """Yield the complete messages at the start of `data`, and remove them from it."""
    at, end = 0, len(data)
    try:
        while at < end:
            form = data[at]
            begin, at_next = at, at + _SIZES[form]
            if at_next > end:
                return
            if form == CHANGES:
                _, gone, changed, stored, parents, tokens = CHANGES_HEAD.unpack_from(data, begin)
                nbytes = gone * GONE_BYTES + changed * CHANGED_BYTES + stored * STORED_BYTES
                nbytes += parents * KEY_BYTES + 4 * tokens
                if at_next + nbytes > end:
                    return
                at = at_next + nbytes
                yield _changes(bytes(data[at_next:at]), gone, changed, stored, parents)
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


def _changes(data: bytes, gone: int, changed: int, stored: int, parents: int) -> Changes:
    at = 0

    def column(code: str, count: int) -> npt.NDArray[Any]:
        nonlocal at
        found = np.frombuffer(data, code, count, at)
        at += found.nbytes
        return found

    first = column("<u4", gone), column("<u4", changed), column("u1", changed)
    rows, kinds, masks = column("<u4", stored), column("<u4", stored), column("u1", stored)
    counts, follows = column("<u2", stored), column("u1", stored)
    hashes = hashes_of(column("u1", stored * KEY_BYTES))
    above = np.zeros_like(hashes)
    above[1:] = hashes[:-1]
    above[follows == 0] = hashes_of(column("u1", parents * KEY_BYTES))
    return Changes(*first, StoredBlocks(rows, kinds, masks, counts, hashes, above, data[at:]))
