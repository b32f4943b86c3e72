"""The kernel's description of the other end of a Unix socket. No field here is filled in by the caller."""

from __future__ import annotations

import os
import select
import socket
import struct
from dataclasses import dataclass
from pathlib import Path

from kvstored.clients.containers import container_of
from kvstored.process import is_unmapped

_SO_PEERPIDFD = 77  # Linux 6.5; missing from Python's socket module
_UCRED = struct.Struct("3i")


@dataclass(frozen=True)
class Peer:
    """The process at the other end of a Unix socket, as the kernel described it when it connected.

    `pid` is 0 if the process is in a pid namespace that the daemon cannot see into. `cgroup` is "" if unknown.
    `has_no_uid` and `has_no_gid` are true if the number stands for any user or group that the daemon's user namespace
    does not map. `gid` is the primary group; others are not known."""

    pid: int
    uid: int
    gid: int
    cgroup: str = ""
    has_no_uid: bool = False
    has_no_gid: bool = False


def read_peer(connection: socket.socket) -> Peer:
    """Return the process at the other end of the Unix socket `connection`. Raises OSError only if the socket itself is
    broken.
    """
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    pid, uid, gid = _UCRED.unpack(raw)
    return Peer(
        pid,
        uid,
        gid,
        _cgroup_of(connection, pid),
        has_no_uid=is_unmapped("uid", uid),
        has_no_gid=is_unmapped("gid", gid),
    )


def ourselves() -> Peer:
    """Return this process as a Peer, as another process would see it."""
    uid, gid = os.geteuid(), os.getegid()
    return Peer(os.getpid(), uid, gid, has_no_uid=is_unmapped("uid", uid), has_no_gid=is_unmapped("gid", gid))


def has_exited(peer: Peer) -> bool:
    """Return whether the process `peer` has certainly exited, so that it maps no memory of the daemon any more. Return
    False if that cannot be known."""
    if peer.pid <= 0:
        return False
    try:
        pidfd = os.pidfd_open(peer.pid)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    try:
        ended = select.poll()
        ended.register(pidfd, select.POLLIN)
        return bool(ended.poll(0))  # it may not have been reaped yet
    finally:
        os.close(pidfd)


def _cgroup_of(connection: socket.socket, pid: int) -> str:
    """Return the caller's cgroup; "" if it cannot be known: the caller has exited, or this process cannot see it."""
    try:
        pidfd = connection.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    except OSError:  # before Linux 6.5: who connected may have exited, and another have its number
        try:
            pidfd = os.pidfd_open(pid)
        except (OSError, ValueError):
            return ""
    try:
        return read_cgroup(Path("/proc"), _pid_in_proc(pidfd))
    except (OSError, ValueError):
        return ""
    finally:
        os.close(pidfd)


def _pid_in_proc(pidfd: int) -> int:
    """Return the number of a process in the pid namespace of /proc, which may differ from the daemon's. Raises
    ValueError if it has none.
    """
    for line in Path(f"/proc/self/fdinfo/{pidfd}").read_text().splitlines():
        if line.startswith("Pid:") and (pid := int(line.removeprefix("Pid:"))) > 0:
            return pid
    raise ValueError("it has exited, or is not to be seen")


def read_cgroup(proc: Path, pid: int) -> str:
    """Return the cgroup path of the process `pid`, read from the procfs folder `proc`. If a hierarchy of cgroup version
    1 names a container, it is the path there, otherwise the path in the unified hierarchy. Raises OSError."""
    lines = (proc / str(pid) / "cgroup").read_text(errors="replace").splitlines()
    paths = [line.split(":", 2)[2].removesuffix(" (deleted)") for line in lines if line.count(":") >= 2]
    return next((path for path in reversed(paths) if container_of(path)), paths[-1] if paths else "")
