"""The environment of a daemon's helper processes: its own, without variables that were meant for it alone."""

from __future__ import annotations

import os

from kvstore_tiers.failpoints import ENVIRONMENT

_FOR_THE_DAEMON = frozenset(
    ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", "LISTEN_FDS", "LISTEN_PID", "LISTEN_FDNAMES", ENVIRONMENT)
)  # of its service manager, and failures that were armed in it


def variables_of_children() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in _FOR_THE_DAEMON}
