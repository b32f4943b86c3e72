"""Files of the state directory that cannot be written: each costs what it would have saved, is named, and is repaired.

First each file in turn by failpoints, through a start, a run and a stop; then real file systems: without room, without
inodes, read-only.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest

from kvstore_client import Fingerprint
from tests.reference.conversations import holds, model, payloads_of, tokens_of
from tests.reference.examples import each_nth, quick_are
from tests.reference.running_daemon import RunningDaemon, daemon_directory, ended_with, eventually, running_daemon

MODEL = model()
ANOTHER = Fingerprint("another", weights_digest="w", groups=MODEL.groups)
BLOCKS = 3
FILES = ("identity.json", "format", "seal")
ERRORS = ("ENOSPC", "EDQUOT", "EROFS", "EIO")
CASES = [(name, error) for name in FILES for error in ERRORS]
QUICK = {"identity.json": "ENOSPC"}  # each file alone: tests/unit/kvstored/test_unsaved.py
SETTINGS = ("nvme.endurance_bytes_per_day=1GiB", "scrub.start_s=0", "scrub.interval_s=1")
REASONS = {"ENOSPC": "No space left", "EDQUOT": "quota exceeded", "EROFS": "Read-only", "EIO": "Input/output error"}


def put(daemon: RunningDaemon, conversation: int, fingerprint: Fingerprint = MODEL) -> set[str]:
    payloads = payloads_of(conversation, BLOCKS, fingerprint)
    with daemon.connect(fingerprint) as session:
        receipt = session.put(tokens_of(conversation, BLOCKS), payloads=payloads, durability="always", wait="settled")
    return set(receipt.durability)


def got(daemon: RunningDaemon, conversation: int) -> bool:
    with daemon.connect(MODEL) as session, session.get(tokens_of(conversation, BLOCKS)) as lease:
        return holds(lease, payloads_of(conversation, BLOCKS, MODEL))


def says(daemon: RunningDaemon, name: str, begin: int, error: str) -> bool:
    lines = [line for line in daemon.log[begin:].splitlines() if "cannot be written" in line]
    return any(f"/{name} cannot be written" in line and REASONS[error] in line for line in lines)


@pytest.mark.parametrize(("name", "error"), quick_are(CASES, [QUICK.get(name) == error for name, error in CASES]))
def test_a_file_that_cannot_be_written_stops_nothing(name: str, error: str) -> None:
    with running_daemon(*SETTINGS) as daemon:
        assert put(daemon, 1) == {"durable"}
        daemon.stop()
        for place in (daemon.state_dir, daemon.nvme_dir):
            (place / name).unlink(missing_ok=True)  # so that the start has to write it too
        begin = len(daemon.log)
        daemon.restart(failpoints=f"file.{name}=error:{error}")
        assert got(daemon, 1), "what was there"
        assert put(daemon, 2) == {"durable"}
        assert put(daemon, 1, ANOTHER) and got(daemon, 2)
        if name == "identity.json":
            assert eventually(lambda: any(f"/{name} cannot be written" in each for each in daemon.status().warnings))
        assert daemon.process is not None
        daemon.process.terminate()
        assert daemon.process.wait(60) == 0, daemon.log[begin:]
        assert says(daemon, name, begin, error), daemon.log[begin:]
        assert not list(daemon.directory.rglob("*.new")), "no part of a file is left"
        daemon.restart()
        assert got(daemon, 1) and got(daemon, 2)
        assert eventually(daemon.knows_its_state) and not daemon.status().warnings


@pytest.mark.slow
@pytest.mark.parametrize(("place", "error"), each_nth([(p, e) for p in ("open", "commit") for e in ERRORS], 5))
def test_small_state_that_cannot_be_saved_stops_nothing(place: str, error: str) -> None:
    with running_daemon(*SETTINGS) as daemon:
        assert put(daemon, 1) == {"durable"}
        daemon.stop()
        begin = len(daemon.log)
        daemon.restart(failpoints=f"state.{place}=error:{error}")
        assert got(daemon, 1), "what was there"
        assert put(daemon, 2) == {"volatile"}, "no allotment of the endurance budget can be saved"
        assert eventually(lambda: any("cannot be written" in each for each in daemon.status().warnings))
        assert daemon.process is not None
        daemon.process.terminate()
        assert daemon.process.wait(60) == 0, daemon.log[begin:]
        assert REASONS[error] in daemon.log[begin:]
        daemon.restart()
        assert got(daemon, 1) and eventually(daemon.knows_its_state) and not daemon.status().warnings


@pytest.mark.parametrize("error", each_nth(ERRORS, 4))
@pytest.mark.parametrize("name", ["secret", "identity.json"])
def test_a_new_state_directory_that_keeps_no_secret_is_refused(tmp_path: Path, name: str, error: str) -> None:
    daemon = RunningDaemon(tmp_path, failpoints=f"file.{name}=error:{error}")
    with pytest.raises(AssertionError, match="exit status 1"):
        daemon.start()
    (line,) = [line for line in daemon.log.splitlines() if line.startswith("kvstored: ")]
    assert str(daemon.state_dir / name) in line and REASONS[error] in line
    assert "Traceback" not in daemon.log and not daemon.state_dir.exists()


@pytest.mark.slow
@pytest.mark.parametrize("error", each_nth(ERRORS, 4))
def test_a_recovery_that_cannot_write_serves_what_is_there_until_it_can(error: str) -> None:
    with running_daemon() as daemon:
        assert put(daemon, 1) == {"durable"}
        daemon.kill9()
        daemon.restart(failpoints=f"nvme.recover-before-repair=error:{error}@1-3")
        assert put(daemon, 1) == {"volatile"}, "nobody knows yet whether its record is on the medium"
        assert got(daemon, 1) and "read-only" in daemon.log and REASONS[error] in daemon.log
        assert eventually(lambda: daemon.tiers()["nvme"].state == "ok"), "the third probe makes up for it"
        assert put(daemon, 1) == {"durable"} and put(daemon, 2) == {"durable"}
        daemon.kill9()
        daemon.restart()
        assert got(daemon, 1) and got(daemon, 2)


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount a file system")


@contextmanager
def mounted(*settings: str) -> Iterator[tuple[RunningDaemon, Path]]:
    """A daemon, with blocks and stopped in order, whose state is on a small file system of its own."""
    with daemon_directory() as place:
        disk = place / "disk"
        disk.mkdir()
        options = "size=96m,nr_inodes=64,mode=700"
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "kvstored-test", str(disk)], capture_output=True)
        if done.returncode:
            pytest.skip(f"needs the right to mount a tmpfs: {done.stderr.decode().strip()}")
        try:
            daemon = RunningDaemon(place, *settings)
            daemon.state_dir, daemon.nvme_dir = disk / "state", disk / "state/nvme"
            with ended_with(daemon):
                daemon.start()
                assert put(daemon, 1) == {"durable"}
                daemon.stop()
                yield daemon, disk
                daemon.stop()
        finally:
            subprocess.run(["umount", "-l", str(disk)], check=False)


def remount(disk: Path, how: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{how}", str(disk)], check=True)


def fill_space(disk: Path) -> None:
    room = os.statvfs(disk)
    with open(disk / "filler", "wb") as file:
        os.posix_fallocate(file.fileno(), 0, room.f_bavail * room.f_bsize)


def fill_inodes(disk: Path) -> None:
    for number in range(os.statvfs(disk).f_favail):
        (disk / f"filler{number}").touch()


def empty(disk: Path) -> None:
    for path in disk.glob("filler*"):
        path.unlink()


@pytest.mark.slow
@needs_root
@pytest.mark.parametrize(
    "lost",
    [
        (),
        pytest.param(("lock", "nvme/lock"), marks=pytest.mark.slow),
        pytest.param(("state-000001.mdb", "identity.json", "nvme/format", "nvme/seal"), marks=pytest.mark.slow),
    ],
)
def test_a_read_only_file_system_is_served_and_written_when_it_can_be(lost: tuple[str, ...]) -> None:
    with mounted() as (daemon, disk):
        for name in lost:
            (daemon.state_dir / name).unlink()
        remount(disk, "ro")
        daemon.restart()
        assert got(daemon, 1) and put(daemon, 2) == {"volatile"} and got(daemon, 2)
        assert daemon.tiers()["nvme"].state == "read-only"
        assert any("Read-only file system" in warning for warning in daemon.status().warnings)
        second = RunningDaemon(daemon.directory)
        second.state_dir, second.socket_dir = daemon.state_dir, daemon.directory / "run2"
        with pytest.raises(AssertionError, match="exit status 1"):
            second.start()
        assert "is in use by another kvstored" in second.log
        remount(disk, "rw")
        assert eventually(lambda: daemon.tiers()["nvme"].state == "ok")
        assert put(daemon, 3) == {"durable"} and put(daemon, 2) == {"durable"}
        with pytest.raises(AssertionError, match="exit status 1"):
            second.start()
        daemon.kill9()
        daemon.restart()
        assert all(got(daemon, conversation) for conversation in (1, 2, 3))


@needs_root
def test_a_holder_and_a_recording_that_have_no_room_are_done_without() -> None:
    with mounted() as (daemon, disk):
        daemon.settings = (*daemon.settings, "host.warm_restart=holder", f"daemon.record={disk}/record.jsonl.gz")
        remount(disk, "ro")
        daemon.restart()
        assert got(daemon, 1)
        assert f"{daemon.state_dir}/holder.sock: Read-only file system" in daemon.log
        assert f"nothing is recorded: {disk}/record.jsonl.gz" in daemon.log


@needs_root
@pytest.mark.parametrize("fill", each_nth([fill_space, fill_inodes], 2))
def test_a_full_file_system_is_served_and_written_when_there_is_room(fill: object) -> None:
    assert callable(fill)
    with mounted() as (daemon, disk):
        (daemon.state_dir / "state-000001.mdb").unlink()
        fill(disk)
        daemon.restart()
        assert got(daemon, 1) and put(daemon, 2) == {"durable"} and got(daemon, 2), "its slab has room"
        assert eventually(lambda: "cannot be written (No space left on device)" in daemon.log)
        daemon.stop()
        daemon.restart()
        assert got(daemon, 1)
        empty(disk)
        daemon.stop()
        daemon.restart()
        assert got(daemon, 1) and got(daemon, 2) and put(daemon, 3) == {"durable"}
        assert eventually(daemon.knows_its_state) and not daemon.status().warnings


@needs_root
def test_a_drop_that_the_medium_does_not_learn_of_is_no_success() -> None:
    with mounted() as (daemon, disk):
        remount(disk, "ro")
        daemon.restart()
        with pytest.raises(grpc.RpcError, match="come back with a restart"):
            daemon.drop("nvme", discard=True)
        daemon.kill9()
        daemon.restart()
        assert got(daemon, 1), "as it said"
        with pytest.raises(grpc.RpcError, match="come back with a restart"):
            daemon.drop("nvme", discard=True)
        remount(disk, "rw")
        assert eventually(lambda: daemon.tiers()["nvme"].state == "ok")
        daemon.drop("nvme", discard=True)
        daemon.kill9()
        daemon.restart()
        assert not got(daemon, 1)


@pytest.mark.slow
@needs_root
def test_removed_sockets_come_back_when_their_directory_has_room() -> None:
    with mounted() as (daemon, disk):
        daemon.socket_dir = disk / "run"
        daemon.restart()
        removed = [daemon.socket_dir / f"{name}.sock" for name in ("unary", "handshake")]
        for path in removed:
            path.unlink()
            (disk / f"filler-{path.name}").touch()
        fill_inodes(disk)
        said = "cannot be made again: No space left on device"
        assert eventually(lambda: all(f"{path}: it was removed, and {said}" in daemon.log for path in removed))
        empty(disk)
        assert eventually(lambda: all(path.exists() for path in removed))
        assert got(daemon, 1) and daemon.log.count(said) == len(removed)


@needs_root
@pytest.mark.parametrize("how", each_nth(["ro", "space", "inodes"], 3))
def test_a_new_state_directory_without_room_is_refused(how: str) -> None:
    with mounted() as (daemon, disk):
        fresh = RunningDaemon(daemon.directory)
        fresh.state_dir, fresh.socket_dir = disk / "fresh", daemon.directory / "run2"
        fresh.state_dir.mkdir(mode=0o700)
        {"ro": lambda: remount(disk, "ro"), "space": lambda: fill_space(disk), "inodes": lambda: fill_inodes(disk)}[
            how
        ]()
        with pytest.raises(AssertionError, match="exit status 1"):
            fresh.start()
        (line,) = [line for line in fresh.log.splitlines() if line.startswith("kvstored: ")]
        assert str(fresh.state_dir) in line and "daemon.state_dir" in line and "Traceback" not in fresh.log
        assert not (fresh.state_dir / "secret").exists()
        remount(disk, "rw")
        empty(disk)
        daemon.restart()
