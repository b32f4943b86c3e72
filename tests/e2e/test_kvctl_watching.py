"""`kvctl top`, `report` and `doctor` with the real daemon: what happened is what they show."""

from __future__ import annotations

import json
import math
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvctl.main import main
from kvstore_proto.v1 import admin_pb2 as pb
from tests.reference.conversations import model, payloads_of, tokens_of
from tests.reference.examples import quick_are
from tests.reference.running_daemon import RunningDaemon, eventually, running_daemon

MODEL = model()


@pytest.fixture(scope="module")
def daemon() -> Iterator[RunningDaemon]:
    """Start a daemon with a history: 6 blocks stored, 6 served, 4 missed because no client ever stored them."""
    with running_daemon() as running:
        with running.connect() as session:
            session.put(tokens_of(1, 6), payloads=payloads_of(1, 6, MODEL), wait="settled")
            with session.get(tokens_of(1, 6)):
                pass
            assert session.lookup(tokens_of(1, 10)).blocks == 6
        assert eventually(lambda: flowed(history(running), "verb", "lookup", "requests") == 1)
        yield running


def history(daemon: RunningDaemon, **fields: Any) -> pb.HistoryReply:
    reply: pb.HistoryReply = daemon.ask("History", pb.HistoryRequest(**fields))
    return reply


def values(reply: pb.HistoryReply, *key: str) -> list[float]:
    found = [series for series in reply.series if (series.scope, series.subject, series.name) == key]
    assert len(found) <= 1
    return list(found[0].values) if found else []


def flowed(reply: pb.HistoryReply, *key: str) -> float:
    return sum(value for value in values(reply, *key) if not math.isnan(value))


# History


def test_the_history_adds_up_to_what_happened(daemon: RunningDaemon) -> None:
    reply = history(daemon)
    assert (reply.resolution_s, list(reply.resolutions_s)) == (1, [1, 60])
    assert flowed(reply, "daemon", "", "stored_blocks") == 6
    assert flowed(reply, "tier", "host", "hits") == 6
    assert flowed(reply, "miss", "never_stored", "blocks") == reply.misses["never_stored"] == 4
    assert flowed(reply, "lane", "host→nvme", "moved_blocks") == 6
    assert values(reply, "tier", "host", "capacity_bytes")[-1] == 32 << 20
    tenant = next(series.subject for series in reply.series if series.scope == "tenant")
    assert (flowed(reply, "tenant", tenant, "hit_blocks"), flowed(reply, "tenant", tenant, "missed_blocks")) == (6, 4)
    assert 0 < max(value for value in values(reply, "verb", "store", "p99_us") if not math.isnan(value)) < 60e6
    lengths = {len(series.values) for series in reply.series} | {len(reply.at_s), len(reply.span_s)}
    assert len(lengths) == 1
    assert list(reply.at_s) == sorted(reply.at_s)
    assert abs(reply.at_s[-1] - time.time()) < 60
    assert not reply.settings


def test_the_history_is_asked_by_resolution_and_age(daemon: RunningDaemon) -> None:
    assert history(daemon, resolution_s=60).resolution_s == 60
    assert len(history(daemon, since_s=0.001).at_s) <= 1
    assert len(history(daemon, since_s=1e300).at_s) >= len(history(daemon, since_s=0.001).at_s)
    with pytest.raises(grpc.RpcError) as caught:
        history(daemon, resolution_s=7)
    assert "keeps: 1, 60" in str(caught.value)


def test_the_settings_in_use_are_returned_on_request(daemon: RunningDaemon) -> None:
    settings = history(daemon, settings=True).settings
    assert settings["host.capacity_bytes"] == str(32 << 20)
    assert settings["nvme.path"] == str(daemon.nvme_dir)
    assert settings["daemon.socket_dir"] == str(daemon.socket_dir)


def test_tenants_know_their_hits(daemon: RunningDaemon) -> None:
    (tenant,) = daemon.ask("Tenants", pb.TenantsRequest()).tenants
    assert (tenant.lookups, tenant.hit_blocks, tenant.missed_blocks) == (1, 6, 4)


# top


def test_one_frame(daemon: RunningDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--socket-dir", str(daemon.socket_dir), "top", "--once"]) == 0
    said = capsys.readouterr()
    assert "\x1b" not in said.out and said.err == ""
    assert re.search(r"^in all +█+\S* +60.0%  6 of 10 blocks$", said.out, re.MULTILINE)
    for start in ("kvstored", "host ", "nvme ", "host→nvme", "lookup", "acquire", "store", "uid-"):
        assert re.search(f"^{start}", said.out, re.MULTILINE), said.out
    assert all(len(line) <= 80 for line in said.out.splitlines())


def test_without_a_terminal_one_frame_is_shown_and_it_says_so(
    daemon: RunningDaemon, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--socket-dir", str(daemon.socket_dir), "top"]) == 0
    said = capsys.readouterr()
    assert "no terminal" in said.err and said.out.count("TIER") == 1


def test_top_as_json(daemon: RunningDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--socket-dir", str(daemon.socket_dir), "--json", "top"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert set(document) == {"status", "tiers", "tenants", "history"}
    assert document["status"]["counters"]["acquired_blocks"] == 6
    assert document["history"]["misses"] == {"never_stored": 4}
    assert {tier["name"] for tier in document["tiers"]} == {"host", "nvme"}


class Terminal:
    """`kvctl top` on a pseudo-terminal."""

    def __init__(self, socket_dir: Path, **environment: str) -> None:
        self._here, there = pty.openpty()
        command = [sys.executable, "-m", "kvctl.main", "--socket-dir", str(socket_dir), "top"]
        self.process = subprocess.Popen(
            # A job in the background of a script ignores SIGINT, and hands that on.
            ["env", "--default-signal=INT", *command, "--interval", "0.1", "--timeout", "2"],
            stdin=there, stdout=there, stderr=there, env={**os.environ, "TERM": "xterm", **environment},
            start_new_session=True,
        )  # fmt: skip
        os.close(there)
        self.text = ""

    def read_until(self, wanted: str, timeout_s: float = 30.0) -> bool:
        """Return whether `wanted` was drawn, after what was looked for before."""
        until_s = time.monotonic() + timeout_s
        while wanted not in self.text and time.monotonic() < until_s:
            if not select.select([self._here], [], [], 0.1)[0]:
                continue
            try:
                self.text += os.read(self._here, 65536).decode(errors="replace")
            except OSError:  # the other end is closed
                break
        _, found, self.text = self.text.rpartition(wanted)
        return bool(found)

    def press(self, key: str) -> None:
        os.write(self._here, key.encode())

    def ended(self, timeout_s: float = 30.0) -> int:
        self.left = self.text
        until_s = time.monotonic() + timeout_s
        while time.monotonic() < until_s and (
            self.process.poll() is None or select.select([self._here], [], [], 0.1)[0]
        ):
            try:
                self.left += os.read(self._here, 65536).decode(errors="replace")
            except OSError:
                break
        os.close(self._here)
        return self.process.wait(60)


@pytest.mark.parametrize("way", quick_are(["q", "interrupt", "terminate"], [True, False, True]))
def test_live_until_the_user_leaves(daemon: RunningDaemon, way: str) -> None:
    terminal = Terminal(daemon.socket_dir)
    assert terminal.read_until("\x1b[?1049h"), "the alternate screen"
    assert terminal.read_until("OCCUPANCY")
    assert terminal.read_until("\x1b[H"), "a second frame over the first"
    if way == "q":
        terminal.press("q")
    else:
        terminal.process.send_signal(signal.SIGINT if way == "interrupt" else signal.SIGTERM)
    assert terminal.ended() == 0
    assert "\x1b[?25h\x1b[?1049l" in terminal.left, "cursor and screen are given back"
    assert "Traceback" not in terminal.left
    assert "OCCUPANCY" in terminal.left.rpartition("\x1b[?1049l")[2], "the last frame stays"


def test_a_shell_gets_its_terminal_back_while_top_is_suspended(daemon: RunningDaemon) -> None:
    terminal = Terminal(daemon.socket_dir)
    assert terminal.read_until("OCCUPANCY")
    terminal.process.send_signal(signal.SIGTSTP)
    assert terminal.read_until("\x1b[?25h\x1b[?1049l")
    assert eventually(lambda: _state(terminal.process.pid) == "T"), "it gives the terminal back first, then stops"
    terminal.process.send_signal(signal.SIGCONT)
    assert terminal.read_until("\x1b[?1049h") and terminal.read_until("OCCUPANCY")
    terminal.press("q")
    assert terminal.ended() == 0


def _state(pid: int) -> str:
    """Return the process's state as the kernel names it: R, S, T (stopped), …"""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_no_colour_where_the_user_wants_none(daemon: RunningDaemon) -> None:
    terminal = Terminal(daemon.socket_dir, NO_COLOR="1")
    assert terminal.read_until("OCCUPANCY")
    terminal.press("q")
    assert terminal.ended() == 0
    assert not re.search(r"\x1b\[\d*m", terminal.left)


def test_a_daemon_that_goes_away_is_waited_for() -> None:
    with running_daemon() as daemon:
        terminal = Terminal(daemon.socket_dir)
        assert terminal.read_until("serving")
        daemon.kill9()
        assert terminal.read_until("waiting for the daemon: ")
        daemon.restart()
        assert terminal.read_until("serving")
        assert terminal.read_until("\x1b[H\x1b[1mkvstored"), "no trouble any more"
        terminal.press("q")
        assert terminal.ended() == 0


# report


class Page(HTMLParser):
    """Tags, what they refer to, and whether every one is closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.open: list[str] = []
        self.references: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag != "meta":
            self.open.append(tag)
        self.references += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href")]

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_report_is_one_page_that_needs_nothing_else(
    daemon: RunningDaemon, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert eventually(lambda: len(history(daemon).at_s) >= 2)
    path = tmp_path / "report.html"
    assert main(["--socket-dir", str(daemon.socket_dir), "report", "-o", str(path)]) == 0
    assert f"wrote {path}" in capsys.readouterr().out
    text = path.read_text()
    page = Page(text)
    assert page.open == []
    assert page.references == [] and "script" not in page.tags and "url(" not in text and "@import" not in text
    assert page.tags.count("figure") >= 11 and page.tags.count("svg") >= 6
    assert "prefers-color-scheme:dark" in text
    for wanted in (
        "Occupancy of nvme",
        "Misses by cause",
        "Puts refused",
        "never stored",
        "Movement",
        "Latency, p99",
        "Tenants",
        "uid-",
    ):
        assert wanted in text
    for wanted in ("Settings in use", "capacity_bytes", "32.0 MiB", "Versions", "grpcio", str(daemon.nvme_dir)):
        assert wanted in text
    assert "test model" in text, "the models of a tenant"


def test_a_report_goes_to_standard_output_alone(
    daemon: RunningDaemon, tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["--socket-dir", str(daemon.socket_dir), "report", "-o", "-"]) == 0
    printed = capfdbinary.readouterr()
    assert printed.out.startswith(b"<!doctype html>") and printed.out.rstrip().endswith(b"</html>")
    assert printed.err.startswith(b"wrote - (")
    assert main(["--socket-dir", str(daemon.socket_dir), "report", "--json", "-o", "-"]) == 2
    assert not list(tmp_path.iterdir())


def test_a_report_as_json_and_to_a_path_that_cannot_be_written(
    daemon: RunningDaemon, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "report.html"
    assert main(["--socket-dir", str(daemon.socket_dir), "--json", "report", "-o", str(path)]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["path"] == str(path) and document["bytes"] == path.stat().st_size
    assert set(document["samples"]) == {"1", "60"}
    assert main(["--socket-dir", str(daemon.socket_dir), "report", "-o", str(tmp_path / "no/such/x.html")]) == 1
    assert "choose another -o FILE" in capsys.readouterr().err


# doctor


def checks(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, dict[str, str]]]:
    exit_code = main(["--json", *arguments])
    document = json.loads(capsys.readouterr().out)
    assert sum(document[level] for level in ("ok", "warn", "fail")) == len(document["checks"])
    return exit_code, {f"{check['area']}: {check['name']}": check for check in document["checks"]}


def test_a_healthy_daemon(daemon: RunningDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(daemon.nvme_dir.iterdir())
    exit_code, found = checks(capsys, "--socket-dir", str(daemon.socket_dir), "doctor")
    failed = {name for name, check in found.items() if check["level"] == "fail"}
    assert failed <= {"disk: file system"}, "which depends on where tests keep their files"
    assert exit_code == (1 if failed else 0)
    assert f"pid {daemon.pid} answers" in found["daemon: admin"]["seen"]
    assert found["daemon: settings"]["seen"] == "from the running daemon"
    assert "20 of 20 pings" in found["daemon: engine's way"]["seen"]
    assert found["sockets: handshake.sock"]["level"] == "ok"
    assert str(daemon.nvme_dir) in found["disk: directory"]["seen"]
    assert "for the daemon" in found["limits: open files"]["seen"]
    assert "write" in found["disk: speed"]["seen"]
    assert all(check["advice"] for check in found.values() if check["level"] != "ok")
    assert sorted(daemon.nvme_dir.iterdir()) == before, "the temporary file is gone"


def test_a_daemon_that_was_killed(capsys: pytest.CaptureFixture[str]) -> None:
    with running_daemon() as daemon:
        daemon.kill9()
        exit_code, found = checks(
            capsys, "--socket-dir", str(daemon.socket_dir), "doctor",
            "--state-dir", str(daemon.state_dir), "--no-disk-test",
        )  # fmt: skip
    assert exit_code == 1
    assert found["daemon: admin"]["level"] == "fail" and "kvstored serve" in found["daemon: admin"]["advice"]
    for name in ("handshake", "data", "admin"):
        assert "stale" in found[f"sockets: {name}.sock"]["seen"]
    assert str(daemon.nvme_dir) in found["disk: directory"]["seen"]
    assert "disk: speed" not in found


def test_a_daemon_that_does_not_answer(daemon: RunningDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    with daemon.frozen():
        arguments = ["--socket-dir", str(daemon.socket_dir), "--timeout", "0.5", "doctor", "--no-disk-test"]
        exit_code, found = checks(capsys, *arguments)
    assert exit_code == 1
    assert "did not answer within 0.5 s" in found["daemon: admin"]["advice"]
    assert found["daemon: engine's way"]["level"] == "fail"


def test_a_configuration_that_the_daemon_would_refuse(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "bad.toml"
    config.write_text('[host]\ncapacity = "lots"\n')
    exit_code, found = checks(
        capsys, "--socket-dir", str(tmp_path / "run"), "doctor", "--config", str(config), "--no-disk-test"
    )
    assert exit_code == 1
    assert "host.capacity" in found["daemon: settings"]["seen"]
