"""Names of slab files and the mark in the lock file. Imports only modules that are loaded already."""

from __future__ import annotations

import os
from pathlib import Path
from stat import S_ISREG
from typing import NamedTuple


def slab_path(slabs: Path, number: int, suffix: str = "slab") -> Path:
    return slabs / f"{number:08d}.{suffix}"


def slab_numbers(slabs: Path, suffix: str = "slab") -> list[int]:
    """Numbers of the files with this suffix, ascending. Other names are ignored: a 1.slab beside
    00000001.slab is not the same slab."""
    named = ((path, int(path.stem)) for path in slabs.glob(f"*.{suffix}") if path.stem.isdecimal())
    return sorted(number for path, number in named if path == slab_path(slabs, number, suffix))


class LockMark(NamedTuple):
    """When the lock of a directory was last written, and the process number in it."""

    inode: int
    written_ns: int
    holder: bytes

    @classmethod
    def of(cls, fd: int) -> LockMark:
        status = os.fstat(fd)
        return cls(status.st_ino, status.st_mtime_ns, os.pread(fd, 32, 0) if S_ISREG(status.st_mode) else b"")
