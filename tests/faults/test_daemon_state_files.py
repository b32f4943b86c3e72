"""Damage in small files of state and NVMe directories: what is derived or for people is made anew."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.reference.conversations import holds, model, payloads_of, tokens_of
from tests.reference.examples import each_nth
from tests.reference.running_daemon import RunningDaemon, eventually, running_daemon

MODEL = model()
BLOCKS = 3
ESCAPE = b"\x1b]0;owned\x07\x1b[2J"
DERIVED = ("nvme/format", "nvme/seal", "nvme/lock")
SMALL = ("lock", "state-000001.mdb")
CONTENTS = {
    "random": random.Random(1).randbytes(300),
    "an escape sequence": ESCAPE,
    "deep": b"[" * 100_000,
    "another shape": b'{"tenants": {"a": 1}, "fingerprints": 7, "slab": 1e999, "version": 2, "xxh3": []}',
    "half a character": rb'{"tenants": ["\ud800", "\u001b"], "fingerprints": ["\ud800"], "version": "\ud800"}',
    "empty": b"",
}


def got(daemon: RunningDaemon) -> bool:
    with daemon.connect(MODEL) as session, session.get(tokens_of(1, BLOCKS)) as lease:
        return holds(lease, payloads_of(1, BLOCKS, MODEL))


@pytest.fixture(scope="module")
def daemon() -> Iterator[RunningDaemon]:
    with running_daemon("nvme.endurance_bytes_per_day=1GiB") as running:
        with running.connect(MODEL) as session:
            session.put(tokens_of(1, BLOCKS), payloads=payloads_of(1, BLOCKS, MODEL), durability="always")
        running.stop()
        yield running


@pytest.mark.parametrize("what", each_nth(list(CONTENTS), 3))
def test_damage_in_derived_and_cosmetic_files_stops_nothing(daemon: RunningDaemon, what: str) -> None:
    for path in daemon.state_dir.glob("state*"):
        path.unlink()
    for name in (*DERIVED, *SMALL):
        assert (daemon.state_dir / name).parent.is_dir(), name
        (daemon.state_dir / name).write_bytes(CONTENTS[what])
    before = len(daemon.log)
    daemon.restart()
    assert got(daemon) and eventually(daemon.knows_its_state)
    daemon.stop()
    said = daemon.log[before:]
    assert all(char.isprintable() or char == "\n" for char in said)
    assert (daemon.nvme_dir / "format").read_text().startswith("format_version: 2\n")
    assert f"{daemon.state_dir} is set aside as state.aside" in said and (daemon.state_dir / "state.aside").exists()
    if CONTENTS[what]:
        assert "nvme/format is damaged" in said, said


@pytest.mark.parametrize("name", ["nvme/format"])
def test_a_readable_higher_number_is_a_newer_version(daemon: RunningDaemon, name: str) -> None:
    path = daemon.state_dir / name
    right = path.read_bytes()
    path.write_bytes(right.replace(b"format_version: 2", b"format_version: 3"))
    before = len(daemon.log)
    with pytest.raises(AssertionError, match="exit status 1"):
        daemon.restart()
    assert "format 3, this kvstored reads format 2; run that version" in daemon.log[before:]
    path.write_bytes(right)
    daemon.restart()
    assert got(daemon)
    daemon.stop()


def test_the_lock_of_a_running_daemon_may_be_damaged(daemon: RunningDaemon, tmp_path: Path) -> None:
    daemon.restart()
    (daemon.state_dir / "lock").write_bytes(ESCAPE)
    second = RunningDaemon(tmp_path)
    second.state_dir = daemon.state_dir
    with pytest.raises(AssertionError, match="exit status 1"):
        second.start()
    assert "is in use by another kvstored, whose pid is not known" in second.log and "\x1b" not in second.log
    assert got(daemon)
    daemon.stop()
