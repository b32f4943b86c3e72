"""Files of the daemon's own: replaced whole and durably, readable by its owner alone."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedWriter
from pathlib import Path


def write_private(path: Path, content: bytes) -> None:
    """Atomic replacement, mode 0600, over a crash of the machine too. Raises OSError."""
    with private_file(path) as file:
        file.write(content)


@contextmanager
def private_file(path: Path, *, durable: bool = True) -> Iterator[BufferedWriter]:
    """A file that takes the place of `path`, mode 0600, once it is written; `durable`: over a crash of the machine too.
    Raises OSError.
    """
    temporary = path.with_name(path.name + ".new")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with open(descriptor, "wb") as file:
        yield file
        file.flush()
        if durable:
            os.fsync(descriptor)
    os.replace(temporary, path)
    if not durable:
        return
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
