"""The state directory: made if needed, writable by this user alone, and locked by one daemon.

The kernel drops the lock with its holder, so a crash leaves nothing to clean up.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import stat
from pathlib import Path

from kvstore_proto.state_identity import SECRET_FILE
from kvstore_tiers.nvme.directory import lock_directory, make_directory, open_lock, read_holder, write_holder
from kvstored.clients.tenants import ourselves

log = logging.getLogger(__name__)


class StateDirectoryError(Exception):
    """An error: the state directory cannot be used. The message says why and what to do."""


class AlreadyRunning(Exception):
    """An error: another daemon uses the state directory. The message names its pid."""


def who_else_can_change(directory: Path) -> str | None:
    """Return a sentence, with the remedy, about another user who can replace the content of `directory`, or None if no
    other can.
    """
    status = directory.stat()
    if status.st_uid not in (0, os.geteuid()):
        return f"belongs to uid {status.st_uid} and must be ours or root's (chown it)"
    if status.st_mode & stat.S_IWOTH:
        return "can be written by everybody (chmod 700 it, or name a directory below it)"
    return None


def make_state_dir(path: Path) -> None:
    """Make the state directory `path` if it does not exist, accessible to this user alone. Raises
    StateDirectoryError.
    """
    if ourselves().has_no_uid:
        raise StateDirectoryError(
            f"uid {os.geteuid()} is what this user namespace shows of every user that it does not map: others' files "
            "and callers look like the daemon's own: run it as a user that the namespace maps to another uid"
        )
    try:
        make_directory(path)
    except OSError as error:
        raise StateDirectoryError(
            f"cannot make state directory {path}: {error.strerror}; set daemon.state_dir to a writable place"
        ) from None
    if (others := who_else_can_change(path)) is not None:
        raise StateDirectoryError(f"state directory {path} {others}: with the secret in it, blocks and keys are theirs")
    if not os.access(path, os.W_OK | os.X_OK) and not (path / SECRET_FILE).exists():
        raise StateDirectoryError(
            f"state directory {path} is not writable by uid {os.geteuid()}, and there is no secret in it yet: let this "
            "user write there (is the file system read-only?), or set daemon.state_dir to another place"
        )


OLD_FILES = ("usage.npz", "names.json", "endurance.json", "scrub.json")
OLD_VERSION = "0.2.0.dev1194"  # the last that wrote them


def leave_old_files(directory: Path, *, discard: bool) -> None:
    """Check that the state directory has no files of an old version whose state is not read any more. With `discard`,
    remove such files. Raises StateDirectoryError if there are some, and OSError."""
    found = [name for name in OLD_FILES if (directory / name).exists()]
    if not found:
        return
    if not discard:
        them = "it" if len(found) == 1 else "them"
        raise StateDirectoryError(
            f"state directory {directory}: {', '.join(found)} written by {OLD_VERSION} or before; move {them} away, or "
            "start with --discard-old (blocks stay; how they were used, names and the endurance budget begin anew)"
        )
    for name in found:
        (directory / name).unlink()
    log.warning("--discard-old: removed %s of %s", ", ".join(found), directory)


class InstanceLock:
    """A lock on the state directory, held from construction to `release`, so that only one daemon uses the directory.
    The constructor raises AlreadyRunning."""

    def __init__(self, state_dir: Path) -> None:
        self._fd, self._directory = open_lock(state_dir), -1
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not stat.S_ISDIR(os.fstat(self._fd).st_mode):
                self._directory = lock_directory(state_dir)
        except BlockingIOError:
            written = read_holder(self._fd)
            os.close(self._fd)
            holder = f"pid {int(written)}" if written.isdigit() else "whose pid is not known"
            raise AlreadyRunning(
                f"{state_dir} is in use by another kvstored, {holder}; stop it or choose another daemon.state_dir"
            ) from None
        if not write_holder(self._fd):
            log.warning("%s/lock cannot be written: a second daemon is refused without our pid", state_dir)

    def release(self) -> None:
        for descriptor in (self._directory, self._fd):
            with contextlib.suppress(OSError):
                os.close(descriptor)


class FreshDirectories:
    """A record of which of `paths`, and of the directories above them, did not exist when it was made, so that a start
    of the daemon that fails can remove what it has made."""

    def __init__(self, *paths: Path) -> None:
        self._missing = [path for path in paths if not path.exists()]
        self._above = {above for path in self._missing for above in path.parents if not above.exists()}

    def remove(self) -> None:
        """Remove those `paths` that did not exist when this object was made, with their content, and the new
        directories above them if they are empty."""
        import shutil

        for path in self._missing:
            shutil.rmtree(path, ignore_errors=True)
        for above in sorted(self._above, key=lambda path: -len(path.parts)):
            with contextlib.suppress(OSError):
                above.rmdir()
