"""What a start with a great many blocks cannot do without, each measured alone: reading, checksums, memory.

Owns the measurements, not the start: the records are read from the slab files that the daemon reads, checked with the
tier's own checksums on as many threads as it uses, and so many bytes of fresh memory are touched as the daemon keeps.
"""

from __future__ import annotations

import mmap
import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvstore_tiers.nvme.layout import RECORD_BYTES, SUPERBLOCK_BYTES
from kvstore_tiers.nvme.record_checksums import BATCH_RECORDS, RECORD_WORDS, RecordChecksums
from kvstore_tiers.nvme.record_scan import MAX_SCAN_THREADS
from support.many_blocks import header_regions
from support.timing import time_once

READ_BYTES = 4 << 20
_TURNS = 3


@dataclass(frozen=True)
class Floors:
    """Seconds. `checksums_s` on the clock, with all threads; `checksums_cpu_s` of processor."""

    direct_read_s: float
    checksums_s: float
    checksums_cpu_s: float
    page_faults_s: float

    @property
    def sum_s(self) -> float:
        """Nothing done twice or one after another that can be done at once: judging hides behind reading."""
        return max(self.direct_read_s, self.checksums_s) + self.page_faults_s


def read_once(directory: Path, *, direct: bool) -> None:
    """All header regions in sequence, into one buffer."""
    buffer = mmap.mmap(-1, READ_BYTES)  # aligned, as O_DIRECT wants it
    for path, end in header_regions(directory):
        fd = os.open(path, os.O_RDONLY | (os.O_DIRECT if direct else 0))
        for offset in range(0, end, READ_BYTES):
            os.preadv(fd, [memoryview(buffer)[: min(READ_BYTES, end - offset)]], offset)
        os.close(fd)


def floors_of(directory: Path, kept_bytes: int) -> Floors:
    """Of the slab files in this directory, for a daemon that keeps so many bytes."""
    direct_read_s = min(time_once(lambda: read_once(directory, direct=True)) for _ in range(_TURNS))
    return Floors(direct_read_s, *_checksums_s(directory), _page_faults_s(kept_bytes))


def _checksums_s(directory: Path) -> tuple[float, float]:
    """Of all records, in memory: seconds on the clock and of processor; the least of some turns."""
    slabs = [_records(path, end) for path, end in header_regions(directory)]
    threads = min(MAX_SCAN_THREADS, os.cpu_count() or 1)
    scratch = [RecordChecksums() for _ in range(threads)]

    def check(thread: int) -> None:
        for records in slabs[thread::threads]:
            for first in range(0, len(records), BATCH_RECORDS):
                words = scratch[thread].load(records[first : first + BATCH_RECORDS])
                scratch[thread].digests(words, np.arange(words.shape[1], dtype=np.uint64))

    with ThreadPoolExecutor(threads) as pool:

        def turn() -> tuple[float, float]:
            began, began_cpu = time.perf_counter(), time.process_time()
            list(pool.map(check, range(threads)))
            return time.perf_counter() - began, time.process_time() - began_cpu

        turns = [turn() for _ in range(_TURNS)]
    return min(clock for clock, _ in turns), min(cpu for _, cpu in turns)


def _page_faults_s(nbytes: int) -> float:
    """To be given so much memory by the kernel, a page at a time: the least of some turns."""

    def touch() -> None:
        with mmap.mmap(-1, max(nbytes, mmap.PAGESIZE)) as memory:
            view = np.frombuffer(memory, np.uint8)
            view[:: mmap.PAGESIZE] = 1
            del view

    return min(time_once(touch) for _ in range(_TURNS))


def _records(path: Path, end: int) -> np.ndarray:
    with path.open("rb") as file:
        file.seek(SUPERBLOCK_BYTES)
        raw = file.read((end - SUPERBLOCK_BYTES) // RECORD_BYTES * RECORD_BYTES)
    return np.frombuffer(raw, "<u8").reshape(-1, RECORD_WORDS)
