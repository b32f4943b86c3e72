"""Reads live slots while the daemon writes them: direct I/O, read-only, and no false alarm.

One rule makes this sound without a lock: the daemon overwrites a slot's record before it overwrites the slot. So a slot
is suspect only if an unchanged live record stood before and after it was read.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvstore_proto.arena import HEADER_BYTES
from kvstore_tiers.image import aligned_up, false_checksum, judge_header
from kvstore_tiers.nvme.check_slab import read_records
from kvstore_tiers.nvme.directory import is_without_direct
from kvstore_tiers.nvme.directory_files import DirectoryError
from kvstore_tiers.nvme.layout import (
    RECORD_BYTES,
    SUPERBLOCK_BYTES,
    RecordState,
    Superblock,
    disagree,
    record_header,
)
from kvstore_tiers.nvme.layout import record_holds as holds
from kvstore_tiers.nvme.slab_file import find_superblock
from kvstore_tiers.segments import AlignedBuffer, buffer_at, checksum_at

_RECORDS_A_READ = 4096


@dataclass(frozen=True, slots=True)
class Suspect:
    """A slot that may be damaged: its bytes differ from its record, or the record itself is damaged (then `key` is
    empty). The key of an encrypted block is not the one that the daemon knows."""

    slab: int
    slot: int
    offset: int
    generation: int
    key: str
    reason: str
    is_encrypted: bool = False


@dataclass(frozen=True, slots=True)
class SlotReading:
    """The result of reading one slot: `nbytes` read, and the `suspect` if something is wrong. `next_slot` is the slot
    to read next.
    """

    slab: int
    next_slot: int
    nbytes: int
    suspect: Suspect | None


class SlabReader:
    """A reader of the used slots of one slab file, while the daemon may write to the file. `wait(nbytes)` is called
    before each read, and may sleep."""

    def __init__(self, path: Path, number: int, wait: Callable[[int], None]) -> None:
        self._path = path
        self._number = number
        self._wait = wait
        self._buffer = AlignedBuffer(0)

    def readings(self, first: int) -> Iterator[SlotReading]:
        """Read every used slot from the slot number `first` on, and yield the result for each. Yield nothing if the
        file is gone or has no superblock now."""
        with suppress(FileNotFoundError, DirectoryError):
            superblock = find_superblock(self._path)
            if isinstance(superblock, str):
                return
            record_fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
            slot_fd = _open_direct(self._path, record_fd)
            try:
                yield from self._read_slots(superblock, record_fd, slot_fd, first)
            finally:
                os.close(record_fd)
                os.close(slot_fd)

    def _read_slots(self, superblock: Superblock, record_fd: int, slot_fd: int, first: int) -> Iterator[SlotReading]:
        while first < superblock.slots:
            _, records, used = read_records(record_fd, superblock, first, _RECORDS_A_READ)
            for index in (first + np.flatnonzero(used)).tolist():
                nbytes, suspect = self._read_slot(superblock, record_fd, slot_fd, index)
                yield SlotReading(self._number, index + 1, nbytes, suspect)
            first += len(records)

    def _read_slot(
        self, superblock: Superblock, record_fd: int, slot_fd: int, index: int
    ) -> tuple[int, Suspect | None]:
        record = _record(record_fd, index)
        if not any(record):  # zeroed since it was found used: the slab is getting another geometry
            return RECORD_BYTES, None
        if not holds(record, superblock.record_seed(index)):
            return RECORD_BYTES, self._suspect_record(superblock, record_fd, index, record)
        if record[6] != RecordState.LIVE:
            return RECORD_BYTES, None
        named = record_header(record)
        nbytes = min(superblock.slot_bytes, HEADER_BYTES + aligned_up(named.stored_bytes))
        self._wait(nbytes)
        record = _record(record_fd, index)  # the wait may have been long
        if not holds(record, superblock.record_seed(index)) or record_header(record).generation != named.generation:
            return 0, None
        reason = self._judge(slot_fd, superblock, index, nbytes, record)
        if not reason or _record(record_fd, index) != record:
            return nbytes, None
        offset = superblock.slot_offset(index)
        return nbytes, Suspect(self._number, index, offset, named.generation, named.key.hex(), reason, bool(named.seal))

    def _suspect_record(self, superblock: Superblock, record_fd: int, index: int, record: bytes) -> Suspect | None:
        """Return a damaged record as a suspect, unless it is being written, or the slab is getting another geometry."""
        again = find_superblock(self._path)
        if _record(record_fd, index) != record or again != superblock:
            return None
        return Suspect(self._number, index, superblock.slot_offset(index), 0, "", "the record does not hold")

    def _judge(self, slot_fd: int, superblock: Superblock, index: int, nbytes: int, record: bytes) -> str:
        """Return the fault of a slot's bytes; "" if there is none."""
        if self._buffer.nbytes < nbytes:
            self._buffer = AlignedBuffer(nbytes)
        address = self._buffer.address
        try:
            got_bytes = os.preadv(slot_fd, [buffer_at(address, nbytes)], superblock.slot_offset(index))
        except OSError as error:
            return f"the slot cannot be read: {error.strerror}"
        if got_bytes != nbytes:
            return f"{got_bytes} of {nbytes} bytes are there"
        named = record_header(record)
        raw = buffer_at(address, HEADER_BYTES).raw
        header = judge_header(raw, named.key, superblock.slot_bytes - HEADER_BYTES, named.generation)
        if isinstance(header, str):
            return header
        if disagree(header, named):
            return "header and record disagree about the payload"
        if checksum_at(address + HEADER_BYTES, header.stored_bytes) != header.stored_checksum:
            return false_checksum(header)
        return ""


def _record(fd: int, index: int) -> bytes:
    return os.pread(fd, RECORD_BYTES, SUPERBLOCK_BYTES + index * RECORD_BYTES).ljust(RECORD_BYTES, b"\0")


def _open_direct(path: Path, other_fd: int) -> int:
    """Open with O_DIRECT, so that the medium is read and not the page cache; buffered if the file system has none."""
    try:
        return os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
    except OSError as error:
        if not is_without_direct(error):
            os.close(other_fd)
            raise
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
