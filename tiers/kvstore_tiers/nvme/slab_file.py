"""One slab file on the medium: made, opened, reformatted, its records read and written.

Owns two descriptors of one file: direct I/O for slots, buffered I/O for superblocks and records (the regions share no
page). Never knows which slots are free; slab.py does.
Invariants: a file has its final name only when its space and both superblocks are on the medium; a reformat withdraws
all records before it changes the geometry, and returns when all of it is durable.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from kvstore_proto.arena import ALIGNMENT_BYTES
from kvstore_proto.replaced_file import sync_directory
from kvstore_tiers import failpoints
from kvstore_tiers.base import CANNOT_WRITE
from kvstore_tiers.image import aligned_up
from kvstore_tiers.nvme.directory import FORMAT, SEAL, TierDirectory, lock_directory, open_direct
from kvstore_tiers.nvme.directory_files import DirectoryInUse, FormatUnsupported, slab_numbers, slab_path
from kvstore_tiers.nvme.layout import (
    FORMAT_VERSION,
    RECORD_BYTES,
    RECORD_DTYPE,
    SUPERBLOCK_BYTES,
    Records,
    Superblock,
    read_superblock,
)

_UNREADABLE = 0xFF  # in place of each byte of a page that the medium cannot read: no record holds there


class SlabFile:
    """An open slab file, with one descriptor for slots (direct I/O) and one for records. `superblock` describes its
    layout. If the file can only be read, `why_read_only` is the error that says so, until `open_to_write` succeeds.
    """

    def __init__(
        self, path: Path, superblock: Superblock, *, require_direct: bool = False, read_only: bool = False
    ) -> None:
        self.path = path
        self.superblock = superblock
        self.why_read_only: OSError | None = None
        self.slot_fd, self.direct = open_direct(path, require_direct=require_direct, read_only=read_only)
        self._record_fd = os.open(path, (os.O_RDONLY if read_only else os.O_RDWR) | os.O_CLOEXEC)
        self._is_removed = False
        self._has_names = os.fstat(self._record_fd).st_nlink > 0  # some file systems do not count them

    @classmethod
    def create(cls, directory: TierDirectory, superblock: Superblock, *, require_direct: bool = False) -> SlabFile:
        """Make a new slab file with all its space allocated, and return it opened. Raises OSError, for example ENOSPC,
        and leaves nothing behind.
        """
        unfinished = directory.slab_path(superblock.number, "new")
        fd = os.open(unfinished, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(fd, 0, superblock.file_bytes)
            failpoints.hit("nvme.slab-allocated")
            _write_superblocks(fd, superblock)
            os.fsync(fd)
        except OSError:
            unfinished.unlink()
            raise
        finally:
            os.close(fd)
        failpoints.hit("nvme.slab-before-rename")
        path = directory.slab_path(superblock.number)
        unfinished.rename(path)
        failpoints.hit("nvme.slab-after-rename")
        sync_directory(directory.slabs)
        return cls(path, superblock, require_direct=require_direct)

    @classmethod
    def open(cls, directory: TierDirectory, number: int, *, require_direct: bool = False) -> SlabFile | str:
        """Open the slab file `number` of `directory` and return it; if it cannot be written, it is opened for reading
        only. Return a sentence about the fault if it has no valid superblock. Raises FormatUnsupported for another
        format, OSError if it cannot be opened.
        """
        path = directory.slab_path(number)
        superblock = find_superblock(path)
        if isinstance(superblock, str):
            return superblock
        if superblock.number != number:
            return f"its superblock is that of slab {superblock.number}"
        try:
            return cls(path, superblock, require_direct=require_direct)
        except OSError as error:
            if error.errno not in CANNOT_WRITE:
                raise
            why = error
        file = cls(path, superblock, require_direct=require_direct, read_only=True)
        file.why_read_only = why
        return file

    def open_to_write(self) -> None:
        """Open for writing a file that could only be read so far; the numbers of its descriptors stay. Raises OSError,
        also if the path leads to another file by now."""
        opened = []
        try:
            opened.append(open_direct(self.path, require_direct=self.direct)[0])
            opened.append(os.open(self.path, os.O_RDWR | os.O_CLOEXEC))
            reads = (self.slot_fd, self._record_fd)
            if not all(os.path.sameopenfile(*pair) for pair in zip(opened, reads, strict=True)):
                raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(self.path))
            for pair in zip(opened, reads, strict=True):
                os.dup2(*pair, inheritable=False)
        finally:
            for descriptor in opened:
                os.close(descriptor)
        self.why_read_only = None

    @property
    def length_bytes(self) -> int:
        return os.fstat(self._record_fd).st_size

    @property
    def is_whole(self) -> bool:
        """True if the file has its right length, all its space on the medium, and both superblocks."""
        status, end = os.fstat(self._record_fd), self.superblock.file_bytes
        if status.st_size != end or status.st_blocks * 512 < end:
            return False
        raw = self.superblock.pack()
        return all(_readable(self._record_fd, at) == raw for at in (0, end - SUPERBLOCK_BYTES))

    def restore_length(self) -> None:
        """Give the file its right length, with zeros if it was too short, and write both superblocks. Raises
        OSError.
        """
        if self.length_bytes > self.superblock.file_bytes:
            os.ftruncate(self._record_fd, self.superblock.file_bytes)
        os.posix_fallocate(self._record_fd, 0, self.superblock.file_bytes)
        _write_superblocks(self._record_fd, self.superblock)

    def reformat(self, superblock: Superblock) -> None:
        """Give the file of an empty slab the new layout `superblock`, which must not make it longer. Old records are
        zeroed first, so that at no time a valid record names bytes that are not its block. Raises OSError.
        """
        shrinks = superblock.file_bytes < self.superblock.file_bytes
        old_end, new_end = self.superblock.slots_offset, superblock.slots_offset
        os.pwrite(self._record_fd, bytes(old_end - SUPERBLOCK_BYTES), SUPERBLOCK_BYTES)
        if new_end > old_end:
            os.fdatasync(self._record_fd)
            os.pwrite(self._record_fd, bytes(new_end - old_end), old_end)
        os.fdatasync(self._record_fd)
        failpoints.hit("nvme.slab-records-zeroed")
        if shrinks:
            os.pwrite(self._record_fd, superblock.pack(), superblock.file_bytes - SUPERBLOCK_BYTES)
            os.fdatasync(self._record_fd)
        os.pwrite(self._record_fd, superblock.pack(), 0)
        failpoints.hit("nvme.slab-reformat")
        os.fdatasync(self._record_fd)
        _write_superblocks(self._record_fd, superblock)
        if shrinks:
            failpoints.hit("nvme.slab-before-cut")
            os.ftruncate(self._record_fd, superblock.file_bytes)
        os.fdatasync(self._record_fd)
        self.superblock = superblock

    def read_records(self) -> Records:
        """Return all records as an array of dtype RECORD_DTYPE in slot order. Records beyond the end of a truncated
        file are zeros.
        """
        raw = read_pages(self._record_fd, self.superblock.slots * RECORD_BYTES, SUPERBLOCK_BYTES)
        return np.frombuffer(raw.ljust(self.superblock.slots * RECORD_BYTES, b"\0"), dtype=RECORD_DTYPE)

    def read_records_into(self, buffer: memoryview, first: int) -> None:
        """Fill `buffer` with the 256-byte records from slot `first` on. Records beyond the end of a truncated file are
        zeros; pages that cannot be read become bytes that are no valid record. With direct I/O the buffer and the
        position must be whole pages.
        """
        offset = SUPERBLOCK_BYTES + first * RECORD_BYTES
        try:
            _fill(self.slot_fd, buffer, offset)
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            _fill_by_page(self.slot_fd, buffer, offset)

    def expect_records(self) -> None:
        """Ask the kernel to read all records ahead, because they will be needed soon. It matters only for files without
        direct I/O.
        """
        if not self.direct:
            length_bytes = self.superblock.slots * RECORD_BYTES
            os.posix_fadvise(self._record_fd, SUPERBLOCK_BYTES, length_bytes, os.POSIX_FADV_WILLNEED)

    def read_record(self, index: int) -> bytes:
        return os.pread(self._record_fd, RECORD_BYTES, SUPERBLOCK_BYTES + index * RECORD_BYTES)

    def write_records(self, records: Iterable[tuple[int, bytes]]) -> None:
        """Write `records`, pairs of slot number and 256 bytes. If the file's last record is among them, the rest of its
        page is zeroed."""
        for first, run in _runs(sorted(records)):
            if first + len(run) // RECORD_BYTES == self.superblock.slots:
                end = first * RECORD_BYTES + len(run)
                run += bytes(aligned_up(end) - end)
            os.pwrite(self._record_fd, run, SUPERBLOCK_BYTES + first * RECORD_BYTES)

    def rewrite_records(self) -> Records:
        """Read all records, write the same bytes again, and return them as an array. Raises OSError; if reading fails,
        nothing is written.
        """
        slots = self.superblock.slots
        raw = os.pread(self._record_fd, slots * RECORD_BYTES, SUPERBLOCK_BYTES).ljust(slots * RECORD_BYTES, b"\0")
        self.write_records((index, raw[index * RECORD_BYTES :][:RECORD_BYTES]) for index in range(slots))
        return np.frombuffer(raw, dtype=RECORD_DTYPE)

    def open_to_read(self) -> int:
        """Return a new read-only descriptor of this open file, for another process; the caller closes it. The path may
        lead to another file by now. Raises OSError.
        """
        direct = os.O_DIRECT if self.direct else 0
        return os.open(f"/proc/self/fd/{self.slot_fd}", os.O_RDONLY | os.O_CLOEXEC | direct)

    def remove(self) -> None:
        """Delete the file and give its space back. Raises OSError."""
        self._is_removed = True
        self.path.unlink(missing_ok=True)
        sync_directory(self.path.parent)
        os.ftruncate(self._record_fd, 0)  # what has it open, the scrubber perhaps, does not keep the space

    def sync(self) -> None:
        """Make written slots and records durable. Raises OSError, also if the file was deleted by another process,
        because no later start would find it. After `remove` it does nothing.
        """
        if self._is_removed:
            return
        os.fdatasync(self._record_fd)
        if self._has_names and not os.fstat(self._record_fd).st_nlink:
            raise FileNotFoundError(errno.ENOENT, "removed while it was in use", str(self.path))

    def close(self) -> None:
        """Close both descriptors of the file. A second call does nothing."""
        if self.slot_fd >= 0:
            os.close(self.slot_fd)
            os.close(self._record_fd)
            self.slot_fd = self._record_fd = -1


def find_superblock(path: Path) -> Superblock | str:
    """Return the superblock of the slab file `path`, from its first or its last page, or a sentence about the fault if
    both are invalid. Raises FormatUnsupported for another format, OSError if neither page can be read.
    """
    with open(path, "rb", buffering=0) as file:
        length_bytes = os.fstat(file.fileno()).st_size
        raw = _readable(file.fileno(), 0)
        front = read_superblock(raw or b"")
        if isinstance(front, str) and length_bytes >= 2 * SUPERBLOCK_BYTES:
            end = _readable(file.fileno(), length_bytes - SUPERBLOCK_BYTES)
            if raw is None and end is None:
                raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
            front = read_superblock(end or b"")
    if isinstance(front, int):
        raise FormatUnsupported(path.parent.parent, path.name, front, FORMAT_VERSION)
    return front


def discard_older(path: Path) -> bool:
    """Delete all slabs in the directory `path` if an older version wrote them, and return True. Return False if the
    directory does not exist or has the present format. Other files stay. Raises DirectoryError, for example for a newer
    format, and OSError."""
    if not path.is_dir():
        return False
    try:
        directory = TierDirectory(path, create=False)
        try:
            for number in directory.numbers():
                find_superblock(directory.slab_path(number))
        finally:
            directory.close()
        return False
    except FormatUnsupported as error:
        if not error.is_older:
            raise
    try:
        descriptor = lock_directory(path)
    except BlockingIOError:
        raise DirectoryInUse(str(path), 0) from None
    try:
        slabs = path / "slabs"
        for suffix in ("slab", "new", "damaged"):
            for number in slab_numbers(slabs, suffix):
                slab_path(slabs, number, suffix).unlink()
        for name in (SEAL, FORMAT):  # the format last: until then a start refuses the directory
            (path / name).unlink(missing_ok=True)
        sync_directory(path)
    finally:
        os.close(descriptor)
    return True


def read_pages(fd: int, nbytes: int, offset: int) -> bytes:
    """Return up to `nbytes` bytes of the file `fd` from `offset` on, fewer at its end. Pages that the medium cannot
    read are replaced by bytes that are no valid record or superblock.
    """
    try:
        return os.pread(fd, nbytes, offset)
    except OSError as error:
        if error.errno != errno.EIO:
            raise
    raw = bytearray(aligned_up(nbytes))
    got = _fill_by_page(fd, memoryview(raw), offset)
    return bytes(raw[: min(got, nbytes)])


def _readable(fd: int, offset: int) -> bytes | None:
    """Return a superblock's bytes; None where the medium cannot read them."""
    try:
        return os.pread(fd, SUPERBLOCK_BYTES, offset)
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        return None


def _fill(fd: int, buffer: memoryview, offset: int) -> int:
    """Read until the buffer is full or the file ends, and fill the rest with zeros. Return the number of bytes that the
    file had.
    """
    done = 0
    while done < len(buffer):
        got = os.preadv(fd, [buffer[done:]], offset + done)
        done += got
        if not got or done % ALIGNMENT_BYTES:  # a page cut short: the end of the file
            np.frombuffer(buffer, np.uint8)[done:] = 0
            break
    return done


def _fill_by_page(fd: int, buffer: memoryview, offset: int) -> int:
    """Read like `_fill`, one page at a time, so that a page that cannot be read does not stop the others."""
    done = 0
    for at in range(0, len(buffer), ALIGNMENT_BYTES):
        page = buffer[at : at + ALIGNMENT_BYTES]
        try:
            done += _fill(fd, page, offset + at)  # nothing and zeros, beyond the end of the file
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            np.frombuffer(page, np.uint8)[:] = _UNREADABLE
            done += len(page)
    return done


def _write_superblocks(fd: int, superblock: Superblock) -> None:
    raw = superblock.pack()
    os.pwrite(fd, raw, 0)
    os.pwrite(fd, raw, superblock.file_bytes - SUPERBLOCK_BYTES)


def _runs(records: list[tuple[int, bytes]]) -> Iterator[tuple[int, bytes]]:
    first, run = -1, bytearray()
    for index, raw in records:
        if run and index != first + len(run) // RECORD_BYTES:
            yield first, bytes(run)
            run.clear()
        if not run:
            first = index
        run += raw
    if run:
        yield first, bytes(run)
