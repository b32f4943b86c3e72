"""A daemon whose disk hangs: `python -m tests.reference.hanging_daemon serve ...`, the real one over a faulty tier.

Owns the fault, the short limit for its end, and nothing else.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from kvstore_tiers.base import Tier
from kvstore_tiers.testing.faulty import FaultyTier, hung
from kvstored import daemon, storage
from kvstored.cli import main
from tests.reference.running_daemon import RunningDaemon

_open_tiers = storage.open_tiers
LIMIT_VARIABLE = "KVSTORED_TEST_STOP_LIMIT_S"


class HangingDaemon(RunningDaemon):
    """A daemon that hangs, with the interface of `RunningDaemon`."""

    def command(self) -> list[str]:
        return [__name__ if part == "kvstored" else part for part in super().command()]


def _on_a_hanging_disk(*arguments: Any) -> list[Tier]:
    *faster, nvme = _open_tiers(*arguments)
    return [*faster, FaultyTier(nvme, hung())]


if __name__ == "__main__":
    storage.open_tiers = _on_a_hanging_disk
    daemon.STOP_LIMIT_S = float(os.environ[LIMIT_VARIABLE])
    sys.exit(main())
