"""The state directory: made if need be, writable by this user alone, and locked by one daemon.

The kernel drops the lock with its holder, so a crash leaves nothing to clean up.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
from pathlib import Path

from kvstore_tiers.nvme.directory import make_directory


class StateDirectoryError(Exception):
    """The state directory cannot be used; the message says why and what to do."""


class AlreadyRunning(Exception):
    """Another daemon owns the directory; the message names its pid."""


def who_else_can_change(directory: Path) -> str | None:
    """Which other user can replace what is in a directory, and the cure; None when no other can."""
    status = directory.stat()
    if status.st_uid not in (0, os.geteuid()):
        return f"belongs to uid {status.st_uid} and must be ours or root's (chown it)"
    if status.st_mode & stat.S_IWOTH:
        return "can be written by everybody (chmod 700 it, or name a directory below it)"
    return None


def make_state_dir(path: Path) -> None:
    """Raises StateDirectoryError."""
    try:
        make_directory(path)
    except OSError as error:
        raise StateDirectoryError(
            f"cannot make state directory {path}: {error.strerror}; set daemon.state_dir to a writable place"
        ) from None
    if (others := who_else_can_change(path)) is not None:
        raise StateDirectoryError(f"state directory {path} {others}: with the secret in it, blocks and keys are theirs")
    if not os.access(path, os.W_OK | os.X_OK):
        raise StateDirectoryError(f"state directory {path} is not writable by uid {os.geteuid()}")


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


class FreshDirectories:
    """Which of `paths` a start will make, and the directories above them: a start that fails leaves none behind."""

    def __init__(self, *paths: Path) -> None:
        self._missing = [path for path in paths if not path.exists()]
        self._above = {above for path in self._missing for above in path.parents if not above.exists()}

    def remove(self) -> None:
        """Take away what was missing then, and all that is in it. The directories above go if they are empty."""
        for path in self._missing:
            shutil.rmtree(path, ignore_errors=True)
        for above in sorted(self._above, key=lambda path: -len(path.parts)):
            with contextlib.suppress(OSError):
                above.rmdir()
