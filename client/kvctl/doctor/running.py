"""Finds a daemon whose sockets do not show it, by the lock of its state directory."""

from __future__ import annotations

import contextlib
import os

from kvctl.doctor.surroundings import Surroundings

LOCK_FILE = "lock"


def holder_of_lock(around: Surroundings) -> int | None:
    """Return the pid of the daemon that has the state directory, or None where none has. Raise OSError where that
    cannot be known."""
    if around.status is not None:
        return around.status.pid
    state_dir = around.settings.path("daemon.state_dir")
    if state_dir is None:
        raise OSError("the state directory is not known")
    wanted = set()
    for path in (state_dir / LOCK_FILE, state_dir):  # where no lock file can be made, the directory alone is locked
        with contextlib.suppress(FileNotFoundError):
            status = path.stat()
            wanted.add(f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}")
    for line in (around.proc / "locks").read_text().splitlines():
        words = line.split()
        if len(words) > 5 and words[1] == "FLOCK" and words[3] == "WRITE" and words[5] in wanted:
            return int(words[4])
    return None


def how_to_start(around: Surroundings, more: str = "") -> str:
    """Return what to do where no daemon answers: never what would start a second one. `more` follows the command."""
    start = f"kvstored serve --socket-dir {around.socket_dir}{more}"
    try:
        pid = holder_of_lock(around)
    except OSError:
        return f"see whether one runs (pgrep -a kvstored); start the daemon only if none does: {start}"
    if pid is None:
        return f"start the daemon: {start}"
    return (
        f"a daemon runs, pid {pid}: start no second one. Its sockets were removed, or it has another socket directory "
        f"(--socket-dir). It makes missing ones again every two seconds; if it does not, its log says why"
    )
