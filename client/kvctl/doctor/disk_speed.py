"""How fast the disk is, by writing and reading one temporary file: bounded in bytes and time, gone afterwards.

The way that the NVMe tier does it: O_DIRECT where it works, several threads, large transfers, a sync at the end. The
daemon may be at work meanwhile; then both are slower.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from kvctl.doctor.disk import existing, unnamed_file
from kvctl.doctor.finding import Finding, ok, warn
from kvctl.doctor.sockets import user_name
from kvctl.doctor.surroundings import Surroundings
from kvstore_console.units import human_bytes, human_seconds

MAX_BYTES = 256 << 20
MAX_S = 3.0  # each way
_TRANSFER_BYTES = 1 << 20
_THREADS = 4
_SYNCS = 8
_SLOW_BYTES_A_SECOND = 200e6
_SLOW_SYNC_S = 0.02
_SPARE_SHARE = 8  # at most one part in so many of the free space

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Measured:
    written_bytes: int
    write_s: float
    read_bytes: int
    read_s: float
    sync_s: float
    is_direct: bool


def speed(around: Surroundings, progress: Progress) -> Iterator[Finding]:
    path = around.settings.path("nvme.path")
    if path is None or not around.settings.flag("nvme.enabled"):
        return
    place = existing(path)
    status = os.statvfs(place)
    nbytes = min(MAX_BYTES, status.f_bavail * status.f_frsize // _SPARE_SHARE)
    nbytes -= nbytes % _TRANSFER_BYTES
    if nbytes < 16 * _TRANSFER_BYTES:
        yield warn("speed", f"not measured: {place} is nearly full", "free space there")
        return
    try:
        measured = measure(place, nbytes, progress)
    except PermissionError:
        yield ok(
            "speed", f"not measured: {place} is closed to user {user_name(around.uid)}", "sudo kvctl doctor measures it"
        )
        return
    yield from judge(measured)


def judge(measured: Measured) -> Iterator[Finding]:
    """What the figures mean for a tier below DRAM."""
    write = measured.written_bytes / max(measured.write_s, 1e-9)
    read = measured.read_bytes / max(measured.read_s, 1e-9)
    how = "" if measured.is_direct else ", through the page cache"
    seen = (
        f"write {human_bytes(round(write))}/s, read {human_bytes(round(read))}/s "
        f"({human_bytes(measured.written_bytes)} in a temporary file{how})"
    )
    if min(write, read) < _SLOW_BYTES_A_SECOND:
        advice = (
            "slower than an NVMe disk: restoring may take longer than computing; put nvme.path on a local NVMe disk"
        )
        yield warn("speed", seen, advice)
    else:
        yield ok("speed", seen)
    synced = f"median {human_seconds(measured.sync_s)} for a small write and its sync"
    if measured.sync_s > _SLOW_SYNC_S:
        yield warn(
            "sync", synced, "durable puts wait for it: a disk with power-loss protection syncs in well under 1 ms"
        )
    else:
        yield ok("sync", synced)


def measure(directory: Path, nbytes: int, progress: Progress) -> Measured:
    """Raises OSError. The file has no name, so nothing is left behind."""
    try:
        fd, is_direct = unnamed_file(directory, os.O_DIRECT), True
    except OSError:
        fd, is_direct = unnamed_file(directory), False
    try:
        os.posix_fallocate(fd, 0, nbytes)
        with mmap.mmap(-1, _TRANSFER_BYTES) as pattern:
            pattern.write(os.urandom(_TRANSFER_BYTES))
            began_s = time.monotonic()
            written_bytes = _run(nbytes, partial(_write, fd, pattern), partial(_report, progress, "writing"))
            os.fdatasync(fd)
            write_s = time.monotonic() - began_s
        if not is_direct:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        began_s = time.monotonic()
        with contextlib.ExitStack() as stack:
            buffers = [stack.enter_context(mmap.mmap(-1, _TRANSFER_BYTES)) for _ in range(_THREADS)]
            read_bytes = _run(written_bytes, partial(_read, fd, buffers), partial(_report, progress, "reading"))
        read_s = time.monotonic() - began_s
        sync_s = statistics.median(_sync(fd) for _ in range(_SYNCS))
    finally:
        os.close(fd)
    return Measured(written_bytes, write_s, read_bytes, read_s, sync_s, is_direct)


def _run(nbytes: int, transfer: Callable[[int], None], report: Callable[[int, int], None]) -> int:
    """Transfers from the front, several at once, until all or the time is over; bytes done."""
    until_s = time.monotonic() + MAX_S
    done_bytes = 0
    with ThreadPoolExecutor(_THREADS) as threads:
        for first in range(0, nbytes, _THREADS * _TRANSFER_BYTES):
            offsets = range(first, min(nbytes, first + _THREADS * _TRANSFER_BYTES), _TRANSFER_BYTES)
            list(threads.map(transfer, offsets))
            done_bytes = offsets[-1] + _TRANSFER_BYTES
            report(done_bytes, nbytes)
            if time.monotonic() > until_s:
                break
    return done_bytes


def _write(fd: int, pattern: mmap.mmap, offset: int) -> None:
    os.pwritev(fd, [pattern], offset)


def _read(fd: int, buffers: list[mmap.mmap], offset: int) -> None:
    """Neighbours that are read at once have a buffer each."""
    os.preadv(fd, [buffers[offset // _TRANSFER_BYTES % _THREADS]], offset)


def _sync(fd: int) -> float:
    """Seconds for one page and its sync."""
    with mmap.mmap(-1, mmap.PAGESIZE) as page:
        began_s = time.monotonic()
        os.pwritev(fd, [page], 0)
        os.fdatasync(fd)
        return time.monotonic() - began_s


def _report(progress: Progress, verb: str, done_bytes: int, nbytes: int) -> None:
    progress(f"{verb} a temporary file: {human_bytes(done_bytes)} of {human_bytes(nbytes)}")
