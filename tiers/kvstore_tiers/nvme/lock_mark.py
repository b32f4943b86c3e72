"""The mark that everybody leaves who takes a directory: what tells whether somebody had it meanwhile."""

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
