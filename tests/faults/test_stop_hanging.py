"""Stopping while a disk hangs: the daemon ends all the same, in time, and says what happened."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvstored import daemon
from kvstored.exits import EXIT_HANGS
from kvstored.health.scrub import scrubber
from kvstored.health.scrub.scrubber import Scrubber
from kvstored.health.scrub.worker import ScrubSettings
from tests.reference.conversations import model, payloads_of, tokens_of
from tests.reference.hanging_daemon import LIMIT_VARIABLE, HangingDaemon
from tests.reference.running_daemon import daemon_directory, ended_with

FAR_S = 60.0


@pytest.mark.slow
def test_a_daemon_on_a_disk_that_hangs_ends_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LIMIT_VARIABLE, "1.0")
    with daemon_directory() as directory:
        hanging = HangingDaemon(directory, "scrub.enabled=false")
        with ended_with(hanging):
            hanging.start()
            with hanging.connect(model()) as session:
                session.put(tokens_of(1, 2), payloads=payloads_of(1, 2, model()))
            assert hanging.process is not None
            hanging.process.terminate()
            assert hanging.process.wait(FAR_S) == EXIT_HANGS, hanging.log
            assert "stopping hangs" in hanging.log and "Traceback" not in hanging.log


def test_the_limit_leaves_an_orderly_stop_its_time() -> None:
    """Two flushes of `STOP_GRACE_S` each, and before systemd loses patience."""
    unit = (Path(__file__).parents[2] / "deploy/systemd/kvstored.service").read_text()
    (patience_s,) = (float(line.split("=")[1]) for line in unit.splitlines() if line.startswith("TimeoutStopSec="))
    assert 2 * daemon.STOP_GRACE_S < daemon.STOP_LIMIT_S < patience_s


def test_a_scrubber_that_cannot_be_killed_is_not_waited_for_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scrubber, "ENDING_S", 0.01)
    killed: list[bool] = []

    async def never(*arguments: object) -> Any:
        await asyncio.Event().wait()

    class Silent:
        def __aiter__(self) -> Silent:
            return self

        __anext__ = never

    async def started(*arguments: object, **options: object) -> Any:
        return SimpleNamespace(
            stdin=SimpleNamespace(close=lambda: None), stdout=Silent(), pid=1, wait=never,
            kill=lambda: killed.append(True),
        )  # fmt: skip

    monkeypatch.setattr(asyncio, "create_subprocess_exec", started)
    settings = ScrubSettings(str(tmp_path), "", 1 << 20, 1.0)
    scrub, clock = SimpleNamespace(start_s=0), SimpleNamespace(monotonic_ns=lambda: 0)
    store: Any = SimpleNamespace(clock=clock, config=SimpleNamespace(scrub=scrub))

    async def run() -> None:
        place: Any = SimpleNamespace(scrub=None, was_tried=asyncio.Event())
        place.was_tried.set()
        made = Scrubber(settings, store, place)
        task = asyncio.create_task(made.run())
        while not made.report.pid:
            await asyncio.sleep(0)
        task.cancel()
        done, _ = await asyncio.wait([task], timeout=FAR_S)
        assert done and killed == [True]

    asyncio.run(run())
