"""The mark that each holder of a directory leaves in its lock file: a changed one means that another had it since."""

from __future__ import annotations

import os
from typing import NamedTuple


class LockMark(NamedTuple):
    """When the lock of a directory was last written, and the process number in it."""

    inode: int
    written_ns: int
    holder: bytes

    @classmethod
    def of(cls, fd: int) -> LockMark:
        status = os.fstat(fd)
        return cls(status.st_ino, status.st_mtime_ns, os.pread(fd, 32, 0))
