"""The verdicts on a slab's records, as columns in memory that two processes share.

Owns the place of each column: one behind the other in whole pages, the superblocks first, each of the others with room
for all slots of all slabs, one slab behind the other. verdicts.py judges.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from kvstore_cuda.host_copies import load_if_compiled
from kvstore_tiers.nvme.early_scan import SlabReport, mapped
from kvstore_tiers.nvme.layout import RECORD_BYTES, SUPERBLOCK_BYTES, Superblock, read_superblock
from kvstore_tiers.nvme.record_checksums import RecordChecksums, words_of
from kvstore_tiers.nvme.region_reader import RecordRegion, SlabSlots, whole_pages
from kvstore_tiers.nvme.verdicts import Array, Judge, LiveBlocks, Origins, Verdicts

_NOTHING = np.empty(0)


class SharedColumns(NamedTuple):
    """The verdicts on the records of all slabs, as arrays with an entry for each slot, in memory that two processes
    share.
    """

    superblocks: Array  # the bytes of each
    live: LiveBlocks
    states: Array
    seen_generations: Array
    stored: Array

    @classmethod
    def within(cls, memory: mmap.mmap, slabs: int, slots: int) -> SharedColumns:
        """Return the arrays of verdicts on `slabs` slabs, with `slots` slots in all, as views of `memory`. They are
        writable if `memory` is.
        """
        at = 0

        def carve(shape: int | tuple[int, int], kind: Any) -> Array:
            nonlocal at
            column = np.frombuffer(memory, kind, int(np.prod(shape)), at).reshape(shape)
            at += whole_pages(column.nbytes)
            return column

        return cls._lay_out(slabs, slots, carve)

    @classmethod
    def _lay_out(cls, slabs: int, slots: int, make: Callable[..., Array]) -> SharedColumns:
        return cls(
            make((slabs, SUPERBLOCK_BYTES), np.uint8),
            LiveBlocks.room(slots, make),
            make(slots, np.uint8),
            make(slots, np.uint64),
            make(slots, np.uint64),
        )

    @classmethod
    def nbytes(cls, slabs: int, slots: int) -> int:
        """Return how many bytes of memory the arrays of verdicts on `slabs` slabs, with `slots` slots in all, take."""
        total = 0

        def count(shape: int | tuple[int, int], kind: Any) -> Array:
            nonlocal total
            total += whole_pages(int(np.prod(shape)) * np.dtype(kind).itemsize)
            return _NOTHING

        cls._lay_out(slabs, slots, count)
        return total

    def of(self, slab: int, first: int, slots: int) -> SharedColumns:
        """Return the part of the slab at position `slab`, which has `slots` slots, the first of them at `first`."""
        part = slice(first, first + slots)
        return SharedColumns(
            self.superblocks[slab], self.live.part(part), self.states[part], self.seen_generations[part],
            self.stored[part],
        )  # fmt: skip


class SlabScanner:
    """A judge of the records of whole slabs that writes its verdicts into shared memory, which the descriptor `memory`
    refers to; `layout` are the slabs that have a place there.
    """

    def __init__(self, memory: int, layout: Sequence[SlabSlots]) -> None:
        self._memory = memory
        firsts = accumulate((slots for _, slots in layout), initial=0)
        self._places = {
            place.slab: (at, first, place.slots) for at, (place, first) in enumerate(zip(layout, firsts, strict=False))
        }
        self._slots = sum(slots for _, slots in layout)
        load_if_compiled()
        self._checksums = RecordChecksums()

    @cached_property
    def columns(self) -> SharedColumns:
        """The arrays of all slabs."""
        size = len(self._places), self._slots
        return SharedColumns.within(mapped(self._memory, SharedColumns.nbytes(*size)), *size)

    def scan(self, region: RecordRegion) -> SlabReport | None:
        """Judge the records in `region`, which has all records of one slab, and return the report. Return None if
        superblock and file disagree, so that the tier must judge the slab itself.
        """
        superblock = read_superblock(region.superblock)
        if not isinstance(superblock, Superblock) or superblock.number != region.slab:
            return None
        slots = superblock.slots
        at, first, room = self._places.get(region.slab, (0, 0, 0))
        if len(region.records) < slots * RECORD_BYTES or slots != room:
            return None
        columns = self.columns.of(at, first, slots)
        columns.superblocks[:] = np.frombuffer(region.superblock, np.uint8)
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
            live=len(whole.live),
            last_sequence=whole.last_sequence,
            damaged=whole.damaged,
            truncated=whole.truncated,
            withdrawn=sorted(whole.withdrawn),
            origins=origins.raw(),
        )
