"""Messages to systemd: ready, status, watchdog, stopping, and which descriptors to keep over a restart. Without
systemd, nothing happens.

The protocol is one datagram of lines to $NOTIFY_SOCKET (sd_notify(3)), with descriptors if there are some, and
$LISTEN_FDS at the start (sd_listen_fds(3)); a library for it would be longer than this.
"""

from __future__ import annotations

import os
import select
import socket
from collections.abc import Sequence

from kvstore_tiers.child_processes import send_packet

_FIRST_LISTEN_FD = 3
_BARRIER_TIMEOUT_S = 5.0


def notify(*lines: str) -> bool:
    """Send `lines`; return False without a listener."""
    return _send(lines, [], 0)


def notify_about(descriptors: Sequence[int], *lines: str) -> bool:
    """Send `lines` with descriptors, without waiting; return False without a listener, or if the queue is full."""
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
    """Wait until the manager has read all messages: after this process has ended, it may not know the sender of a
    message.
    """
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
    """Return the descriptors that the manager kept, by name; they belong to this process from now on. Call it once: the
    variables are removed.

    systemd stores a second descriptor under a name beside the first, and hands out the newest one first.
    """
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
    """Return how many descriptors the manager keeps; it closes further ones silently. None if it does not say. systemd
    says so from 254 on, in $FDSTORE; for an older one the unit does, in $KVSTORED_FDSTORE.
    """
    limit = os.environ.get("FDSTORE") or os.environ.get("KVSTORED_FDSTORE", "")
    return int(limit) if limit.isdigit() and int(limit) else None


def offers_descriptor_store() -> bool:
    """Return whether the unit has a store for descriptors, as far as the environment says."""
    return any(os.environ.get(name, "0") != "0" for name in ("FDSTORE", "KVSTORED_FDSTORE"))


def store_is_preserved() -> bool:
    """Return whether the store outlives a stop of the unit. systemd 254, the first to set $FDSTORE, is the first that
    can (FileDescriptorStorePreserve=yes, as in the project's unit).
    """
    return os.environ.get("FDSTORE", "0") != "0"


def watchdog_interval_s() -> float | None:
    """Return half of the unit's WatchdogSec, in seconds, or None if there is no watchdog."""
    usec = os.environ.get("WATCHDOG_USEC", "")
    pid = os.environ.get("WATCHDOG_PID", "")
    if not usec.isdigit() or (pid and pid != str(os.getpid())):
        return None
    return int(usec) / 2e6
