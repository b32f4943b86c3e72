"""What we tell systemd: ready, status, watchdog, stopping. A no-op where there is no systemd.

The protocol is one datagram of lines to $NOTIFY_SOCKET (sd_notify(3)); a library for it would be longer than this.
"""

from __future__ import annotations

import os
import socket


def notify(*lines: str) -> bool:
    """Send `lines`; False when nobody listens."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return False
    if address.startswith("@"):
        address = "\0" + address[1:]
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
            sock.sendto("\n".join(lines).encode(), address)
        return True
    except OSError:
        return False


def watchdog_interval_s() -> float | None:
    """Half of what the unit's WatchdogSec allows, or None when there is no watchdog."""
    usec = os.environ.get("WATCHDOG_USEC", "")
    pid = os.environ.get("WATCHDOG_PID", "")
    if not usec.isdigit() or (pid and pid != str(os.getpid())):
        return None
    return int(usec) / 2e6
