"""What the kernel says about the other end of a Unix socket. Nothing here comes from a field a caller fills in."""

from __future__ import annotations

import os
import select
import socket
import struct
from dataclasses import dataclass

_SO_PEERPIDFD = 77  # Linux 6.5; missing from Python's socket module
_UCRED = struct.Struct("3i")


@dataclass(frozen=True)
class Peer:
    """`pid` is 0 when the caller lives in a pid namespace that we cannot see into."""

    pid: int
    uid: int
    gid: int
    cgroup: str = ""


def read_peer(connection: socket.socket) -> Peer:
    """Raises OSError only when the socket itself is broken."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    pid, uid, gid = _UCRED.unpack(raw)
    return Peer(pid, uid, gid, _cgroup_of(connection, pid))


def has_exited(peer: Peer) -> bool:
    """Whether the process is certainly over, and all that it had mapped; False where that cannot be known."""
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
    """The caller's cgroup, read while a pidfd proves that the pid has not been reused."""
    try:
        pidfd = connection.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    except OSError:
        return ""  # before Linux 6.5: a label for people is all that is lost
    try:
        with open(f"/proc/{pid}/cgroup") as file:
            lines = file.read().splitlines()
        return lines[-1].rpartition(":")[2] if lines else ""
    except OSError:
        return ""
    finally:
        os.close(pidfd)
