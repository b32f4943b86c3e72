"""Records that are judged as soon as they are read, before their tier is opened: one core would be idle meanwhile.

Owns one thread and what it found, slab by slab. Knows how to judge (verdicts.py) and nothing else; changes nothing.
Invariant: a verdict is used only for the very file and geometry that were judged, under reading_ahead.py's conditions.
"""

from __future__ import annotations

import os
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np

from kvstore_tiers.nvme.layout import RECORD_BYTES, Superblock, read_superblock
from kvstore_tiers.nvme.lock_mark import LockMark
from kvstore_tiers.nvme.reading_ahead import LIMIT_BYTES, Look, ReadAhead
from kvstore_tiers.nvme.record_checksums import RECORD_WORDS, RecordChecksums
from kvstore_tiers.nvme.verdicts import LiveBlocks, Origins, Verdicts, judge


class _Judged(NamedTuple):
    look: Look
    superblock: Superblock
    verdicts: list[Verdicts]
    origins: Origins


class JudgingAhead:
    """The records that `reading` reads, being judged. Takes it over."""

    def __init__(self, reading: ReadAhead) -> None:
        self._reading = reading
        self._checksums: RecordChecksums | None = None
        self._room = LiveBlocks.room(LIMIT_BYTES // RECORD_BYTES)  # for all that is read; not touched before it is used
        self._used = 0
        self._thread = ThreadPoolExecutor(1, "nvme-judge-ahead")
        self._slabs = {number: self._thread.submit(self._judge, number) for number in reading.numbers()}

    @classmethod
    def begin(cls, directory: str | os.PathLike[str]) -> JudgingAhead | None:
        """Begin to read and judge what is in a directory; None where nothing is, or where somebody has it."""
        reading = ReadAhead.begin(directory)
        return None if reading is None else cls(reading)

    def is_of(self, directory: Path, former: LockMark) -> bool:
        """See `ReadAhead`."""
        return self._reading.is_of(directory, former)

    def take(self, superblock: Superblock, origins: Origins) -> list[Verdicts] | None:
        """What all records of the slab with this geometry say, with these numbers for origins; None where it is not
        known. What is being judged is waited for, what nobody has come to is left to the caller."""
        number = superblock.number
        told: Future[_Judged | None] | None = self._slabs.pop(number, None)
        if told is None or told.cancel() or (judged := told.result()) is None:
            return None
        if judged.superblock != superblock or not self._reading.still_is(number, judged.look):
            return None
        numbers = np.array([origins.number_of(raw) for raw in judged.origins.raw()], np.uint32)
        for verdicts in judged.verdicts:
            verdicts.live.origin = numbers[verdicts.live.origin]
        return judged.verdicts

    def take_records(self, superblock: Superblock) -> memoryview | None:
        """The records of a slab that were read, or are being read, but not judged."""
        region, nbytes = self._reading.take(superblock.number), superblock.slots * RECORD_BYTES
        if region is None or len(region.records) < nbytes:
            return None
        return region.records[:nbytes] if self._reading.still_is(superblock.number, region.look) else None

    def close(self) -> None:
        """Nothing more is read, judged, nor kept. Idempotent."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._reading.close()
        self._slabs.clear()
        self._checksums = None
        self._room = LiveBlocks.room(0)

    def _judge(self, number: int) -> _Judged | None:
        region = self._reading.wait_for(number)
        superblock = None if region is None else read_superblock(region.superblock)
        if region is None or not isinstance(superblock, Superblock):
            return None
        slots = superblock.slots
        if superblock.number != number or len(region.records) < slots * RECORD_BYTES:
            return None
        if self._checksums is None:
            self._checksums = RecordChecksums()
        records = np.frombuffer(region.records, "<u8", slots * RECORD_WORDS).reshape(slots, RECORD_WORDS)
        origins, room = Origins(), self._room.part(slice(self._used, self._used + slots))
        self._used += slots
        verdicts = judge(superblock, region.look.length_bytes, 0, records, self._checksums, origins, room)
        return _Judged(region.look, superblock, verdicts, origins)
