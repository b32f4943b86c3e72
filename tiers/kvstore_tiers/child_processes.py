"""Ways to a helper process: its environment, and descriptors over Unix sockets, with the requested flags.

`socket.send_fds` and `socket.recv_fds` take flags and, in Python 3.11 at least, do not pass them on: a call that must
not wait waits, and a descriptor that must not be inherited is. These functions serve the holder and systemd; clients
get their descriptors by `clients/handshake.py`. Imports little beside the standard library.
"""

from __future__ import annotations

import array
import os
import socket
import struct
from collections.abc import Sequence

from kvstore_tiers.failpoints import ENVIRONMENT

_FOR_THE_DAEMON = frozenset(
    ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", "LISTEN_FDS", "LISTEN_PID", "LISTEN_FDNAMES", ENVIRONMENT)
)  # of its service manager, and failures that were armed in it


def variables_of_children() -> dict[str, str]:
    """Return this process's environment variables for a child process, without the variables of systemd and of fault
    injection that were meant for this process alone.
    """
    return {name: value for name, value in os.environ.items() if name not in _FOR_THE_DAEMON}


_UCRED = struct.Struct("3i")


def is_of_our_user(connection: socket.socket) -> bool:
    """Return True if the process at the other end of the Unix socket `connection` runs as this process's user or as
    root, as the kernel says. Raises OSError.
    """
    _, uid, _ = _UCRED.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    return uid in (os.geteuid(), 0)


def send_packet(sock: socket.socket, packet: bytes, descriptors: Sequence[int] = (), flags: int = 0) -> None:
    """Send the bytes `packet` over the Unix socket `sock`, together with open file `descriptors`. `flags` are the flags
    of sendmsg. Raises OSError.
    """
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
    sock.sendmsg([packet], rights, flags)


def receive_packet(sock: socket.socket, nbytes: int, flags: int = 0) -> tuple[bytes, list[int]]:
    """Receive one packet of at most `nbytes` bytes from the Unix socket `sock`. Return the bytes, and at most four
    descriptors that came with them; child processes do not inherit these. Empty bytes mean that the other process has
    closed the socket. `flags` are the flags of recvmsg. Raises OSError.
    """
    found = array.array("i")
    room = socket.CMSG_SPACE(4 * found.itemsize)
    packet, ancillary, _, _ = sock.recvmsg(nbytes, room, flags | socket.MSG_CMSG_CLOEXEC)
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            found.frombytes(data[: len(data) - len(data) % found.itemsize])
    return packet, list(found)
