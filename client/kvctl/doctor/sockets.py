"""The socket directory and its sockets: whether they exist, are closed to other users, answer, and are open to this
user. If the sockets show no daemon, the lock of the state directory may.
"""

from __future__ import annotations

import grp
import os
import pwd
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

from kvctl.doctor.surroundings import Finding, Surroundings, fail, ok, warn
from kvstore_client.paths import (
    ADMIN_SOCKET,
    DATA_SOCKET,
    HANDSHAKE_SOCKET,
    MAX_SOCKET_PATH_BYTES,
    UNARY_SOCKET,
    explain_unreachable,
)
from kvstore_proto.lock_holder import UNLOCKED, UNSEEN, lock_holder

_KINDS = {
    HANDSHAKE_SOCKET: socket.SOCK_SEQPACKET,
    DATA_SOCKET: socket.SOCK_STREAM,
    ADMIN_SOCKET: socket.SOCK_STREAM,
    UNARY_SOCKET: socket.SOCK_STREAM,
}
_PROBE_S = 2.0
LOCK_FILE = "lock"


def directory(around: Surroundings) -> Iterator[Finding]:
    path = around.socket_dir
    if len(os.fsencode(path / HANDSHAKE_SOCKET)) > MAX_SOCKET_PATH_BYTES:
        yield fail("directory", f"{path} is too long for a Unix socket", "choose a shorter daemon.socket_dir")
        return
    try:
        status = path.stat()
    except FileNotFoundError:
        yield fail("directory", f"{path} does not exist", how_to_start(around, "; or name another with --socket-dir"))
        return
    except PermissionError:
        yield fail("directory", f"{path} cannot be reached by user {user_name(around.uid)}", _join("kvstored"))
        return
    if not stat.S_ISDIR(status.st_mode):
        yield fail("directory", f"{path} is not a directory", "give the directory that holds the sockets")
        return
    seen = f"{path}, {_describe(status)}"
    if status.st_mode & stat.S_IWOTH:
        yield fail(
            "directory", f"{seen}: all users may write there", f"chmod o-w {path}, or use a directory of its own"
        )
    elif not os.access(path, os.X_OK):
        yield fail("directory", f"{seen}: closed to user {user_name(around.uid)}", _join(_group_name(status.st_gid)))
    else:
        yield ok("directory", seen)


def sockets(around: Surroundings) -> Iterator[Finding]:
    """Check each of the daemon's sockets. Yield nothing if their directory cannot be entered, because the check
    `directory` reports that.
    """
    if not os.access(around.socket_dir, os.X_OK):
        return
    for name in _KINDS:
        if name != UNARY_SOCKET or around.settings.flag("unary.enabled"):
            yield _socket(around, name)


def _socket(around: Surroundings, name: str) -> Finding:
    path = around.socket_dir / name
    try:
        status = path.lstat()
    except FileNotFoundError:
        return fail(name, "does not exist", how_to_start(around))
    if not stat.S_ISSOCK(status.st_mode):
        return fail(name, "is in the way and is not a socket", f"remove {path}, then {how_to_start(around)}")
    seen = _describe(status)
    if status.st_mode & stat.S_IRWXO:
        return fail(name, f"{seen}: open to all users", f"chmod o-rwx {path}")
    directory_uid = around.socket_dir.stat().st_uid
    if status.st_uid != directory_uid:
        return warn(
            name,
            f"{seen}, but the directory belongs to {user_name(directory_uid)}",
            "run one daemon, as one user; remove what another one left",
        )
    error = _connect(path, _KINDS[name])
    if error is None:
        return ok(name, f"{seen}, a daemon listens")
    if isinstance(error, ConnectionRefusedError):
        return fail(name, f"{seen}, stale: no daemon listens", how_to_start(around, " (it clears stale sockets)"))
    if isinstance(error, PermissionError):
        group = _group_name(status.st_gid)
        if not status.st_mode & stat.S_IRWXG:
            advice = "run kvctl as the daemon's user, or set daemon.admin_group to a group that you are in"
        elif _is_member(around.uid, status.st_gid):
            advice = f"you are in group {group}, but this login is older than that: log in again"
        else:
            advice = _join(group)
        seen = f"{seen}: closed to user {user_name(around.uid)}"
        if name == UNARY_SOCKET:
            return ok(name, f"{seen}; it is for the daemon's user alone")
        if name == ADMIN_SOCKET:
            return warn(name, f"{seen}; engines do not need it, kvctl does", advice)
        return fail(name, seen, advice)
    return fail(name, f"{seen}: {explain_unreachable(path, error)}", "look at the daemon's log")


def _connect(path: Path, kind: int) -> OSError | None:
    """Return the error of connecting to the socket at `path`; None if it works."""
    with socket.socket(socket.AF_UNIX, kind) as probe:
        probe.settimeout(_PROBE_S)
        try:
            probe.connect(str(path))
        except OSError as error:
            return error
    return None


def _describe(status: os.stat_result) -> str:
    owner = f"{user_name(status.st_uid)}:{_group_name(status.st_gid)}"
    return f"mode {stat.S_IMODE(status.st_mode):04o}, owner {owner}"


def user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"uid {uid}"


def _group_name(gid: int) -> str:
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return f"gid {gid}"


def _is_member(uid: int, gid: int) -> bool:
    """Return whether the group database lists the user `uid` in the group `gid`; it may be newer than this login."""
    try:
        return user_name(uid) in grp.getgrgid(gid).gr_mem
    except KeyError:
        return False


def _join(group: str) -> str:
    if group == "root":  # no user should join that
        return "set daemon.socket_group to a group that you are in, or run kvctl as the daemon's user"
    return f"join group {group}: sudo usermod -aG {group} $USER, then log in again; or run kvctl as the daemon's user"


def holder_of_lock(around: Surroundings) -> int:
    """Return the pid of the daemon that holds the state directory, as `lock_holder` does. Raises OSError if the pid
    cannot be known.
    """
    if around.status is not None:
        return around.status.pid
    state_dir = around.settings.path("daemon.state_dir")
    if state_dir is None:
        raise OSError("the state directory is not known")
    # Where no lock file can be made, the directory alone is locked.
    return lock_holder(state_dir / LOCK_FILE, state_dir, locks=around.proc / "locks")


def how_to_start(around: Surroundings, more: str = "") -> str:
    """Return advice for a user whose daemon does not answer. Its command never starts a second daemon. `more` is
    appended to the command.
    """
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
