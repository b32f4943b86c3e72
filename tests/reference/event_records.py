"""Changes of blocks for tests of KV events: made of blocks, and read as blocks, where the code has columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kvstore_proto.identity import NO_PARENT
from kvstored.events.encoding import hashes_of
from kvstored.events.records import Changes, StoredBlocks


class StoredBlock(NamedTuple):
    """A block that is stored at `row`, in the tiers of `mask`; `hash` and `parent` are numbers in events."""

    row: int
    kind: int
    mask: int
    hash: int
    parent: int = 0
    tokens: bytes = b""


def hash_of(key: bytes) -> int:
    return int(hashes_of(np.frombuffer(key, np.uint8))[0])


def changes_of(
    gone: Sequence[int] = (), changed: Sequence[tuple[int, int]] = (), stored: Sequence[StoredBlock] = ()
) -> Changes:
    """Return a message of these changes. Each of `changed` is a row and its new set of tiers."""
    columns = StoredBlocks(
        np.array([block.row for block in stored], np.uint32),
        np.array([block.kind for block in stored], np.uint32),
        np.array([block.mask for block in stored], np.uint8),
        np.array([len(block.tokens) // 4 for block in stored], np.uint16),
        np.array([block.hash for block in stored], np.uint64),
        np.array([block.parent for block in stored], np.uint64),
        b"".join(block.tokens for block in stored),
    )
    rows, masks = ([each[at] for each in changed] for at in (0, 1))
    return Changes(np.array(gone, np.uint32), np.array(rows, np.uint32), np.array(masks, np.uint8), columns)


def blocks_of(changes: Changes) -> list[StoredBlock]:
    """Return the stored blocks of a message."""
    columns, end, found = changes.stored, 0, []
    for row, kind, mask, count, own, parent in zip(*(column.tolist() for column in columns[:6]), strict=True):
        begin, end = end, end + 4 * count
        found.append(StoredBlock(row, kind, mask, own, parent, columns.tokens[begin:end]))
    return found


assert hash_of(NO_PARENT) == 0
