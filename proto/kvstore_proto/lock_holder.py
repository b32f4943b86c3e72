"""The process that holds the lock of a directory, as /proc/locks shows it.

Takes no lock: a daemon that starts meanwhile would take the caller for another one.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

UNLOCKED, UNSEEN = 0, -1  # in the place of a process's number; UNSEEN is in another pid namespace
LOCKS = Path("/proc/locks")


def lock_holder(*paths: Path, locks: Path = LOCKS) -> int:
    """Return the process that has locked one of `paths` for itself alone, `UNSEEN` for one that cannot be seen from
    here, `UNLOCKED` where none has. `locks`: the kernel's list. Raises OSError where that cannot be read."""
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
    """Return whether major:minor:inode, as the kernel lists it, is the file of `status`. Where devices are anonymous
    (btrfs, overlay) a file's is not its file system's; the inode must do there."""
    major, minor, inode = device_and_inode.split(":")
    device, own = (int(major, 16), int(minor, 16)), (os.major(status.st_dev), os.minor(status.st_dev))
    return int(inode) == status.st_ino and (device == own or device[0] == own[0] == 0)
