"""Finds a daemon whose sockets do not show it, by the lock of its state directory."""

from __future__ import annotations

from kvctl.doctor.surroundings import Surroundings
from kvstore_proto.lock_holder import UNLOCKED, UNSEEN, lock_holder

LOCK_FILE = "lock"


def holder_of_lock(around: Surroundings) -> int:
    """Return the pid of the daemon that has the state directory, as `lock_holder` does. Raise OSError where that cannot
    be known."""
    if around.status is not None:
        return around.status.pid
    state_dir = around.settings.path("daemon.state_dir")
    if state_dir is None:
        raise OSError("the state directory is not known")
    # Where no lock file can be made, the directory alone is locked.
    return lock_holder(state_dir / LOCK_FILE, state_dir, locks=around.proc / "locks")


def how_to_start(around: Surroundings, more: str = "") -> str:
    """Return what to do where no daemon answers: never what would start a second one. `more` follows the command."""
    start = f"kvstored serve --socket-dir {around.socket_dir}{more}"
    try:
        pid = holder_of_lock(around)
    except OSError:
        return f"see whether one runs (pgrep -a kvstored); start the daemon only if none does: {start}"
    if pid == UNLOCKED:
        return f"start the daemon: {start}"
    where = "in another pid namespace" if pid == UNSEEN else f"pid {pid}"
    return (
        f"a daemon runs, {where}: start no second one. Its sockets were removed, or it has another socket directory "
        f"(--socket-dir). It makes missing ones again every two seconds; if it does not, its log says why"
    )
