"""Log lines for the journal and for a terminal; and one line for each thing that an operator takes away."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import pytest

from kvstored.log_setup import JournalFormatter, is_journal
from tests.reference.conversations import model, payloads_of, tokens_of
from tests.reference.kvctl import Kvctl
from tests.reference.running_daemon import RunningDaemon, eventually, running_daemon

MODEL = model()


def record(level: int, error: bool = False) -> logging.LogRecord:
    try:
        raise ValueError("first\nsecond")
    except ValueError as raised:
        info = (type(raised), raised, raised.__traceback__) if error else None
    return logging.LogRecord("kvstored.test", level, __file__, 1, "what %s", ("happened",), info)


@pytest.mark.parametrize(
    ("level", "priority"), [(logging.DEBUG, 7), (logging.INFO, 6), (logging.WARNING, 4), (logging.ERROR, 3)]
)
def test_the_journal_gets_a_priority_and_no_time(level: int, priority: int) -> None:
    line = JournalFormatter("%(name)s: %(message)s").format(record(level))
    assert line == f"<{priority}>kvstored.test: what happened"


def test_each_line_of_a_traceback_has_the_priority() -> None:
    lines = JournalFormatter("%(message)s").format(record(logging.ERROR, error=True)).split("\n")
    assert len(lines) > 3 and all(line.startswith("<3>") for line in lines)


def test_a_stream_is_the_journal_if_systemd_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (tmp_path / "log").open("w") as stream:
        found = os.fstat(stream.fileno())
        monkeypatch.setenv("JOURNAL_STREAM", f"{found.st_dev}:{found.st_ino}")
        assert is_journal(stream)
        monkeypatch.setenv("JOURNAL_STREAM", f"{found.st_dev}:{found.st_ino + 1}")
        assert not is_journal(stream)
        monkeypatch.delenv("JOURNAL_STREAM")
        assert not is_journal(stream)


def lines_of(daemon: RunningDaemon, logger: str) -> list[str]:
    return [line for line in daemon.log.splitlines() if f" {logger}: " in line]


def test_what_an_operator_takes_away_leaves_a_line(capfdbinary: Any) -> None:
    with running_daemon("daemon.log_level=debug") as daemon:
        with daemon.connect(MODEL) as session:
            session.put(tokens_of(1, 4), payloads=payloads_of(1, 4, MODEL), wait="settled")
        kvctl = Kvctl(daemon, capfdbinary)
        for command in ("drop --tier host", "flush", "drain", "drain --undo", "drop --all --yes", "reload"):
            kvctl(command)
        kvctl("invalidate 01234567", exit_code=1)
        kvctl("status")
        said = lines_of(daemon, "kvstored.audit")
        who = f", by kvctl of uid {os.getuid()}, pid {os.getpid()} (claimed)"
        assert all(line.endswith(who) for line in said)
        for line, what in zip(
            said,
            (
                "drop from host: 4 blocks (80.0 KiB), 0 kept", "flush: 0 blocks written", "drain: 0 clients left",
                "drain --undo", "drop from all tiers: 4 blocks", "reload: nothing changed",
            ),
            strict=True,
        ):  # fmt: skip
            assert what in line
        assert not lines_of(daemon, "asyncio") and not lines_of(daemon, "grpc._cython.cygrpc")
        daemon.stop()
        assert "stopping, as SIGTERM asked, with 0 blocks: " in lines_of(daemon, "kvstored.audit")[-1]


def test_a_connection_is_no_news() -> None:
    with running_daemon() as daemon:
        assert eventually(lambda: " serves on " in daemon.log)
        before = daemon.log.count("\n")
        for _ in range(5):
            daemon.connect(MODEL).close()
        assert daemon.log.count("\n") == before


def test_a_put_while_the_daemon_drains_says_so(tmp_path: Path, capfdbinary: Any) -> None:
    payload = tmp_path / "weights.bin"
    payload.write_bytes(b"x" * 1000)
    with running_daemon() as daemon:
        kvctl = Kvctl(daemon, capfdbinary)
        kvctl("drain")
        assert (
            "draining and takes no new clients (kvctl drain --undo"
            in kvctl(["put", "--name", "w", str(payload)], exit_code=1).err
        )
