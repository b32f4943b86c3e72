"""The verdicts on a slab's records, as columns in memory that two processes share.

Owns the place of each column: one behind the other in whole pages, the slab's superblock first, each of the others with
room for all slots; and the places of the slabs, one behind the other. verdicts.py judges.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from kvstore_cuda.host_copies import load_if_compiled
from kvstore_tiers.nvme.early_scan import SHARED, SlabReport
from kvstore_tiers.nvme.layout import RECORD_BYTES, SUPERBLOCK_BYTES, Superblock, read_superblock
from kvstore_tiers.nvme.record_checksums import RecordChecksums, words_of
from kvstore_tiers.nvme.region_reader import RecordRegion, whole_pages
from kvstore_tiers.nvme.verdicts import Array, Judge, LiveBlocks, Origins, Verdicts

_NOTHING = np.empty(0)


class SharedColumns(NamedTuple):
    """The verdicts on the records of one slab, as arrays with an entry for each slot, in memory that two processes
    share.
    """

    superblock: Array  # its bytes
    live: LiveBlocks
    states: Array
    seen_generations: Array
    stored: Array

    @classmethod
    def within(cls, memory: mmap.mmap, slots: int) -> SharedColumns:
        """Return the arrays of verdicts on a slab with `slots` slots as views of `memory`. They are writable if
        `memory` is.
        """
        at = 0

        def carve(shape: int | tuple[int, int], kind: Any) -> Array:
            nonlocal at
            column = np.frombuffer(memory, kind, int(np.prod(shape)), at).reshape(shape)
            at += whole_pages(column.nbytes)
            return column

        return cls._lay_out(slots, carve)

    @classmethod
    def _lay_out(cls, slots: int, make: Callable[..., Array]) -> SharedColumns:
        return cls(
            make(SUPERBLOCK_BYTES, np.uint8),
            LiveBlocks.room(slots, make),
            make(slots, np.uint8),
            make(slots, np.uint64),
            make(slots, np.uint64),
        )

    @classmethod
    def nbytes(cls, slots: int) -> int:
        """Return how many bytes of memory the arrays of verdicts on a slab with `slots` slots take."""
        total = 0

        def count(shape: int | tuple[int, int], kind: Any) -> Array:
            nonlocal total
            total += whole_pages(int(np.prod(shape)) * np.dtype(kind).itemsize)
            return _NOTHING

        cls._lay_out(slots, count)
        return total


class SlabScanner:
    """A judge of the records of whole slabs that writes its verdicts into shared memory, which the descriptor `memory`
    refers to and which grows with each slab.
    """

    def __init__(self, memory: int) -> None:
        self._memory = memory
        self._end = 0
        load_if_compiled()
        self._checksums = RecordChecksums()

    def scan(self, region: RecordRegion) -> SlabReport | None:
        """Judge the records in `region`, which has all records of one slab, and return the report. Return None if
        superblock and file disagree, so that the tier must judge the slab itself.
        """
        superblock = read_superblock(region.superblock)
        if not isinstance(superblock, Superblock) or superblock.number != region.slab:
            return None
        slots = superblock.slots
        if len(region.records) < slots * RECORD_BYTES:
            return None
        begin, nbytes = self._end, SharedColumns.nbytes(slots)
        self._end += nbytes
        os.ftruncate(self._memory, self._end)
        columns = SharedColumns.within(mmap.mmap(self._memory, nbytes, flags=SHARED, offset=begin), slots)
        columns.superblock[:] = np.frombuffer(region.superblock, np.uint8)
        origins = Origins()
        judge = Judge(superblock, region.stamp.length_bytes, self._checksums, origins)
        pieces = judge.judge(0, words_of(region.records, slots), columns.live)
        whole = Verdicts.joined(pieces, columns.live)
        columns.states[:] = whole.states
        columns.seen_generations[:] = whole.seen_generations
        columns.stored[:] = whole.stored
        return SlabReport(
            slab=region.slab,
            stamp=region.stamp,
            begin=begin,
            nbytes=nbytes,
            live=len(whole.live),
            last_sequence=whole.last_sequence,
            damaged=whole.damaged,
            truncated=whole.truncated,
            withdrawn=sorted(whole.withdrawn),
            origins=origins.raw(),
        )
