"""The process that holds the lock of a directory, read from /proc/locks.

The module takes no lock itself: a daemon that starts at that moment would take the caller for another daemon.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

UNLOCKED, UNSEEN = 0, -1  # in the place of a process's number; UNSEEN is in another pid namespace
LOCKS = Path("/proc/locks")


def lock_holder(*paths: Path, locks: Path = LOCKS) -> int:
    """Return the id of the process that holds an exclusive lock on one of the files `paths`. Return `UNLOCKED` if no
    process does, and `UNSEEN` if the process is in another pid namespace. `locks` is the kernel's list of locks.
    Raises OSError if it cannot be read.
    """
    found = []
    for path in paths:
        with suppress(FileNotFoundError):
            found.append(path.stat())
    for line in locks.read_text().splitlines() if found else ():
        words = line.split()
        if words[1:4:2] == ["FLOCK", "WRITE"] and any(_is_file(words[5], status) for status in found):
            return max(UNSEEN, int(words[4])) or UNSEEN
    return UNLOCKED


def _is_file(device_and_inode: str, status: os.stat_result) -> bool:
    """Return whether `device_and_inode`, major:minor:inode in the kernel's list, is the file of `status`. On anonymous
    devices (btrfs, overlay) a file's device number differs from its file system's; there the inode alone decides.
    """
    major, minor, inode = device_and_inode.split(":")
    device, own = (int(major, 16), int(minor, 16)), (os.major(status.st_dev), os.minor(status.st_dev))
    return int(inode) == status.st_ino and (device == own or device[0] == own[0] == 0)
