"""Reading of an operator's files with secrets, only if no other user can read or change them."""

from __future__ import annotations

import hashlib
import os
import stat
from pathlib import Path

from kvstore_proto.state_identity import SECRET_BYTES
from kvstored.config.mistakes import ConfigError, need

MAX_FILE_BYTES = 1 << 20


def read_private(setting: str, path: Path) -> bytes:
    """Return the bytes of the file `path`, which the setting `setting` names. Raises ConfigError if another user can
    read or change the file, or if it belongs neither to this user nor to root."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with open(descriptor, "rb") as file:
            _require_private(setting, path, os.fstat(descriptor))
            raw = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{setting}: cannot read {path}: {error.strerror}") from None
    need(len(raw) <= MAX_FILE_BYTES, f"{setting}: {path} is larger than {MAX_FILE_BYTES} bytes")
    return raw


def read_private_lines(setting: str, path: Path) -> list[str]:
    """Return the lines of the text file `path`, which the setting `setting` names. Raises ConfigError if another user
    can read or change the file."""
    try:
        return read_private(setting, path).decode().splitlines()
    except UnicodeDecodeError:
        raise ConfigError(f"{setting}: {path} is not text") from None


def _require_private(setting: str, path: Path, status: os.stat_result) -> None:
    need(stat.S_ISREG(status.st_mode), f"{setting}: {path} is not a regular file")
    is_ours = status.st_uid in (0, os.geteuid())
    need(is_ours, f"{setting}: {path} belongs to uid {status.st_uid}: it must be ours or root's")
    mode = stat.S_IMODE(status.st_mode)
    need(
        not mode & 0o077,
        f"{setting}: {path} has mode {mode:04o}; others must not reach it: chmod 600 {path}",
    )


def read_secret(setting: str, path: Path | None, purpose: bytes) -> bytes | None:
    """Return 32 bytes derived for `purpose` from the content of the file `path`, without surrounding white space, which
    the setting `setting` names. Return None if `path` is None. Raises ConfigError."""
    if path is None:
        return None
    content = read_private(setting, path).strip()
    need(
        len(content) >= SECRET_BYTES,
        f"{setting}: {path} has {len(content)} bytes, at least {SECRET_BYTES} are needed: "
        f"head -c 32 /dev/urandom | base64 > {path}",
    )
    return hashlib.blake2b(content, digest_size=SECRET_BYTES, person=purpose).digest()
