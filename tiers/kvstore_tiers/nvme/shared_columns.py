"""What was found out about the records of a slab, as columns in memory that two processes share.

Owns where each column lies: one behind the other in whole pages, the slab's superblock first, each of the others with
room for all slots. Never judges.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from kvstore_tiers.nvme.layout import SUPERBLOCK_BYTES
from kvstore_tiers.nvme.read_buffer import whole_pages
from kvstore_tiers.nvme.verdicts import Array, LiveBlocks

_NOTHING = np.empty(0)


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
            column = np.frombuffer(memory, kind, int(np.prod(shape)), at).reshape(shape)
            at += whole_pages(column.nbytes)
            return column

        return cls._laid(slots, carve)

    @classmethod
    def _laid(cls, slots: int, make: Callable[..., Array]) -> SharedColumns:
        return cls(
            make(SUPERBLOCK_BYTES, np.uint8),
            LiveBlocks.room(slots, make),
            make(slots, np.uint8),
            make(slots, np.uint64),
            make(slots, np.uint64),
        )

    @classmethod
    def nbytes(cls, slots: int) -> int:
        """How much memory those of a slab of so many slots take."""
        total = 0

        def count(shape: int | tuple[int, int], kind: Any) -> Array:
            nonlocal total
            total += whole_pages(int(np.prod(shape)) * np.dtype(kind).itemsize)
            return _NOTHING

        cls._laid(slots, count)
        return total
