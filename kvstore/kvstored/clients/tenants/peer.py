"""The kernel's description of the other end of a Unix socket. No field here is filled in by the caller."""

from __future__ import annotations

import os
import select
import socket
import struct
from pathlib import Path
from typing import NamedTuple

from kvstored.clients.containers import container_of
from kvstored.process import is_unmapped, start_ticks

_SO_PEERPIDFD = 77  # Linux 6.5; missing from Python's socket module
_UCRED = struct.Struct("3i")


class Peer(NamedTuple):
    """The process at the other end of a Unix socket, as the kernel described it when it connected.

    `pid` is 0 if the process is in a pid namespace that the daemon cannot see into. `cgroup` is a label for people, ""
    if unknown. `control_group` is the process's path in the hierarchy of cgroup version 2, by which a tenant may be
    recognised; "" unless the daemon is sure that the process which connected has it. `has_no_uid` and
    `has_no_gid` are true if the number stands for any user or group that the daemon's user namespace does not map.
    `gid` is the primary group; others are not known. `socket_of` is the tenant to whose own socket the process
    connected, "" for the common one."""

    pid: int
    uid: int
    gid: int
    cgroup: str = ""
    has_no_uid: bool = False
    has_no_gid: bool = False
    control_group: str = ""
    socket_of: str = ""


def read_peer(connection: socket.socket, *, empty_queue_ticks: int = 0, socket_of: str = "") -> Peer:
    """Return the process at the other end of the Unix socket `connection`, which was accepted on the own socket of the
    tenant `socket_of`, if that is not "". `empty_queue_ticks` is a moment, in clock ticks since boot, at which
    `connection` had not been made yet: before Linux 6.5 a process that started later may have the pid of the one that
    connected. Raises OSError only if the socket itself is broken.
    """
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    pid, uid, gid = _UCRED.unpack(raw)
    cgroup, control_group = _cgroups_of(connection, pid, empty_queue_ticks)
    return Peer(
        pid,
        uid,
        gid,
        cgroup,
        has_no_uid=is_unmapped("uid", uid),
        has_no_gid=is_unmapped("gid", gid),
        control_group=control_group,
        socket_of=socket_of,
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
        return _has_ended(pidfd)
    finally:
        os.close(pidfd)


def _has_ended(pidfd: int) -> bool:
    ended = select.poll()
    ended.register(pidfd, select.POLLIN)
    return bool(ended.poll(0))  # it may not have been reaped yet


def _cgroups_of(connection: socket.socket, pid: int, empty_queue_ticks: int) -> tuple[str, str]:
    """Return the caller's cgroup as a label, and its path in the hierarchy of version 2 as an identity; each is "" if
    it cannot be known: the caller has exited, or this process cannot see it.
    """
    try:
        pidfd, is_caller = connection.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD), True
    except OSError:  # before Linux 6.5: who connected may have exited, and another have its number
        try:
            pidfd, is_caller = os.pidfd_open(pid), False
        except (OSError, ValueError):
            return "", ""
    try:
        seen = _pid_in_proc(pidfd)
        label, control_group = read_cgroup(Path("/proc"), seen), read_control_group(Path("/proc"), seen)
        if not is_caller:  # a process that ran before there was the connection has had its number all the time
            started_ticks = start_ticks(seen)
            is_caller = started_ticks is not None and started_ticks < empty_queue_ticks
        if not is_caller or _has_ended(pidfd):  # not ended: what was read is its own
            control_group = ""
        return label, control_group
    except (OSError, ValueError):
        return "", ""
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


def read_control_group(proc: Path, pid: int) -> str:
    """Return the path of the process `pid` in the hierarchy of cgroup version 2, read from the procfs folder `proc`, as
    this process sees it; "" if there is no such hierarchy. Raises OSError."""
    lines = (proc / str(pid) / "cgroup").read_bytes().split(b"\n")  # a name may have any byte but this one
    return next((os.fsdecode(line[3:]) for line in lines if line.startswith(b"0::")), "")
