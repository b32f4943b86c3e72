"""Judges the records of whole slabs, and leaves what they say in shared memory, one slab behind the other.

Owns where the columns of each slab begin. verdicts.py judges, shared_columns.py knows how they lie.
"""

from __future__ import annotations

import mmap
import os

import numpy as np

from kvstore_tiers.nvme.early_scan import SlabReport
from kvstore_tiers.nvme.layout import RECORD_BYTES, Superblock, read_superblock
from kvstore_tiers.nvme.record_checksums import RecordChecksums, words_of
from kvstore_tiers.nvme.region_reader import Region
from kvstore_tiers.nvme.shared_columns import SharedColumns
from kvstore_tiers.nvme.verdicts import Origins, Verdicts, judge


class SlabJudge:
    """Writes to the memory behind a descriptor, which grows."""

    def __init__(self, memory: int) -> None:
        self._memory = memory
        self._end = 0
        self._checksums = RecordChecksums()

    def judge(self, region: Region) -> SlabReport | None:
        """What the records in this region say; None where that is not known: somebody else will look."""
        superblock = read_superblock(region.superblock)
        if not isinstance(superblock, Superblock) or superblock.number != region.slab:
            return None
        slots = superblock.slots
        if len(region.records) < slots * RECORD_BYTES:
            return None
        begin, nbytes = self._end, SharedColumns.nbytes(slots)
        self._end += nbytes
        os.ftruncate(self._memory, self._end)
        columns = SharedColumns.within(mmap.mmap(self._memory, nbytes, offset=begin), slots)
        columns.superblock[:] = np.frombuffer(region.superblock, np.uint8)
        origins = Origins()
        records, length_bytes = words_of(region.records, slots), region.look.length_bytes
        pieces = judge(superblock, length_bytes, 0, records, self._checksums, origins, columns.live)
        whole = Verdicts.joined(pieces, columns.live)
        columns.states[:] = whole.states
        columns.seen_generations[:] = whole.seen_generations
        columns.payload_bytes[:] = whole.payload_bytes
        return SlabReport(
            slab=region.slab,
            look=region.look,
            begin=begin,
            nbytes=nbytes,
            live=len(whole.live),
            last_sequence=whole.last_sequence,
            damaged=whole.damaged,
            truncated=whole.truncated,
            withdrawn=sorted(whole.withdrawn),
            origins=origins.raw(),
        )
