"""Mappings of the daemon's memory in this process: arenas to read, staging to write.

The module owns the mmap objects and the arrays over them. An array keeps its mapping alive, so memory is never unmapped
under a view, even after the session has ended. It does not know what a byte means (`kvstore_proto.arena` does).
Invariant: arena arrays are read-only, by mapping and by flag; both mappings stay out of core dumps, since headers hold
token ids.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import sys
import time
from collections.abc import Callable, Iterable

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]

MADV_POPULATE_READ = 22  # Linux 5.14; not in the mmap module
MADV_POPULATE_WRITE = 23
SLICE_BYTES = 256 * 1024  # what an arena that is emptied meanwhile may get back of its memory; about 0.1 ms
# Times as long as a slice took. The first calls wait for memory that they write, and for some that they read. A GiB of
# arenas that are only read, in each of many clients, is seconds of work.
EARLY_REST, READ_REST = 7, 60
_libc: ctypes.CDLL | None = None


def map_read_only(descriptor: int, size_bytes: int) -> Bytes:
    """Map `size_bytes` bytes of the shared memory behind `descriptor`, and return them as one read-only array. The
    descriptor is closed. Raises OSError, or ValueError if the memory is shorter.
    """
    return _map(descriptor, size_bytes, mmap.PROT_READ)


def map_read_write(descriptor: int, size_bytes: int) -> Bytes:
    """Map `size_bytes` bytes of the shared memory behind `descriptor`, and return them as one writable array. The
    descriptor is closed. Raises OSError, or ValueError if the memory is shorter.
    """
    return _map(descriptor, size_bytes, mmap.PROT_READ | mmap.PROT_WRITE)


def _map(descriptor: int, size_bytes: int, protection: int) -> Bytes:
    try:
        mapping = mmap.mmap(descriptor, size_bytes, flags=mmap.MAP_SHARED, prot=protection)
    finally:
        os.close(descriptor)
    with contextlib.suppress(OSError):
        mapping.madvise(mmap.MADV_DONTDUMP)
    return np.frombuffer(mapping, dtype=np.uint8)


def populate(arena: Bytes, ranges: Iterable[tuple[int, int]]) -> None:
    """Enter the pages of `ranges` of `arena` into this process's page table, so that reading them causes no page fault.
    Each range is an offset, a multiple of the page size, and a length in bytes.

    It only saves time, so errors (an older kernel) are ignored. It runs without the GIL.
    """
    for offset, length in contiguous_runs(ranges):
        _madvise(arena, offset, length, MADV_POPULATE_READ)


def prefault(memory: Bytes, is_wanted: Callable[[], bool]) -> None:
    """Enter all pages of `memory` into this process's page table, slice by slice, as long as `is_wanted()` is True.
    Missing pages are made, so use it for memory that this process fills. It blocks for a long time, so call it in its
    own thread; it rests between slices, to take little of a core.

    A low thread priority would not help: on a busy machine a low-priority thread holds the interpreter's lock, or the
    kernel's lock on the address space, for seconds while it waits. A first put into untouched pages takes some 1.2 ms a
    MiB, into touched pages 0.15 ms.
    """
    for offset in range(0, len(memory), SLICE_BYTES):
        length = min(SLICE_BYTES, len(memory) - offset)
        began = time.monotonic()
        if not is_wanted() or not _madvise(memory, offset, length, MADV_POPULATE_WRITE):
            return
        time.sleep(EARLY_REST * (time.monotonic() - began))


class EnteredPages:
    """A record of the parts of a mapping of `size_bytes` bytes that are in this process's page table, in pieces of 64
    KiB. A piece counts as entered once any of its pages is.
    """

    PIECE_BYTES = 64 * 1024

    def __init__(self, size_bytes: int) -> None:
        self._pieces = np.zeros(-(-size_bytes // self.PIECE_BYTES), np.bool_)

    def add(self, offset: int, length: int) -> bool:
        """Record the `length` bytes from `offset` as entered. Return True if a part of them was not recorded before."""
        if self.has(offset, length):
            return False
        self._of(offset, length)[:] = True
        return True

    def has(self, offset: int, length: int) -> bool:
        """Return True if all of the `length` bytes from `offset` are recorded."""
        return bool(self._of(offset, length).all())

    def _of(self, offset: int, length: int) -> npt.NDArray[np.bool_]:
        return self._pieces[offset // self.PIECE_BYTES : -(-(offset + length) // self.PIECE_BYTES)]


def map_present(
    arena: Bytes,
    descriptor: int,
    is_wanted: Callable[[], bool],
    rest: int = READ_REST,
    entered: EnteredPages | None = None,
    most_bytes: int = sys.maxsize,
) -> int:
    """Enter the pages of `arena` that exist already into this process's page table, as long as `is_wanted()` is True,
    and return the number of their bytes; it ends with the slice that reaches `most_bytes`. After each slice it pauses
    for `rest` times the time that the slice took. The pages are recorded in `entered`. `descriptor` is the arena's file
    descriptor.

    A first read of an arena takes about twice as long as a later one. But reading a missing page makes it, which counts
    against the daemon's capacity. So the kernel is asked page by page, shortly before each slice, which pages exist;
    SEEK_HOLE would walk to the end of the data, which takes 0.5 ms in 64 MiB.
    """
    offset = done_bytes = 0
    with contextlib.suppress(OSError):  # ENXIO: nothing but holes to the end
        while done_bytes < most_bytes and is_wanted() and offset < len(arena):
            offset = os.lseek(descriptor, offset, os.SEEK_DATA)
            began = time.monotonic()
            end = _data_end(descriptor, offset, min(offset + SLICE_BYTES, len(arena)))
            if not _madvise(arena, offset, end - offset, MADV_POPULATE_READ):
                break
            if entered is not None:
                entered.add(offset, end - offset)
            done_bytes += end - offset
            offset = end
            time.sleep(rest * (time.monotonic() - began))
    return done_bytes


def _data_end(descriptor: int, offset: int, limit: int) -> int:
    """Return the end of the pages that exist from `offset` on, at most `limit`."""
    with contextlib.suppress(OSError):  # ENXIO: nothing but holes to the end
        while offset < limit and os.lseek(descriptor, offset, os.SEEK_DATA) == offset:
            offset += mmap.PAGESIZE
    return offset


def _madvise(memory: Bytes, offset: int, length: int, advice: int) -> bool:
    global _libc
    if _libc is None:
        _libc = ctypes.CDLL(None, use_errno=True)
        _libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return bool(_libc.madvise(memory.ctypes.data + offset, length, advice) == 0)


def contiguous_runs(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return `ranges` sorted by offset, with ranges joined that touch or overlap. Each range is an offset and a
    length.
    """
    runs: list[tuple[int, int]] = []
    for offset, length in sorted(ranges):
        if runs and offset <= runs[-1][0] + runs[-1][1]:
            start, joined = runs[-1]
            runs[-1] = (start, max(joined, offset + length - start))
        else:
            runs.append((offset, length))
    return runs
