"""One daemon for one state directory, which nobody else may change: a lock file that holds the owner's pid.

The kernel drops the lock with its holder, so a crash leaves nothing to clean up.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
from pathlib import Path


class AlreadyRunning(Exception):
    """Another daemon owns the directory; the message names its pid."""


def who_else_can_change(directory: Path) -> str | None:
    """Why what lies in a directory is not ours alone to replace, and the cure; None when it is."""
    status = directory.stat()
    if status.st_uid not in (0, os.geteuid()):
        return f"belongs to uid {status.st_uid} and must be ours or root's (chown it)"
    if status.st_mode & stat.S_IWOTH:
        return "can be written by everybody (chmod 700 it, or name a directory below it)"
    return None


class InstanceLock:
    """Held from construction to `release`."""

    def __init__(self, state_dir: Path) -> None:
        self._fd = os.open(state_dir / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            written = os.pread(self._fd, 32, 0).strip()
            os.close(self._fd)
            holder = f"pid {int(written)}" if written.isdigit() else "whose pid is not known"
            raise AlreadyRunning(
                f"{state_dir} is in use by another kvstored, {holder}; stop it or choose another daemon.state_dir"
            ) from None
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, f"{os.getpid()}\n".encode(), 0)

    def release(self) -> None:
        with contextlib.suppress(OSError):
            os.close(self._fd)
