"""Files of the daemon's own: replaced whole and durably, readable by nobody else."""

from __future__ import annotations

import os
from pathlib import Path


def write_private(path: Path, content: bytes | memoryview, *, durable: bool = True) -> None:
    """Atomic replacement, mode 0600; `durable`: over a crash of the machine too. Raises OSError."""
    temporary = path.with_name(path.name + ".new")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        left = memoryview(content)
        while left:  # a disk that fills up takes part of a write before it refuses
            left = left[os.write(descriptor, left) :]
        if durable:
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
    os.replace(temporary, path)
    if not durable:
        return
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
