"""The place of a daemon's sockets, and the small files of clients that save work in the next process.

The module owns the names inside a socket directory and the choice of the directory: argument, then the environment
variable KVSTORED_SOCKET_DIR, then /run/kvstored.
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

from kvstore_proto.replaced_file import replaced_file, usual_mode

ENVIRONMENT_VARIABLE = "KVSTORED_SOCKET_DIR"
DEFAULT_DIRECTORY = Path("/run/kvstored")
HANDSHAKE_SOCKET = "handshake.sock"
DATA_SOCKET = "data.sock"
ADMIN_SOCKET = "admin.sock"
UNARY_SOCKET = "unary.sock"
MAX_SOCKET_PATH_BYTES = 107  # sockaddr_un.sun_path less its final zero


def socket_directory(chosen: str | os.PathLike[str] | None = None) -> Path:
    """Return the directory that holds the daemon's sockets. `chosen` is that directory or one of its sockets; without
    it the environment variable KVSTORED_SOCKET_DIR counts, then /run/kvstored.
    """
    if chosen is None:
        chosen = os.environ.get(ENVIRONMENT_VARIABLE) or DEFAULT_DIRECTORY
    path = Path(chosen)
    if path.name in (HANDSHAKE_SOCKET, DATA_SOCKET, ADMIN_SOCKET, UNARY_SOCKET):
        path = path.parent
    return path.absolute()


def explain_unreachable(path: Path, error: OSError) -> str:
    """Return one sentence that says why the socket at `path` cannot be connected to, given the `error`, and what to
    do.
    """
    start = f"start it with: kvstored serve --socket-dir {path.parent}"
    if len(os.fsencode(path)) > MAX_SOCKET_PATH_BYTES:
        return f"socket path {path} is over {MAX_SOCKET_PATH_BYTES} bytes: choose a shorter socket directory"
    if isinstance(error, FileNotFoundError):
        return f"no daemon at {path.parent} ({path.name} does not exist); {start}"
    if isinstance(error, ConnectionRefusedError):
        return f"no daemon at {path.parent} (stale socket {path.name}, no process listens); {start}"
    if isinstance(error, PermissionError):
        group = "kvstored-admin" if path.name == ADMIN_SOCKET else "kvstored"
        return (
            f"permission denied at {path}; join its group ({group}: sudo usermod -aG {group} $USER, "
            "then log in again) or run as the daemon's user"
        )
    if isinstance(error, (TimeoutError, BlockingIOError)):
        return f"the daemon at {path.parent} does not answer (stopped or overloaded)"
    return f"cannot connect to {path}: {error.strerror or error}"


def cache_directory() -> Path:
    """Return the directory for data that connectors can learn again: `$XDG_CACHE_HOME/kvstored`, or
    `~/.cache/kvstored`.
    """
    home = os.environ.get("XDG_CACHE_HOME", "")
    base = Path(home) if os.path.isabs(home) else Path.home() / ".cache"
    return base / "kvstored"


def costs_file(fingerprint_digest: bytes) -> Path:
    """Return the path of the file that keeps the measured costs of loading and computing K/V state. There is one file
    for each fingerprint of an engine and model, named by `fingerprint_digest`.
    """
    return cache_directory() / f"costs-{fingerprint_digest.hex()[:32]}.json"


def write_json(path: Path, value: Any) -> None:
    """Replace the content of the file at `path` by `value` as JSON. Do nothing if it cannot be written."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with replaced_file(path, durable=False, mode=usual_mode(), is_shared=True) as file:
            file.write(json.dumps(value, indent=1).encode())
