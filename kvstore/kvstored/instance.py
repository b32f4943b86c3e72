"""One daemon for one state directory: a lock file that holds the owner's pid.

The kernel drops the lock with its holder, so a crash leaves nothing to clean up.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path


class AlreadyRunning(Exception):
    """Another daemon owns the directory; the message names its pid."""


class InstanceLock:
    """Held from construction to `release`."""

    def __init__(self, state_dir: Path) -> None:
        self._fd = os.open(state_dir / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(self._fd, 32, 0).decode(errors="replace").strip() or "unknown"
            os.close(self._fd)
            raise AlreadyRunning(
                f"{state_dir} is in use by another kvstored, pid {holder}; stop it or choose another daemon.state_dir"
            ) from None
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, f"{os.getpid()}\n".encode(), 0)

    def release(self) -> None:
        with contextlib.suppress(OSError):
            os.close(self._fd)
