"""Checks one slab file: its superblocks, its length, every record, and the slot that each record names.

Owns the judgement of one file, and the closed list of what can be wrong in a directory; check.py puts slabs and
directory together. After a clean close there are only notes; after a crash there is no damage. Reads only, and needs no
lock of its own: on a directory that a daemon writes to, its findings are guesses.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvstore_proto.arena import ALIGNMENT_BYTES, HEADER_BYTES, payload_checksum
from kvstore_tiers.image import false_checksum, judge_header
from kvstore_tiers.nvme.layout import (
    RECORD_BYTES,
    RECORD_DTYPE,
    SUPERBLOCK_BYTES,
    Records,
    RecordState,
    Superblock,
    disagree,
    read_superblock,
    record_header,
    record_holds,
    slots_that_fit,
)
from kvstore_tiers.nvme.slab_file import find_superblock, read_pages


class Severity(Enum):
    NOTE = "note"
    LEFTOVER = "leftover"
    DAMAGE = "damage"


class FindingKind(Enum):
    """The kinds of faults and remarks that a check of an NVMe directory can report. The values appear in the output of
    `--json`.
    """

    FORMAT_MISSING = "format-missing"
    TEMPORARY = "temporary-file"
    STRAY = "stray-file"
    UNFINISHED_SLAB = "unfinished-slab"
    PUT_ASIDE = "slab-put-aside"
    SUPERBLOCK = "superblocks-lost"
    SUPERBLOCK_COPY = "superblock-copy"
    WRONG_NUMBER = "wrong-slab-number"
    GEOMETRY = "geometry"
    TRUNCATED = "truncated"
    TOO_LONG = "too-long"
    RECORD = "record"
    GENERATION = "generation"
    SEQUENCE = "sequence"
    HEADER = "header"
    PAYLOAD = "payload"
    DUPLICATE = "duplicate-key"
    CYCLE = "cycle"
    ORPHANS = "orphans"
    QUARANTINED = "quarantined"
    CAPACITY = "capacity"


@dataclass(frozen=True, slots=True)
class SlabFinding:
    """One fault or remark from the check of an NVMe directory. `where` names the file or block, `what` says what is
    wrong. `slab` and `slot` are the numbers of the slab file and the slot, -1 if the finding concerns none.
    """

    severity: Severity
    where: str
    what: str
    kind: FindingKind
    slab: int = -1
    slot: int = -1

    def __str__(self) -> str:
        return f"{self.severity.value}: {self.where}: {self.what}"


def damage(kind: FindingKind, where: object, what: str, slab: int = -1, slot: int = -1) -> SlabFinding:
    return SlabFinding(Severity.DAMAGE, str(where), what, kind, slab, slot)


def leftover(kind: FindingKind, where: object, what: str, slab: int = -1, slot: int = -1) -> SlabFinding:
    return SlabFinding(Severity.LEFTOVER, str(where), what, kind, slab, slot)


def note(kind: FindingKind, where: object, what: str, slab: int = -1, slot: int = -1) -> SlabFinding:
    return SlabFinding(Severity.NOTE, str(where), what, kind, slab, slot)


_RECORDS_A_READ = 16_384  # 4 MiB
_SEQUENCE_MAX = 1 << 63  # more commits than a tier can make


@dataclass(frozen=True, slots=True)
class LiveBlock:
    """The facts from the record of a stored block that a check compares with other records: its slab and slot numbers,
    the generation of the slot, the sequence number of the commit that wrote the record, and the key of the parent
    block.
    """

    slab: int
    slot: int
    generation: int
    sequence: int
    parent: bytes


Live = dict[bytes, list[LiveBlock]]
Progress = Callable[[int], None]


class SlabWalk:
    """A check of one slab file, number `number` at `path`. It adds each stored block to `live`, by key, and the numbers
    of quarantined slots to `quarantined`. `progress` is called with the number of bytes after each read.
    """

    def __init__(self, path: Path, number: int, live: Live, *, verify_payloads: bool, progress: Progress) -> None:
        self._path = path
        self._number = number
        self._live = live
        self._verify_payloads = verify_payloads
        self._progress = progress
        self.quarantined: list[int] = []
        self.superblock: Superblock | None = None

    def run(self) -> Iterator[SlabFinding]:
        """Check the slab file and yield each finding. Raises FormatUnsupported if another version wrote the file, and
        OSError if reading fails.
        """
        superblock = find_superblock(self._path)
        if isinstance(superblock, str):
            yield damage(FindingKind.SUPERBLOCK, self._path, superblock, self._number)
            return
        self.superblock = superblock
        if superblock.number != self._number:
            what = f"its superblock is that of slab {superblock.number}"
            yield damage(FindingKind.WRONG_NUMBER, self._path, what, self._number)
            return
        if superblock.slot_bytes % ALIGNMENT_BYTES or superblock.slots > slots_that_fit(
            superblock.file_bytes, superblock.slot_bytes or ALIGNMENT_BYTES
        ):
            what = f"{superblock.slots} slots of {superblock.slot_bytes} bytes overlap in {superblock.file_bytes} bytes"
            yield damage(FindingKind.GEOMETRY, self._path, what, self._number)
            return
        with open(self._path, "rb", buffering=0) as file:
            yield from self._walk_frame(file.fileno(), superblock)
            for first in range(0, superblock.slots, _RECORDS_A_READ):
                yield from self._walk_records(file.fileno(), superblock, first)

    def _walk_frame(self, fd: int, superblock: Superblock) -> Iterator[SlabFinding]:
        """Yield the findings about the file's length and both copies of its superblock."""
        length_bytes = os.fstat(fd).st_size
        if length_bytes < superblock.file_bytes:
            what = f"truncated to {length_bytes} of {superblock.file_bytes} bytes"
            yield damage(FindingKind.TRUNCATED, self._path, what, self._number)
            return
        if length_bytes > superblock.file_bytes:
            what = f"{length_bytes - superblock.file_bytes} bytes behind its end belong to no slot"
            yield leftover(FindingKind.TOO_LONG, self._path, what, self._number)
        for name, offset in (("front", 0), ("end", superblock.file_bytes - SUPERBLOCK_BYTES)):
            other = read_superblock(read_pages(fd, SUPERBLOCK_BYTES, offset))
            where = f"{self._path} {name}"
            if isinstance(other, str):
                yield damage(FindingKind.SUPERBLOCK_COPY, where, other, self._number)
            elif other != superblock:
                what = "the superblock of an earlier format"
                yield leftover(FindingKind.SUPERBLOCK_COPY, where, what, self._number)

    def _walk_records(self, fd: int, superblock: Superblock, first: int) -> Iterator[SlabFinding]:
        raw, records, used = read_records(fd, superblock, first, _RECORDS_A_READ)
        self._progress(len(raw))
        for position in np.flatnonzero(used).tolist():
            index = first + position
            record = raw[position * RECORD_BYTES : (position + 1) * RECORD_BYTES]
            if not record_holds(record, superblock.record_seed(index)):
                yield damage(FindingKind.RECORD, self._name(index), "the record does not hold", self._number, index)
                continue
            state, sequence = int(records["state"][position]), int(records["sequence"][position])
            if state not in (RecordState.FREE, RecordState.LIVE, RecordState.QUARANTINED):
                what = f"the record's state is {state}, which means nothing"
                yield damage(FindingKind.RECORD, self._name(index), what, self._number, index)
            elif state == RecordState.QUARANTINED:
                self.quarantined.append(index)
            elif state == RecordState.LIVE:
                yield from self._walk_live(fd, superblock, index, record, sequence)

    def _walk_live(
        self, fd: int, superblock: Superblock, index: int, record: bytes, sequence: int
    ) -> Iterator[SlabFinding]:
        named = record_header(record)
        block = LiveBlock(self._number, index, named.generation, sequence, named.parent)
        self._live.setdefault(named.key, []).append(block)
        if named.generation < superblock.first_generation:
            what = f"generation {named.generation} is below the slab's first, {superblock.first_generation}"
            yield damage(FindingKind.GENERATION, self._name(index), what, self._number, index)
        if not 0 < sequence < _SEQUENCE_MAX:
            what = f"no commit has the number {sequence}"
            yield damage(FindingKind.SEQUENCE, self._name(index), what, self._number, index)
        fault = judge_slot(fd, superblock, index, record, verify_payload=self._verify_payloads)
        self._progress(HEADER_BYTES + (named.stored_bytes if self._verify_payloads else 0))
        if fault is not None:
            kind, what = fault
            yield damage(kind, self._name(index), what, self._number, index)

    def _name(self, index: int) -> str:
        return f"{self._path} slot {index}"


def read_records(
    fd: int, superblock: Superblock, first: int, count: int
) -> tuple[bytes, Records, npt.NDArray[np.bool_]]:
    """Read `count` records of the slab file `fd`, from slot `first` on. Return three things: their bytes, these bytes
    as an array of dtype RECORD_DTYPE, and a boolean mask of the records that were ever written. Records beyond the
    file's end are zeros; records that cannot be read become bytes that are no valid record.
    """
    count = min(count, superblock.slots - first)
    raw = read_pages(fd, count * RECORD_BYTES, SUPERBLOCK_BYTES + first * RECORD_BYTES)
    raw = raw.ljust(count * RECORD_BYTES, b"\0")
    used = np.asarray(np.frombuffer(raw, dtype=np.uint64).reshape(count, -1).any(axis=1))
    return raw, np.frombuffer(raw, dtype=RECORD_DTYPE), used


def judge_slot(
    fd: int, superblock: Superblock, index: int, record: bytes, *, verify_payload: bool
) -> tuple[FindingKind, str] | None:
    """Compare slot number `index` of the slab file `fd` with its 256-byte `record`: key, generation, sizes, parent,
    tenant and fingerprint must agree. With `verify_payload` the payload's checksum is checked too. Return the kind of
    the fault and a sentence, or None if there is no fault.
    """
    named = record_header(record)
    offset = superblock.slot_offset(index)
    try:
        raw = os.pread(fd, HEADER_BYTES, offset)
    except OSError as error:
        return FindingKind.HEADER, f"the header cannot be read: {error.strerror}"
    header = judge_header(raw, named.key, superblock.slot_bytes - HEADER_BYTES, named.generation)
    if isinstance(header, str):
        return FindingKind.HEADER, header
    if disagree(header, named):
        return FindingKind.HEADER, "header and record disagree about the payload"
    if (header.parent, header.tenant, header.fingerprint) != (named.parent, named.tenant, named.fingerprint):
        return FindingKind.HEADER, "header and record disagree about parent, tenant or fingerprint"
    if verify_payload:
        try:
            stored = os.pread(fd, header.stored_bytes, offset + HEADER_BYTES)
        except OSError as error:
            return FindingKind.PAYLOAD, f"the payload cannot be read: {error.strerror}"
        if len(stored) != header.stored_bytes or payload_checksum(stored) != header.stored_checksum:
            return FindingKind.PAYLOAD, false_checksum(header)
    return None
