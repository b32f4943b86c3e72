"""The daemon's places: sockets stale or live, the instance lock, notifications of systemd."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstored.lifetime.instance import AlreadyRunning, InstanceLock, who_else_can_change
from kvstored.lifetime.notify import notify, watchdog_interval_s
from kvstored.sockets import SocketError, clear_stale, listen_seqpacket, prepare_directory


@pytest.fixture
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A short path: socket names are limited to 107 bytes."""
    directory = Path(f"/tmp/kvs-{os.getpid()}-{tmp_path_factory.mktemp('s').name[-3:]}")
    directory.mkdir(mode=0o700)
    yield directory
    for entry in sorted(directory.rglob("*"), reverse=True):
        entry.rmdir() if entry.is_dir() else entry.unlink()
    directory.rmdir()


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_new_directory_is_closed_to_others(place: Path) -> None:
    prepare_directory(place / "run", "")
    assert mode(place / "run") == 0o750


def test_a_directory_of_old_sockets_is_closed_again_but_no_other_is_touched(place: Path) -> None:
    ours, shared = place / "ours", place / "shared"
    for path in (ours, shared):
        path.mkdir()
        path.chmod(0o755)
    (shared / "somebody's file").touch()
    prepare_directory(ours, "")
    prepare_directory(shared, "")
    assert (mode(ours), mode(shared)) == (0o750, 0o755)


def test_a_directory_that_everybody_can_write_is_refused(place: Path) -> None:
    (place / "open").mkdir()
    (place / "open").chmod(0o1777)
    with pytest.raises(SocketError, match="writable for all users"):
        prepare_directory(place / "open", "")
    assert mode(place / "open") == 0o1777


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to give a directory away")
def test_a_directory_of_another_user_is_refused_but_by_root(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (place / "theirs").mkdir()
    os.chown(place / "theirs", 65534, -1)
    prepare_directory(place / "theirs", "")
    with monkeypatch.context() as patched, pytest.raises(SocketError, match="belongs to uid 65534"):
        patched.setattr("kvstored.sockets.is_unmapped", lambda kind, number: number == 65534)
        prepare_directory(place / "theirs", "")  # root of a user namespace that does not map its owner
    monkeypatch.setattr(os, "geteuid", lambda: 1234)
    with pytest.raises(SocketError, match="belongs to uid 65534"):
        prepare_directory(place / "theirs", "")


def test_a_directory_is_ours_where_no_other_user_may_change_it(place: Path) -> None:
    assert who_else_can_change(place) is None
    place.chmod(0o755)
    assert who_else_can_change(place) is None
    place.chmod(0o1777)
    assert "by everybody" in str(who_else_can_change(place))
    place.chmod(0o700)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs to give a directory to another user")
def test_a_directory_of_another_user_is_not_ours(place: Path) -> None:
    (place / "theirs").mkdir()
    os.chown(place / "theirs", 65534, -1)
    assert "uid 65534" in str(who_else_can_change(place / "theirs"))


def test_a_path_that_no_socket_can_have_is_refused(place: Path) -> None:
    with pytest.raises(SocketError, match="too long"):
        prepare_directory(place / ("x" * 100), "")


def test_an_unknown_group_is_named(place: Path) -> None:
    with pytest.raises(SocketError, match="groupadd"):
        prepare_directory(place / "run", "no-such-group-here")


def test_a_file_in_the_way_of_the_directory_is_named(place: Path) -> None:
    (place / "file").touch()
    with pytest.raises(SocketError, match="cannot make socket directory"):
        prepare_directory(place / "file", "")


@pytest.mark.parametrize("kind", [socket.SOCK_STREAM, socket.SOCK_SEQPACKET])
def test_a_dead_socket_is_removed_and_a_live_one_is_not(place: Path, kind: socket.SocketKind) -> None:
    path = place / "a.sock"
    with socket.socket(socket.AF_UNIX, kind) as live:
        live.bind(str(path))
        live.listen(0)
        with pytest.raises(SocketError, match="another daemon is serving"):
            clear_stale(path)
        assert path.is_socket()
    clear_stale(path)
    assert not path.exists()
    clear_stale(path)  # nothing there: nothing to do


def test_a_live_socket_with_a_full_backlog_is_not_taken_for_dead(place: Path) -> None:
    path = place / "a.sock"
    waiting = []
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as live:
        live.bind(str(path))
        live.listen(0)
        with pytest.raises(BlockingIOError):
            for _ in range(10):
                caller = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                waiting.append(caller)
                caller.setblocking(False)
                caller.connect(str(path))
        with pytest.raises(SocketError, match="another daemon is serving"):
            clear_stale(path)
        assert path.is_socket()
    for caller in waiting:
        caller.close()


def test_what_is_no_socket_is_never_removed(place: Path) -> None:
    for make in (Path.touch, Path.mkdir):
        path = place / make.__name__
        make(path)
        with pytest.raises(SocketError, match="is not a socket"):
            clear_stale(path)
        assert path.exists()
    link = place / "link"
    link.symlink_to(place / "nowhere")
    with pytest.raises(SocketError, match="is not a socket"):
        clear_stale(link)


def test_the_handshake_socket_is_for_user_and_group(place: Path) -> None:
    listener = listen_seqpacket(place / "h.sock", "")
    assert mode(place / "h.sock") == 0o660
    with pytest.raises(SocketError, match="cannot listen"):
        listen_seqpacket(place / "h.sock", "")
    listener.close()


def test_one_instance_a_directory_and_its_pid_is_reported(place: Path) -> None:
    first = InstanceLock(place)
    with pytest.raises(AlreadyRunning, match=rf"pid {os.getpid()};"):
        InstanceLock(place)
    first.release()
    first.release()
    InstanceLock(place).release()


def test_systemd_is_notified_over_its_socket(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    assert not notify("READY=1")
    for address in (str(place / "n"), f"@kvstored-test-{os.getpid()}"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
            manager.settimeout(60)
            manager.bind(address.replace("@", "\0"))
            monkeypatch.setenv("NOTIFY_SOCKET", address)
            assert notify("READY=1", "STATUS=serving")
            assert manager.recv(100) == b"READY=1\nSTATUS=serving"
    assert not notify("READY=1"), "no socket listens any more"


@pytest.mark.parametrize(
    ("usec", "pid", "interval_s"),
    [("3000000", "", 1.5), ("3000000", "self", 1.5), ("3000000", "1", None), ("", "", None), ("soon", "", None)],
)
def test_the_watchdog_is_fed_at_half_its_time(
    monkeypatch: pytest.MonkeyPatch, usec: str, pid: str, interval_s: float | None
) -> None:
    monkeypatch.setenv("WATCHDOG_USEC", usec)
    monkeypatch.setenv("WATCHDOG_PID", str(os.getpid()) if pid == "self" else pid)
    assert watchdog_interval_s() == interval_s
