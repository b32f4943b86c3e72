"""The lock file of a directory: opened and marked, also where nothing can be written.

The lock is the kernel's, on an open file, and needs no space. The holder's number in it is for people, and shows
whether another process was there. The directory itself is locked too: where there is no file and none can be made that
alone holds, also against a process that comes when there is room again.
"""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from pathlib import Path

from kvstore_tiers.failures import CANNOT_WRITE

LOCK = "lock"


def open_lock(directory: Path) -> int:
    """Return a descriptor to lock: of DIRECTORY/lock, made if need be, or of the directory. Raises OSError."""
    path = directory / LOCK
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno not in CANNOT_WRITE:
            raise
    with suppress(FileNotFoundError):
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    return os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)


def lock_directory(directory: Path) -> int:
    """Lock the directory itself; a descriptor that holds the lock. Raises BlockingIOError where another has it,
    OSError."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def read_holder(descriptor: int) -> bytes:
    """Return the number in a lock file; b"" where there is none."""
    with suppress(OSError):
        return os.pread(descriptor, 32, 0).strip()
    return b""


def write_holder(descriptor: int) -> bool:
    """Write our process number over the one before; whether that could be done. The space that the file has is kept:
    on a full disk it would not come back."""
    mark = f"{os.getpid()}\n".encode()
    try:
        os.pwrite(descriptor, mark, 0)
        os.ftruncate(descriptor, len(mark))
    except OSError:
        return False
    return True
