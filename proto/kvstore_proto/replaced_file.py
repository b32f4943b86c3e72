"""Files that are replaced as a whole: written beside the old one, synced if needed, renamed.

A crash leaves the old file or the new one. A failed write leaves the old file and nothing beside it, and its error
names the file, even if the system call that failed knew only a descriptor.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import BufferedWriter
from pathlib import Path

BESIDE = ".new"  # ends the name of what is not whole yet


def _nothing() -> None:
    """Do nothing."""


@contextmanager
def replaced_file(
    path: Path,
    *,
    durable: bool = True,
    mode: int = 0o600,
    is_shared: bool = False,
    before_rename: Callable[[], None] = _nothing,
) -> Iterator[BufferedWriter]:
    """Yield a new file to write. When the `with` block ends, the new file replaces the file at `path`; no reader sees a
    part of it. With `durable` it survives a crash of the machine too. `mode` is its permissions. Set `is_shared` if
    other processes may replace the file at the same time. `before_rename` is called just before the replacement. After
    an error the old file stays. Raises OSError that names `path`.
    """
    temporary = path.with_name(path.name + BESIDE)
    try:
        if is_shared:
            import tempfile  # it loads much that a start needs for nothing else

            descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=BESIDE, dir=path.parent)
            temporary = Path(name)
        else:
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            with open(descriptor, "wb") as file:
                yield file
                file.flush()
                if mode != 0o600:
                    os.fchmod(descriptor, mode)
                if durable:
                    os.fsync(descriptor)
            before_rename()
            temporary.replace(path)
        except BaseException:
            with suppress(OSError):
                temporary.unlink()
            raise
        if durable:
            sync_directory(path.parent)
    except OSError as error:
        error.filename = str(path)
        raise


def usual_mode() -> int:
    """Return the permissions of a new file that others may read, by this process's umask, such as 0o644."""
    mask = os.umask(0o077)
    os.umask(mask)
    return 0o666 & ~mask


def sync_directory(path: Path) -> None:
    """Make the names of files in the directory `path` durable: they survive a crash of the machine. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def remove_leftover(path: Path) -> None:
    """Remove the unfinished file that a process left beside `path`, because it was killed while it replaced `path`. A
    failure is ignored.
    """
    temporary = path.with_name(path.name + BESIDE)
    if temporary.exists():  # on a read-only file system even the removal of what is not there fails
        with suppress(OSError):
            temporary.unlink()
