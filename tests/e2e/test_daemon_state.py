"""The small state as an operator sees it: of a daemon that runs, of a directory without one, in a copy, of before."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvstore_proto.v1 import admin_pb2
from kvstored.lifetime.instance import OLD_FILES, OLD_VERSION
from kvstored.state.databases import DATABASES
from tests.reference import forked
from tests.reference.conversations import model, payloads_of, tokens_of
from tests.reference.running_daemon import RunningDaemon, eventually, running_daemon
from tests.reference.state import files_with

MODEL = model()
BLOCKS = 3


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return forked.run([sys.executable, "-m", *words])


def kvctl(daemon: RunningDaemon, *words: str) -> dict[str, object]:
    ran = run("kvctl.main", "--socket-dir", str(daemon.socket_dir), "--json", "state", *words)
    assert ran.returncode == 0, ran.stderr
    found: dict[str, object] = json.loads(ran.stdout)
    return found


def put(daemon: RunningDaemon, number: int = 1) -> None:
    with daemon.connect(MODEL) as session:
        payloads = payloads_of(number, BLOCKS, MODEL)
        session.put(tokens_of(number, BLOCKS), payloads=payloads, durability="always", wait="settled")


@pytest.mark.slow
def test_it_is_read_with_and_without_the_daemon(tmp_path: Path) -> None:
    with running_daemon("nvme.endurance_bytes_per_day=1GiB") as daemon:
        assert eventually(daemon.knows_its_state)
        put(daemon)
        assert eventually(lambda: kvctl(daemon, "show", "names")["values"])
        listed = kvctl(daemon, "ls")
        assert listed["is_read"] and listed["wrong_values"] == listed["wrong_rows"] == 0
        names = [each["name"] for each in listed["databases"]]  # type: ignore[attr-defined, index]
        assert names == [each.name for each in DATABASES]
        (budget,) = kvctl(daemon, "show", "endurance")["values"]  # type: ignore[misc]
        assert budget["key"] == "budget" and budget["level_bytes"] > 0
        first = kvctl(daemon, "show", "learned", "--limit", "1")
        rest = kvctl(daemon, "show", "learned", "--first", str(first["next"]))
        assert len(first["values"]) == 1 and len(rest["values"]) > 1  # type: ignore[arg-type]
        shown = kvctl(daemon, "show", "usage")["values"]
        assert sum(len(each["slots"]) for each in shown) == BLOCKS  # type: ignore[attr-defined]
        beside = run("kvstored", "inspect", str(daemon.state_dir), "state", "usage", "--json")
        assert [json.loads(each) for each in json.loads(beside.stdout)["values"]] == shown
        copied = run("kvstored", "inspect", str(daemon.state_dir), "state", "--copy", str(tmp_path))
        assert copied.returncode == 0 and list(tmp_path.glob("state-*.mdb")), copied.stderr
        shutil.copytree(daemon.nvme_dir, tmp_path / "nvme")
        assert kvctl(daemon, "show", "usage", "--state-dir", str(tmp_path))["values"] == shown
        daemon.stop()
        ended = run("kvctl.main", "state", "show", "usage", "--state-dir", str(daemon.state_dir))
        assert ended.returncode == 0 and "accesses" in ended.stdout, ended.stderr


@pytest.mark.slow
def test_what_is_dropped_by_name_right_after_a_start_is_found() -> None:
    """Names are saved with small state, which is read while the daemon serves."""
    with running_daemon() as daemon:
        put(daemon)
        daemon.stop()
        daemon.start()
        reply = daemon.ask("Invalidate", admin_pb2.InvalidateRequest(fingerprint=MODEL.digest().hex()))
        assert reply.blocks == BLOCKS
        assert eventually(lambda: not files_with(daemon.state_dir, b"tenant:uid-"), timeout_s=60)


@pytest.mark.parametrize(
    "words, line",
    [
        (("nothing",), "no database 'nothing'; there are about, usage"),
        (("usage", "--first", "xyz"), "'xyz' is no key: give hex digits"),
        (("usage", "--limit", "-1"), "--limit is a number of values"),
        (("usage", "--limit", "99999999999"), "--limit is a number of values, 1 to 10000"),
        ((), "there is no small state yet"),
    ],
)
def test_a_mistake_is_one_line(tmp_path: Path, words: tuple[str, ...], line: str) -> None:
    ran = run("kvstored", "inspect", str(tmp_path), "state", *words)
    assert ran.returncode in (1, 2) and line in ran.stderr and len(ran.stderr.splitlines()) == 1
    if "--limit" in words:
        ran = run("kvctl.main", "state", "show", *words, "--state-dir", str(tmp_path))
        assert ran.returncode in (1, 2) and line in ran.stderr and "Traceback" not in ran.stderr


def test_a_damaged_file_is_named_and_not_opened(tmp_path: Path) -> None:
    (tmp_path / "state-000001.mdb").write_bytes(bytes(40_000))
    ran = run("kvstored", "inspect", str(tmp_path), "state")
    assert ran.returncode == 1 and "damaged: " in ran.stderr and len(ran.stderr.splitlines()) == 1


def test_files_of_an_older_version_are_named_and_left_or_discarded() -> None:
    with running_daemon() as daemon:
        put(daemon)
        daemon.stop()
        for name in OLD_FILES:
            (daemon.state_dir / name).write_bytes(b"old")
        with pytest.raises(AssertionError, match="exit status 1"):
            daemon.start()
        (line,) = [line for line in daemon.log.splitlines() if line.startswith("kvstored: ")]
        assert ", ".join(OLD_FILES) in line and f"written by {OLD_VERSION} or before" in line
        assert "move them away, or start with --discard-old" in line
        assert all((daemon.state_dir / name).read_bytes() == b"old" for name in OLD_FILES)
        daemon.arguments = ("--discard-old",)
        daemon.start()
        assert not any((daemon.state_dir / name).exists() for name in OLD_FILES)
        with daemon.connect(MODEL) as session:
            assert session.lookup(tokens_of(1, BLOCKS)).blocks == BLOCKS
