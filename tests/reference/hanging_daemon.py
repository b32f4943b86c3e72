"""A daemon whose disk hangs: `python -m tests.reference.hanging_daemon serve ...`, the real one over a faulty tier.

Owns the fault, the short limit for its end, and nothing else.
"""

from __future__ import annotations

import os
import sys

from kvstore_tiers.base import Tier
from kvstore_tiers.testing.faulty import FaultyTier, hung
from kvstored import daemon
from kvstored.cli import main
from kvstored.config.tiers import Start
from tests.reference.running_daemon import RunningDaemon

LIMIT_VARIABLE = "KVSTORED_TEST_STOP_LIMIT_S"


class HangingDaemon(RunningDaemon):
    """As `RunningDaemon`."""

    def command(self) -> list[str]:
        return [__name__ if part == "kvstored" else part for part in super().command()]


class _OnAHangingDisk(daemon.NodeStorage):
    def _open_tiers(self, mapped: Tier, start: Start) -> list[Tier]:
        *faster, nvme = super()._open_tiers(mapped, start)
        return [*faster, FaultyTier(nvme, hung())]


if __name__ == "__main__":
    daemon.NodeStorage = _OnAHangingDisk  # type: ignore[misc]
    daemon.STOP_LIMIT_S = float(os.environ[LIMIT_VARIABLE])
    sys.exit(main())
