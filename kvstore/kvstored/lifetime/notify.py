"""Messages to systemd: ready, status, watchdog, stopping, and which descriptors to keep over a restart; and what it
passes to this process, kept memory and a listening socket. Without systemd, nothing happens.

The protocol is one datagram of lines to $NOTIFY_SOCKET (sd_notify(3)), with descriptors if there are some, and
$LISTEN_FDS at the start (sd_listen_fds(3)); a library for it would be longer than this.
"""

from __future__ import annotations

import os
import select
import socket
import stat
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from kvstore_tiers.child_processes import send_packet

_FIRST_LISTEN_FD = 3
_BARRIER_TIMEOUT_S = 5.0


def notify(*lines: str) -> bool:
    """Send `lines`, each "NAME=value", to systemd. Return False if the process was not started by systemd."""
    return _send(lines, [], 0)


def notify_about(descriptors: Sequence[int], *lines: str) -> bool:
    """Send `lines`, each "NAME=value", and `descriptors` to systemd, without waiting. Return False if the process was
    not started by systemd, or the queue is full."""
    return _send(lines, descriptors, socket.MSG_DONTWAIT)


def _send(lines: Sequence[str], descriptors: Sequence[int], flags: int) -> bool:
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return False
    if address.startswith("@"):
        address = "\0" + address[1:]
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
            sock.connect(address)
            send_packet(sock, "\n".join(lines).encode(), descriptors, flags)
        return True
    except OSError:
        return False


def wait_for_manager() -> None:
    """Wait until systemd has read all messages of this process. After the process has ended, systemd may not know who
    sent them."""
    ours, theirs = os.pipe2(os.O_CLOEXEC)
    try:
        if not notify_about([theirs], "BARRIER=1"):
            return
        os.close(theirs)
        theirs = -1
        waiting = select.poll()
        waiting.register(ours, select.POLLHUP)
        waiting.poll(_BARRIER_TIMEOUT_S * 1000)
    finally:
        os.close(ours)
        if theirs >= 0:
            os.close(theirs)


def stored_descriptors() -> dict[str, int]:
    """Return the descriptors that systemd kept for this process, by name. They belong to this process from now on. A
    second call returns none.

    systemd stores a second descriptor under a name beside the first, and hands out the newest one first.
    """
    passed = _passed_descriptors()
    return {name: passed.pop(name) for name, is_socket in _sockets_among(passed).items() if not is_socket}


def listening_socket(path: Path) -> socket.socket | None:
    """Return the socket that systemd listens on at `path` for this process (a .socket unit), or None if there is none.
    It belongs to this process from now on."""
    passed = _passed_descriptors()
    for name in [name for name, is_socket in _sockets_among(passed).items() if is_socket]:
        listener = socket.socket(fileno=passed[name])
        if listener.getsockname() == str(path) and listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            del passed[name]
            return listener
        listener.detach()
    return None


def _sockets_among(passed: dict[str, int]) -> dict[str, bool]:
    return {name: stat.S_ISSOCK(os.fstat(descriptor).st_mode) for name, descriptor in passed.items()}


@cache
def _passed_descriptors() -> dict[str, int]:
    """Return the descriptors with which systemd started this process, by name, and remove the variables that name
    them. A caller that takes one removes it."""
    pid, count = os.environ.pop("LISTEN_PID", ""), os.environ.pop("LISTEN_FDS", "")
    names = os.environ.pop("LISTEN_FDNAMES", "").split(":")
    if pid != str(os.getpid()) or not count.isdigit():
        return {}
    found: dict[str, int] = {}
    for index in range(int(count)):
        descriptor = _FIRST_LISTEN_FD + index
        name = names[index] if index < len(names) else ""
        os.set_inheritable(descriptor, False)
        if name in found:
            os.close(descriptor)  # an older one of that name
        else:
            found[name] = descriptor
    return found


def store_limit() -> int | None:
    """Return how many descriptors systemd keeps for this unit; it closes further ones silently. Return None if that is
    not known. systemd says so from version 254 on, in $FDSTORE; with an older one the unit file does, in
    $KVSTORED_FDSTORE."""
    limit = os.environ.get("FDSTORE") or os.environ.get("KVSTORED_FDSTORE", "")
    return int(limit) if limit.isdigit() and int(limit) else None


def offers_descriptor_store() -> bool:
    """Return whether systemd keeps descriptors for this unit, as far as the environment variables say."""
    return any(os.environ.get(name, "0") != "0" for name in ("FDSTORE", "KVSTORED_FDSTORE"))


def store_is_preserved() -> bool:
    """Return whether systemd keeps descriptors over a stop of the unit. systemd 254, the first to set $FDSTORE, is the
    first that can (FileDescriptorStorePreserve=yes, as in the project's unit).
    """
    return os.environ.get("FDSTORE", "0") != "0"


def watchdog_interval_s() -> float | None:
    """Return half of the unit's WatchdogSec, in seconds, or None if there is no watchdog."""
    usec = os.environ.get("WATCHDOG_USEC", "")
    pid = os.environ.get("WATCHDOG_PID", "")
    if not usec.isdigit() or (pid and pid != str(os.getpid())):
        return None
    return int(usec) / 2e6
