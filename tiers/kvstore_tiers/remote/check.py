"""Checks whether a driver understands the URL of a tier, in a process of its own.

The daemon itself loads no library of a store.

    python -m kvstore_tiers.remote.check

The URL comes by standard input; its mistake goes to standard output. The store is not asked. A part that the daemon's
credentials or environment may add is no mistake of the URL.
"""

from __future__ import annotations

import subprocess
import sys
from contextlib import suppress
from functools import lru_cache

from kvstore_tiers.child_processes import variables_of_children
from kvstore_tiers.remote.driver import CannotOpen
from kvstore_tiers.remote.drivers import open_driver

PATIENCE_S = 20.0


@lru_cache(16)
def mistake_in(url: str) -> str:
    """Return a sentence about what is wrong with the `url` of a remote store. Return "" if the URL is right, if the
    store's library is missing, or if the check takes too long.
    """
    command = [sys.executable, "-m", "kvstore_tiers.remote.check"]
    try:
        checked = subprocess.run(
            command, input=url, capture_output=True, text=True, timeout=PATIENCE_S, env=variables_of_children()
        )
    except subprocess.TimeoutExpired:
        return ""
    return checked.stdout.strip()


def main() -> int:
    with suppress(OSError, ImportError):
        try:
            open_driver(sys.stdin.read(), timeout_s=1.0, threads=1, credentials={}).close()
        except CannotOpen:
            pass
        except ValueError as mistake:
            print(mistake)
    return 0


if __name__ == "__main__":
    sys.exit(main())
