"""Reads the record regions of slabs while NumPy is loaded, when the medium would be idle.

Owns the queue of slabs that two processes share, so that each slab is taken by one of them: a pipe that is filled once
(reading a whole number from it is atomic, and at its end none is left). Owns threads, and a few buffers that they read
into over and over: a first touch of memory costs a virtual machine more time than the read. Knows of the format only
where records begin and how many there may be; judges nothing, changes nothing, takes no lock. Imports only modules that
are loaded already.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

from kvstore_tiers.nvme.directory_files import slab_numbers, slab_path

MOST_BYTES = 16 << 20  # of one slab: as many as a slab of the default size can have
_THREADS = 2  # the medium is kept busy while one of them waits for the GIL
_BUFFERS = 4
_BEGIN = 4096  # of the records in a slab file; the superblock before them says how many there are
_SLOTS_AT = 48
_RECORD_BYTES = 256
_NUMBER_BYTES = 4
_NUMBERS = 1 << 8 * _NUMBER_BYTES
_ROOM_BYTES = 64 << 10  # what most pipes hold; the tier scans further slabs by itself


def read_buffer(nbytes: int) -> memoryview:
    """Return `nbytes` bytes of zeroed memory that begins at a page boundary, as direct I/O needs. It is freed with the
    last reference.
    """
    return memoryview(mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


def whole_pages(nbytes: int) -> int:
    """Return `nbytes` rounded up to a multiple of the page size."""
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


class SlabQueue:
    """A queue of slab numbers that several processes share. `fd` is the reading end of the pipe that contains the
    numbers; each is taken once.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd

    @classmethod
    def of(cls, numbers: Iterable[int]) -> SlabQueue:
        """Make a queue of the slab `numbers`. Numbers for which the pipe has no room (64 KiB, 4 bytes each) are left
        out.
        """
        fd, filling = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(filling, False)  # a user with many pipes gets small ones
        packed = b"".join(number.to_bytes(_NUMBER_BYTES, "little") for number in numbers if number < _NUMBERS)
        os.write(filling, packed[:_ROOM_BYTES])
        os.close(filling)
        return cls(fd)

    def take(self) -> int | None:
        """Return a slab number that no other caller gets; None if none is left."""
        raw = os.read(self.fd, _NUMBER_BYTES)
        return int.from_bytes(raw, "little") if raw else None

    def close(self) -> None:
        os.close(self.fd)


class FileStamp(NamedTuple):
    """The identity, length and times of a slab file. If two stamps are equal, the file is the same one and was not
    written between them.
    """

    device: int
    inode: int
    length_bytes: int
    written_ns: int
    changed_ns: int  # changes also where the time of writing is set back, as when a backup is restored

    @classmethod
    def at(cls, status: os.stat_result) -> FileStamp:
        return cls(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


class RecordRegion(NamedTuple):
    """The first superblock and all records of one slab, as they were read from its file. `buffer` is the memory that
    contains them; the caller gives it back to the reader.
    """

    slab: int
    stamp: FileStamp
    superblock: bytes
    records: memoryview
    buffer: memoryview


class RegionReader:
    """An iterator that yields the records of slabs, whose numbers it takes from `queue`; two threads read ahead. Slabs
    that cannot be read are left out.
    """

    def __init__(self, slabs: Path, queue: SlabQueue) -> None:
        self._slabs = slabs
        self._queue = queue
        self._spare: SimpleQueue[memoryview] = SimpleQueue()
        for _ in range(_BUFFERS):
            self._spare.put(memoryview(b""))
        self._read: SimpleQueue[RecordRegion | None] = SimpleQueue()
        for number in range(_THREADS):
            threading.Thread(target=self._read_all, name=f"nvme-ahead-{number}", daemon=True).start()

    def __iter__(self) -> Iterator[RecordRegion]:
        left = _THREADS
        while left:
            region = self._read.get()
            if region is None:
                left -= 1
            else:
                yield region

    def give_back(self, region: RecordRegion) -> None:
        self._spare.put(region.buffer)

    def _read_all(self) -> None:
        try:
            buffer = self._spare.get()
            while (number := self._queue.take()) is not None:
                region = self._region(number, buffer)
                if region is not None:
                    self._read.put(region)
                    buffer = self._spare.get()
        finally:
            self._read.put(None)

    def _region(self, number: int, buffer: memoryview) -> RecordRegion | None:
        with suppress(OSError):  # the process that opens the tier meets it too, and reports it
            fd = _open(slab_path(self._slabs, number))
            try:
                return _read(fd, number, buffer)
            finally:
                os.close(fd)
        return None


class SlabSlots(NamedTuple):
    """The number of a slab, and how many slots it has."""

    slab: int
    slots: int

    @classmethod
    def within(cls, slabs: Path) -> list[SlabSlots]:
        """Return the slabs in the directory `slabs` according to their first superblocks, without files that are too
        short for those. Raises OSError."""
        found = []
        for number in slab_numbers(slabs):
            with open(slab_path(slabs, number), "rb", buffering=0) as slab:
                slots = _slots(slab.read(_BEGIN))
                if slots * _RECORD_BYTES <= os.fstat(slab.fileno()).st_size:
                    found.append(cls(number, slots))
        return found


def records_bytes(path: Path) -> int:
    """Return the bytes that the records of the slab file `path` take, rounded up to whole pages, according to its first
    superblock. Raises OSError.
    """
    with open(path, "rb", buffering=0) as slab:
        return _records_bytes(slab.read(_BEGIN))


def _records_bytes(superblock: bytes | memoryview) -> int:
    return whole_pages(_slots(superblock) * _RECORD_BYTES)


def _slots(superblock: bytes | memoryview) -> int:
    return int.from_bytes(superblock[_SLOTS_AT : _SLOTS_AT + 8], "little")


def _read(fd: int, number: int, buffer: memoryview) -> RecordRegion | None:
    stamp = FileStamp.at(os.fstat(fd))
    superblock = read_buffer(_BEGIN)
    if os.preadv(fd, [superblock], 0) < _BEGIN:
        return None
    nbytes = min(_records_bytes(superblock), stamp.length_bytes - _BEGIN)
    if not 0 < nbytes <= MOST_BYTES:
        return None
    if len(buffer) < nbytes:
        buffer = read_buffer(nbytes)
    done = 0
    while done < nbytes:
        got = os.preadv(fd, [buffer[done:nbytes]], _BEGIN + done)
        done += got
        if not got or done % mmap.PAGESIZE:
            return None  # cut short, since
    return RecordRegion(number, stamp, bytes(superblock), buffer[:nbytes], buffer)


def _open(slab: Path) -> int:
    with suppress(OSError):
        return os.open(slab, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
    return os.open(slab, os.O_RDONLY | os.O_CLOEXEC)  # a file system without direct I/O
