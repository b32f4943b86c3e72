"""What was found out about the records of a slab, as columns in memory that two processes share.

Owns where each column lies: the slab's superblock in the first page, then the columns one behind the other, each with
room for all slots. Never judges.
"""

from __future__ import annotations

import mmap
from typing import Any, NamedTuple

import numpy as np

from kvstore_tiers.nvme.layout import SUPERBLOCK_BYTES
from kvstore_tiers.nvme.verdicts import Array, LiveBlocks

_BYTES_A_SLOT = 72 + 17  # live columns; states, generations, payload lengths
_ALIGNMENT = 64
_COLUMNS = 11


class SharedColumns(NamedTuple):
    """Columns of a slab, in memory."""

    superblock: Array  # its bytes
    live: LiveBlocks
    states: Array
    seen_generations: Array
    payload_bytes: Array

    @classmethod
    def within(cls, memory: mmap.mmap, slots: int) -> SharedColumns:
        """Those of a slab of so many slots; as writable as the memory is."""
        at = 0

        def carve(shape: int | tuple[int, int], kind: Any) -> Array:
            nonlocal at
            count = int(np.prod(shape))
            column = np.frombuffer(memory, kind, count, at).reshape(shape)
            at += -(-column.nbytes // _ALIGNMENT) * _ALIGNMENT
            return column

        return cls(
            carve(SUPERBLOCK_BYTES, np.uint8),
            LiveBlocks.room(slots, carve),
            carve(slots, np.uint8),
            carve(slots, np.uint64),
            carve(slots, np.uint64),
        )


def shared_bytes(slots: int) -> int:
    """How much memory a slab of so many slots takes: whole pages."""
    nbytes = SUPERBLOCK_BYTES + slots * _BYTES_A_SLOT + _COLUMNS * _ALIGNMENT
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
