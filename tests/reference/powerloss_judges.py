"""A judge of crash states that does not judge, for tests of the replay itself."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from kvstore_tiers.testing.powerloss.judge import Verdict
from kvstore_tiers.testing.powerloss.promises import Promises

DEATH_ENVIRONMENT = "POWERLOSS_TEST_DEATH"


def killed_once(directory: Path, promises: Promises) -> Verdict:
    """Dies once, as if by a page of a mapped file that is not there, where something had been promised."""
    died = Path(os.environ[DEATH_ENVIRONMENT])
    if promises.durable and not died.exists():
        died.touch()
        os.kill(os.getpid(), signal.SIGBUS)
    return Verdict()
