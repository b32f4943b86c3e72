"""Files of an operator's that hold secrets: read only where no other user can read or change them."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from kvstored.config.mistakes import ConfigError

MAX_FILE_BYTES = 1 << 20


def read_private(setting: str, path: Path) -> bytes:
    """The file's bytes, if only its owner can read or change it, and that owner is us or root. Raises ConfigError that
    names `setting`; OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    with open(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ConfigError(f"{setting}: {path} is not a regular file")
        if status.st_uid not in (0, os.geteuid()):
            raise ConfigError(f"{setting}: {path} belongs to uid {status.st_uid}: it must be ours or root's")
        if status.st_mode & 0o077:
            raise ConfigError(
                f"{setting}: {path} has mode {stat.S_IMODE(status.st_mode):04o}; others must not reach it: "
                f"chmod 600 {path}"
            )
        raw = file.read(MAX_FILE_BYTES + 1)
    if len(raw) > MAX_FILE_BYTES:
        raise ConfigError(f"{setting}: {path} is larger than {MAX_FILE_BYTES} bytes")
    return raw
