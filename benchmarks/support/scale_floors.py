"""The floors of a start: reading records, checking them, and being given memory, each by itself.

Owns these measurements on a store (scale_store.py); never starts a daemon.
"""

from __future__ import annotations

import mmap
import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvstore_cuda.host_copies import load_if_compiled
from kvstore_tiers.nvme.layout import RECORD_BYTES, SUPERBLOCK_BYTES
from kvstore_tiers.nvme.record_checksums import BATCH_RECORDS, RECORD_WORDS, RecordChecksums
from kvstore_tiers.nvme.record_scan import MAX_SCAN_THREADS
from support.report import Row, time_once
from support.scale_store import Store

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

    def rows(self, read_s: float) -> list[Row]:
        """Return a row for each floor, against one sequential read that took `read_s` seconds."""
        each = {
            "floor_read_direct": self.direct_read_s,
            "floor_checksums": self.checksums_s,
            "floor_checksums_processor": self.checksums_cpu_s,
            "floor_page_faults": self.page_faults_s,
        }
        return [Row(name, value * 1e3, "ms", read_s * 1e3, "one sequential read") for name, value in each.items()]


def read_once(store: Store, *, direct: bool) -> None:
    """Read all header regions in sequence, into one buffer."""
    buffer = mmap.mmap(-1, READ_BYTES)  # aligned, as O_DIRECT wants it
    for path, end in store.header_regions():
        fd = os.open(path, os.O_RDONLY | (os.O_DIRECT if direct else 0))
        for offset in range(0, end, READ_BYTES):
            os.preadv(fd, [memoryview(buffer)[: min(READ_BYTES, end - offset)]], offset)
        os.close(fd)


def floors_of(store: Store, kept_bytes: int) -> Floors:
    """Return the floors of `store`, for a daemon that keeps the given number of bytes."""
    direct_read_s = min(time_once(lambda: read_once(store, direct=True)) for _ in range(_TURNS))
    return Floors(direct_read_s, *_checksums_s(store), _page_faults_s(kept_bytes))


def _checksums_s(store: Store) -> tuple[float, float]:
    """Return the seconds for checksums of all records, in memory: on the clock and of the processor; the least of some
    turns.
    """
    load_if_compiled()
    slabs = [_records(path, end) for path, end in store.header_regions()]
    threads = min(MAX_SCAN_THREADS, os.cpu_count() or 1)
    scratch = [RecordChecksums() for _ in range(threads)]

    def check(thread: int) -> None:
        for records in slabs[thread::threads]:
            for first in range(0, len(records), BATCH_RECORDS):
                some = records[first : first + BATCH_RECORDS]
                scratch[thread].load(some, np.arange(len(some), dtype=np.uint64))

    with ThreadPoolExecutor(threads) as pool:

        def turn() -> tuple[float, float]:
            began, began_cpu = time.perf_counter(), time.process_time()
            list(pool.map(check, range(threads)))
            return time.perf_counter() - began, time.process_time() - began_cpu

        turns = [turn() for _ in range(_TURNS)]
    return min(clock for clock, _ in turns), min(cpu for _, cpu in turns)


def _page_faults_s(nbytes: int) -> float:
    """Return the seconds that the kernel takes to give this much memory, a page at a time: the least of some turns."""

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
