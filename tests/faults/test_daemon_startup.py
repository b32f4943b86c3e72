"""A daemon that cannot start says why in one line, with the right exit status, and touches nothing of others."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.reference import forked
from tests.reference.conversations import model, payloads_of, serves_whole, tokens_of
from tests.reference.running_daemon import RunningDaemon, daemon_directory, running_daemon

MODEL = model()


@pytest.fixture
def place() -> Iterator[Path]:
    with daemon_directory() as directory:
        directory.chmod(0o755)
        yield directory


def refused(daemon: RunningDaemon, *, status: int, uid: int | None = None) -> str:
    """Run it to its end; its last words, which must be one line for people. A command is started for another `uid`."""
    if uid is None and not daemon.as_a_command:
        result = forked.run(daemon.command())
    else:
        result = subprocess.run(daemon.command(), capture_output=True, text=True, timeout=60, user=uid)
    assert result.returncode == status, result.stderr
    lines = [line for line in result.stderr.splitlines() if line.startswith("kvstored: ")]
    assert len(lines) == 1 and result.stderr.rstrip().endswith(lines[0]), result.stderr
    assert "Traceback" not in result.stderr
    return lines[0]


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("host.capcity=1GiB", "did you mean capacity?"),
        ("host.capacity=9999TiB", "host.capacity"),
        ("nvme.capacity=1KiB", "does not hold one slab"),
        ("limits.lease_ttl_ms=0", "limits.lease_ttl_ms must be more than 0"),
    ],
)
def test_a_mistake_in_the_configuration(place: Path, setting: str, says: str) -> None:
    daemon = RunningDaemon(place, setting)
    assert says in refused(daemon, status=2)
    assert not daemon.state_dir.exists() and not daemon.socket_dir.exists()


def test_a_failpoint_that_is_none_is_a_mistake(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSTORED_FAILPOINTS", "nvme.no-such-place=kill")
    daemon = RunningDaemon(place)
    daemon.as_a_command = True
    assert "nvme.no-such-place" in refused(daemon, status=2)


@pytest.fixture(scope="module")
def running() -> Iterator[RunningDaemon]:
    with running_daemon() as daemon:
        yield daemon


@pytest.mark.slow
def test_a_second_daemon_on_one_state_directory_learns_who_has_it(running: RunningDaemon, place: Path) -> None:
    second = RunningDaemon(place)
    second.state_dir = running.state_dir
    assert f"pid {running.pid}" in refused(second, status=1)
    assert running.status().state == "serving"


def test_a_second_daemon_on_one_nvme_directory_learns_who_has_it(running: RunningDaemon, place: Path) -> None:
    second = RunningDaemon(place, f"nvme.path={running.nvme_dir}")
    assert str(running.pid) in refused(second, status=1)


def test_a_second_daemon_does_not_take_a_live_ones_sockets(running: RunningDaemon, place: Path) -> None:
    second = RunningDaemon(place)
    second.socket_dir = running.socket_dir
    assert "another daemon is serving" in refused(second, status=1)
    os.kill(running.pid, signal.SIGSTOP)
    try:
        assert "another daemon is serving" in refused(second, status=1), "stopped is not dead"
    finally:
        os.kill(running.pid, signal.SIGCONT)
    with running.connect() as session:
        assert session.put(tokens_of(1, 1), payloads=payloads_of(1, 1, MODEL)).stored_blocks == 1


def test_check_refuses_a_directory_in_use(running: RunningDaemon) -> None:
    result = forked.run([sys.executable, "-m", "kvstored", "check", str(running.nvme_dir)])
    assert result.returncode == 1 and str(running.pid) in result.stderr and "Traceback" not in result.stderr


def test_a_file_in_a_sockets_place_is_not_removed(place: Path) -> None:
    daemon = RunningDaemon(place)
    daemon.socket_dir.mkdir()
    (daemon.socket_dir / "admin.sock").write_text("my notes")
    assert "is not a socket" in refused(daemon, status=1)
    assert (daemon.socket_dir / "admin.sock").read_text() == "my notes"


def test_stale_sockets_are_replaced(place: Path) -> None:
    daemon = RunningDaemon(place)
    daemon.socket_dir.mkdir()
    for name, kind in (
        ("handshake", socket.SOCK_SEQPACKET),
        ("data", socket.SOCK_STREAM),
        ("admin", socket.SOCK_STREAM),
    ):
        with socket.socket(socket.AF_UNIX, kind) as dead:
            dead.bind(str(daemon.socket_dir / f"{name}.sock"))
    daemon.start()
    assert daemon.status().state == "serving"
    daemon.stop()


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
def test_directories_that_cannot_be_written(place: Path) -> None:
    home = Path(sys.executable).resolve()
    if not all(parent.stat().st_mode & 0o001 for parent in home.parents):
        pytest.skip("the interpreter is out of another user's reach")
    daemon = RunningDaemon(place)
    assert "daemon.socket_dir" in refused(daemon, status=1, uid=65534)
    daemon.socket_dir.mkdir()
    os.chown(daemon.socket_dir, 65534, 65534)
    assert "daemon.state_dir" in refused(daemon, status=1, uid=65534)


def test_a_state_directory_that_cannot_be_made(place: Path) -> None:
    (place / "state").write_text("a file in the way")
    message = refused(RunningDaemon(place), status=1)
    assert "cannot make state directory" in message and "daemon.state_dir" in message


def test_a_damaged_secret_is_never_overwritten(place: Path) -> None:
    daemon = RunningDaemon(place)
    daemon.state_dir.mkdir()
    (daemon.state_dir / "secret").write_bytes(b"short")
    assert "restore it from a backup" in refused(daemon, status=2)
    assert (daemon.state_dir / "secret").read_bytes() == b"short"


def test_lost_names_cost_labels_only(place: Path) -> None:
    daemon = RunningDaemon(place)
    daemon.start()
    with daemon.connect() as session:
        session.put(tokens_of(1, 2), payloads=payloads_of(1, 2, MODEL), durability="always")
    daemon.stop()
    (path,) = daemon.state_dir.glob("state-*.mdb")
    path.write_text("{")
    daemon.start()
    assert serves_whole(daemon, 1, 2)
    daemon.stop()


def test_nvme_on_memory_backed_files_works() -> None:
    shm = Path("/dev/shm")
    if not os.access(shm, os.W_OK) or shutil.disk_usage(shm).free < 80 << 20:
        pytest.skip("no room in /dev/shm")
    with (
        daemon_directory(parent=shm) as directory,
        running_daemon(f"nvme.path={directory}/nvme") as daemon,
    ):
        with daemon.connect() as session:
            session.put(tokens_of(1, 20), payloads=payloads_of(1, 20, MODEL), durability="always")
        daemon.kill9()
        daemon.restart()
        assert serves_whole(daemon, 1, 20)
