"""Names of slab files, the mark in the lock file, and errors of a directory. Imports only modules that are loaded."""

from __future__ import annotations

import os
from pathlib import Path
from stat import S_ISREG
from typing import NamedTuple


class DirectoryError(Exception):
    """An error: the NVMe tier cannot be opened in its directory. The message says what was wrong and what to do."""


class DirectoryInUse(DirectoryError):
    """An error: another process, number `holder_pid` (0 if unknown), has locked the NVMe tier's directory."""

    def __init__(self, directory: str, holder_pid: int) -> None:
        holder = f"process {holder_pid}" if holder_pid else "another process"
        super().__init__(
            f"{directory} is in use by {holder}: stop that kvstored, or give this one a directory of its own"
        )
        self.holder_pid = holder_pid


class DirectoryUnusable(DirectoryError):
    """An error: the NVMe tier's path is no directory, is not writable, has no room, or lacks a feature that the
    configuration requires.
    """


class FormatUnsupported(DirectoryError):
    """An error: the directory or a slab file in it has a format that this version does not read. Nothing in it was
    changed. `is_older` is True if the format is older than this version's."""

    def __init__(self, directory: Path, what: str, found: int, supported: int, written_by: str = "") -> None:
        self.is_older = found < supported
        author = written_by or ("an older kvstored" if self.is_older else "a newer kvstored")
        remedy = "move it away, or start with --discard-old" if self.is_older else "run that version, or move it away"
        super().__init__(
            f"{directory}: {what} was written by {author}, format {found}, this kvstored reads format {supported}; "
            f"{remedy} (its blocks will be computed again)"
        )


def slab_path(slabs: Path, number: int, suffix: str = "slab") -> Path:
    return slabs / f"{number:08d}.{suffix}"


def slab_numbers(slabs: Path, suffix: str = "slab") -> list[int]:
    """Return the numbers of the files in `slabs` named NNNNNNNN.`suffix` (eight digits), ascending. Files with other
    names are ignored.
    """
    named = ((path, int(path.stem)) for path in slabs.glob(f"*.{suffix}") if path.stem.isdecimal())
    return sorted(number for path, number in named if path == slab_path(slabs, number, suffix))


class LockMark(NamedTuple):
    """The state of a directory's lock file: its inode, the time of its last write in nanoseconds, and the process
    number in it. If two marks are equal, no process opened the directory between them.
    """

    inode: int
    written_ns: int
    holder: bytes

    @classmethod
    def of(cls, fd: int) -> LockMark:
        status = os.fstat(fd)
        return cls(status.st_ino, status.st_mtime_ns, os.pread(fd, 32, 0) if S_ISREG(status.st_mode) else b"")
