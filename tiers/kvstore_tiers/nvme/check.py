"""The walker over every invariant of an NVMe directory: index, records, slot headers, capacity.

Owns the judgement, never a repair. It reads a directory that no tier has open (it takes the lock itself) and is the
tests' teardown, the self-check of a stopped daemon and `kvstored check`.
A finding is `damage` when bytes are wrong, `leftover` when a crash left something that the next start clears up.
After a clean close there are no findings; after a crash there are no `damage` findings.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import numpy as np

from kvstore_proto.arena import HEADER_BYTES, payload_checksum
from kvstore_tiers.image import judge_header
from kvstore_tiers.nvme.directory import TierDirectory, allocated_bytes
from kvstore_tiers.nvme.index import read_sealed
from kvstore_tiers.nvme.layout import (
    RECORD_BYTES,
    RECORD_DTYPE,
    SUPERBLOCK_BYTES,
    RecordState,
    Superblock,
    read_superblock,
    record_header,
    record_holds,
)
from kvstore_tiers.nvme.slab import Location
from kvstore_tiers.nvme.slab_file import find_superblock


class Severity(Enum):
    LEFTOVER = "leftover"
    DAMAGE = "damage"


@dataclass(frozen=True, slots=True)
class Finding:
    severity: Severity
    where: str
    what: str

    def __str__(self) -> str:
        return f"{self.severity.value}: {self.where}: {self.what}"


LiveBlocks = dict[bytes, list[Location]]


def check_directory(
    directory: str | os.PathLike[str], *, capacity_bytes: int | None = None, verify_payloads: bool = False
) -> list[Finding]:
    """Everything that is wrong in a directory; an empty list when nothing is.

    `verify_payloads` reads every live slot whole and checks its checksum. Raises DirectoryInUse while a tier has it
    open, FormatUnsupported when a newer version wrote it.
    """
    with closing(TierDirectory(directory, create=False)) as opened:
        return list(_walk(opened, capacity_bytes, verify_payloads))


def _walk(directory: TierDirectory, capacity_bytes: int | None, verify_payloads: bool) -> Iterator[Finding]:
    for number in directory.numbers("new"):
        yield Finding(Severity.LEFTOVER, str(directory.slab_path(number, "new")), "a slab file that was never finished")
    for number in directory.numbers("damaged"):
        yield Finding(Severity.DAMAGE, str(directory.slab_path(number, "damaged")), "a slab file without a superblock")
    live: LiveBlocks = {}
    for number in directory.numbers():
        yield from _walk_slab(directory.slab_path(number), number, live, verify_payloads)
    for key, places in live.items():
        if len(places) > 1:
            yield Finding(Severity.LEFTOVER, key.hex(), f"{len(places)} records name this block")
    yield from _walk_index(directory.index, live)
    if capacity_bytes is not None:
        files = [
            directory.slab_path(n, suffix) for suffix in ("slab", "new", "damaged") for n in directory.numbers(suffix)
        ]
        used_bytes = sum(path.stat().st_size for path in files) + allocated_bytes(directory.index / "data.mdb")
        if used_bytes > capacity_bytes:
            what = f"{used_bytes} bytes are used, the capacity is {capacity_bytes}"
            yield Finding(Severity.DAMAGE, str(directory.path), what)


def _walk_slab(path: Path, number: int, live: LiveBlocks, verify_payloads: bool) -> Iterator[Finding]:
    superblock = find_superblock(path)
    if isinstance(superblock, str):
        yield Finding(Severity.DAMAGE, str(path), superblock)
        return
    with open(path, "rb", buffering=0) as file:
        fd = file.fileno()
        length_bytes = os.fstat(fd).st_size
        if superblock.number != number:
            yield Finding(Severity.DAMAGE, str(path), f"its superblock is that of slab {superblock.number}")
        if length_bytes < superblock.file_bytes:
            what = f"truncated to {length_bytes} of {superblock.file_bytes} bytes"
            yield Finding(Severity.DAMAGE, str(path), what)
        else:
            yield from _walk_superblocks(path, fd, superblock)
        raw = os.pread(fd, superblock.slots * RECORD_BYTES, SUPERBLOCK_BYTES)
        raw = raw.ljust(superblock.slots * RECORD_BYTES, b"\0")
        states = np.frombuffer(raw, dtype=RECORD_DTYPE)["state"]
        used = np.frombuffer(raw, dtype=np.uint64).reshape(superblock.slots, -1).any(axis=1)
        for index in np.flatnonzero(used).tolist():
            record = raw[index * RECORD_BYTES : (index + 1) * RECORD_BYTES]
            if not record_holds(record, superblock.record_seed(index)):
                yield Finding(Severity.DAMAGE, f"{path} slot {index}", "the record does not hold")
            elif states[index] == RecordState.LIVE:
                header = record_header(record)
                live.setdefault(header.key, []).append(Location(number, index, header.generation))
                yield from _walk_slot(f"{path} slot {index}", fd, superblock, index, record, verify_payloads)


def _walk_superblocks(path: Path, fd: int, superblock: Superblock) -> Iterator[Finding]:
    for name, offset in (("front", 0), ("end", superblock.file_bytes - SUPERBLOCK_BYTES)):
        other = read_superblock(os.pread(fd, SUPERBLOCK_BYTES, offset))
        if isinstance(other, str):
            yield Finding(Severity.DAMAGE, f"{path} {name}", other)
        elif other != superblock:
            yield Finding(Severity.LEFTOVER, f"{path} {name}", "the superblock of an earlier format")


def _walk_slot(
    where: str, fd: int, superblock: Superblock, index: int, record: bytes, verify_payloads: bool
) -> Iterator[Finding]:
    """A live record against the header in the slot and, if asked, its payload."""
    named = record_header(record)
    offset = superblock.slot_offset(index)
    raw = os.pread(fd, HEADER_BYTES, offset)
    header = judge_header(raw, named.key, superblock.slot_bytes - HEADER_BYTES, named.generation)
    if isinstance(header, str):
        yield Finding(Severity.DAMAGE, where, header)
    elif (header.payload_bytes, header.checksum) != (named.payload_bytes, named.checksum):
        yield Finding(Severity.DAMAGE, where, "header and record disagree about the payload")
    elif verify_payloads:
        payload = os.pread(fd, header.payload_bytes, offset + HEADER_BYTES)
        if len(payload) != header.payload_bytes or payload_checksum(payload) != header.checksum:
            yield Finding(Severity.DAMAGE, where, "the payload's checksum does not hold")


def _walk_index(path: Path, live: LiveBlocks) -> Iterator[Finding]:
    """The index against the live records, both ways."""
    entries = read_sealed(path)
    if entries is None:
        yield Finding(Severity.LEFTOVER, str(path), "the index has no seal that holds; the next start rebuilds it")
        return
    for key, location in entries.items():
        if location not in live.get(key, []):
            yield Finding(Severity.DAMAGE, f"index entry {key.hex()}", f"no record says so: {location}")
    for key in live.keys() - entries.keys():
        yield Finding(Severity.DAMAGE, f"block {key.hex()}", "the index does not name it")
