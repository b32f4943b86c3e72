"""Records that are read before their tier is opened: while a daemon loads its modules, the medium would be idle.

Owns threads and the memory they read to, up to a limit; what is beyond it is read when the tier is opened, as is what
the medium cannot read. Knows no format but where records begin and how many there may be; judges nothing
(judging_ahead.py does), changes nothing, and has the directory's lock only while it looks at it. Imports nothing that
is not there already.
Invariant: what was read is used only by who has the lock then and found that nobody had it since the reading began
(whoever has it leaves a mark), and that the slab is the file that was read, not written to since: who restores a backup
asks for no lock.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from kvstore_tiers.nvme.lock_mark import LockMark
from kvstore_tiers.nvme.read_buffer import read_buffer

LIMIT_BYTES = 128 << 20  # of memory; half the records of a million blocks, and while they are judged the rest is read
_THREADS = 2  # the medium is kept busy while one of them waits for the GIL
_BEGIN = 4096  # of the records in a slab file; the superblock before them says how many there are
_SLOTS_AT = 48
_RECORD_BYTES = 256


class Look(NamedTuple):
    """What tells whether a slab is the file that it was, and as it was."""

    device: int
    inode: int
    length_bytes: int
    written_ns: int

    @classmethod
    def at(cls, status: os.stat_result) -> Look:
        return cls(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)


class Region(NamedTuple):
    """What was read of a slab: its first superblock, and all records."""

    look: Look
    superblock: bytes
    records: memoryview


class ReadAhead:
    """The records of one directory, being read."""

    def __init__(self, directory: Path, mark: LockMark, slabs: dict[int, Path]) -> None:
        self._directory = directory
        self._mark = mark
        self._left_bytes = LIMIT_BYTES
        self._lock = threading.Lock()
        self._slabs = slabs
        self._threads = ThreadPoolExecutor(_THREADS, "nvme-ahead")
        self._regions = {number: self._threads.submit(self._read, slabs[number]) for number in sorted(slabs)}

    @classmethod
    def begin(cls, directory: str | os.PathLike[str]) -> ReadAhead | None:
        """Begin to read what is in a directory; None where nothing is, or where somebody has it."""
        path = Path(directory).absolute()
        try:
            with open(path / "lock", "rb", buffering=0) as lock:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
                mark = LockMark.of(lock.fileno())
            slabs = {int(slab.stem): slab for slab in (path / "slabs").glob("*.slab") if slab.stem.isdigit()}
        except OSError:
            return None
        return cls(path, mark, slabs) if slabs else None

    def is_of(self, directory: Path, former: LockMark) -> bool:
        """Whether this is what is in `directory`, whose lock the caller has, with that mark of who had it before."""
        return directory.absolute() == self._directory and former == self._mark

    def numbers(self) -> list[int]:
        """The slabs there were."""
        return sorted(self._slabs)

    def take(self, slab: int) -> Region | None:
        """What was read of a slab, or is being read, which is then the caller's; None where that has yet to begin."""
        region: Future[Region | None] | None = self._regions.pop(slab, None)
        return None if region is None or region.cancel() else region.result()

    def wait_for(self, slab: int) -> Region | None:
        """What is read of a slab, when it has been, which is then the caller's; None where it is somebody else's."""
        region: Future[Region | None] | None = self._regions.pop(slab, None)
        return None if region is None else region.result()

    def still_is(self, slab: int, look: Look) -> bool:
        """Whether nobody has changed the slab since."""
        with suppress(OSError):
            return look == Look.at(os.stat(self._slabs[slab]))
        return False

    def close(self) -> None:
        """Nothing more is read, nor kept. Idempotent."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._regions.clear()

    def _read(self, slab: Path) -> Region | None:
        with suppress(OSError):  # who opens the tier will meet it too, and say so
            fd = _open(slab)
            try:
                return self._region(fd)
            finally:
                os.close(fd)
        return None

    def _region(self, fd: int) -> Region | None:
        look = Look.at(os.fstat(fd))
        superblock = memoryview(mmap.mmap(-1, _BEGIN))
        if os.preadv(fd, [superblock], 0) < _BEGIN:
            return None
        nbytes = int.from_bytes(superblock[_SLOTS_AT : _SLOTS_AT + 8], "little") * _RECORD_BYTES
        nbytes = min(-(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE, look.length_bytes - _BEGIN)
        with self._lock:
            if not 0 < nbytes <= self._left_bytes:
                return None
            self._left_bytes -= nbytes
        records = read_buffer(nbytes)
        done = 0
        while done < nbytes:
            got = os.preadv(fd, [records[done:]], _BEGIN + done)
            done += got
            if not got or done % mmap.PAGESIZE:
                return None  # cut short, since
        return Region(look, bytes(superblock), records)


def _open(path: Path) -> int:
    with suppress(OSError):
        return os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC)  # a file system without direct I/O
