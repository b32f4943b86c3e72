"""Power loss of a whole daemon: blocks reported durable come back through the daemon's own recovery."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstore_client import Session
from kvstore_tiers.testing.powerloss import replay
from tests.reference.powerloss_daemon import JUDGE, MODEL, RecordedDaemon
from tests.reference.running_daemon import daemon_directory, ended_with
from tests.reference.skips import skip_without_compiler


@pytest.fixture(scope="module", autouse=True)
def compiler() -> None:
    skip_without_compiler()


def use(daemon: RecordedDaemon, session: Session, first: int) -> None:
    """Conversations in all three modes; some are deleted, one comes back."""
    for conversation in range(first, first + 6):
        mode = ("batch", "always", "none")[conversation % 3]
        daemon.put(session, conversation, 4, mode)
    assert daemon.delete(session, first, 4) == 4
    assert daemon.delete(session, first + 1, 4) == 4
    daemon.put(session, first, 4, "always")


def record(directory: Path) -> Path:
    """A daemon that serves, is killed, starts again, serves and ends."""
    daemon = RecordedDaemon(directory)
    with ended_with(daemon):
        daemon.start()
        with daemon.connect(MODEL) as session:
            use(daemon, session, 1)
        daemon.kill9()
        daemon.restart()
        with daemon.connect(MODEL) as session:
            use(daemon, session, 11)
        daemon.stop()
    return daemon.recording.log


@pytest.mark.slow
def test_what_a_daemon_answered_survives_power_loss() -> None:
    with daemon_directory() as directory:
        figures = replay(record(directory), seed=1, states=1000, judge=JUDGE)
    assert figures.states >= 1000
    assert figures.promised > 1000, "promises were checked"
    assert figures.is_sound, figures.failures
