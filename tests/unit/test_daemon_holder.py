"""The holder by itself: what it keeps, what it gives back, whom it answers, and when it ends."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvstored.passing import receive_packet, send_packet
from kvstored.warm.keepers import HolderKeeper, choose_keeper
from tests.reference.held_memory import held_memory, holder_pid
from tests.reference.running_daemon import eventually


@pytest.fixture
def place() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="kvh-") as directory:
        yield Path(directory)


@pytest.fixture
def keeper(place: Path) -> Iterator[HolderKeeper]:
    made = HolderKeeper(place, 60.0)
    yield made
    made.close(forget=True)


def memory(content: bytes) -> int:
    descriptor = os.memfd_create("test")
    os.write(descriptor, content)
    return descriptor


def contents(place: Path) -> dict[str, bytes]:
    found = {}
    for name, descriptor in held_memory(place, "").items():
        found[name] = os.pread(descriptor, 16, 0)
        os.close(descriptor)
    return found


@contextmanager
def connected(place: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.settimeout(10.0)
        connection.connect(str(place / "holder.sock"))
        yield connection


def test_it_keeps_replaces_and_drops(place: Path, keeper: HolderKeeper) -> None:
    for name, content in (("a1", b"one"), ("a2", b"two"), ("a1", b"first")):
        descriptor = memory(content)
        assert keeper.keep(name, descriptor)
        os.close(descriptor)
    assert contents(place) == {"a1": b"first", "a2": b"two"}
    keeper.drop("a2")
    keeper.drop("never there")
    assert contents(place) == {"a1": b"first"}
    assert (place / "holder.sock").stat().st_mode & 0o777 == 0o600


def test_a_next_daemon_gets_everything(place: Path) -> None:
    first = HolderKeeper(place, 60.0)
    for number in range(300):
        descriptor = memory(b"%d" % number)
        assert first.keep(f"a{number}", descriptor)
        os.close(descriptor)
    holder = holder_pid(place)
    first.close(forget=False)
    second = HolderKeeper(place, 60.0)
    found = second.fetch()
    assert {name: os.pread(descriptor, 16, 0) for name, descriptor in found.items()} == {
        f"a{number}": b"%d" % number for number in range(300)
    }
    assert holder_pid(place) == holder
    assert not any(os.get_inheritable(descriptor) for descriptor in found.values())
    for descriptor in found.values():
        os.close(descriptor)
    second.close(forget=True)
    assert eventually(lambda: holder_pid(place) == 0)


def test_what_a_dying_daemon_sent_last_is_taken_in_before_others_are_answered(
    place: Path, keeper: HolderKeeper
) -> None:
    pid = holder_pid(place) if eventually(lambda: holder_pid(place) > 0) else 0
    contents(place)
    os.kill(pid, signal.SIGSTOP)
    try:
        with connected(place) as dying:
            for number in range(20):
                descriptor = memory(b"last words")
                send_packet(dying, b"Kx%d" % number, [descriptor])
                os.close(descriptor)
        with connected(place) as next_one:
            next_one.send(b"L")
            os.kill(pid, signal.SIGCONT)
            found = []
            while (answer := receive_packet(next_one, 128))[0] != b"E":
                found.append(answer[0])
                os.close(answer[1][0])
        assert sorted(found) == sorted(b"Fx%d" % number for number in range(20))
    finally:
        os.kill(pid, signal.SIGCONT)


def test_nonsense_is_survived(place: Path, keeper: HolderKeeper) -> None:
    descriptor = memory(b"kept")
    assert keeper.keep("a1", descriptor)
    with connected(place) as connection:
        for packet in (b"?", b"K", b"Kname", b"D", b"Snever", b"S", b"K" + b"x" * 500, b"\0\xff"):
            connection.send(packet)
        send_packet(connection, b"Dx", [descriptor])
    os.close(descriptor)
    assert contents(place) == {"a1": b"kept"}


def test_it_ends_when_nobody_needs_it(place: Path) -> None:
    empty = HolderKeeper(place, 60.0)
    assert eventually(lambda: holder_pid(place) > 0)
    empty.close(forget=False)
    assert eventually(lambda: holder_pid(place) == 0), "it holds nothing"
    assert not (place / "holder.sock").exists()
    impatient = HolderKeeper(place, 0.0)
    descriptor = memory(b"kept")
    assert impatient.keep("a1", descriptor)
    os.close(descriptor)
    impatient.close(forget=False)
    assert eventually(lambda: holder_pid(place) == 0), "nobody came in time"


def test_it_ends_with_its_directory() -> None:
    with tempfile.TemporaryDirectory(prefix="kvh-") as directory:
        place = Path(directory)
        keeper = HolderKeeper(place, 600.0)
        descriptor = memory(b"kept")
        assert keeper.keep("a1", descriptor)
        os.close(descriptor)
        assert eventually(lambda: holder_pid(place) > 0)
        keeper.close(forget=False)
    assert eventually(lambda: holder_pid(place) == 0)


def test_it_outlives_the_process_that_started_it(place: Path) -> None:
    program = f"""
import os, signal
from pathlib import Path
from kvstored.warm.keepers import HolderKeeper
keeper = HolderKeeper(Path({str(place)!r}), 60.0)
descriptor = os.memfd_create("test")
os.write(descriptor, b"kept")
assert keeper.keep("a1", descriptor)
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == -signal.SIGKILL
    assert contents(place) == {"a1": b"kept"}
    with connected(place) as connection:
        connection.send(b"Q")
    assert eventually(lambda: holder_pid(place) == 0)


def test_a_holder_that_does_not_read_delays_nobody(place: Path, keeper: HolderKeeper) -> None:
    """What cannot be sent at once is sent later, if it is still wanted then."""
    contents(place)
    keeper.fetch()
    pid = holder_pid(place)
    os.kill(pid, signal.SIGSTOP)
    try:
        descriptor = memory(b"kept")
        kept = [keeper.keep(f"a{number}", descriptor) for number in range(600)]
        assert not all(kept) and keeper.unkept > 0
        late = [number for number, sent in enumerate(kept) if not sent]
        keeper.drop(f"a{late[0]}")
    finally:
        os.kill(pid, signal.SIGCONT)
    sent_late: set[str] = set()
    assert eventually(lambda: bool(sent_late.update(keeper.retry()) or keeper.unkept == 0))
    os.close(descriptor)
    assert sent_late == {f"a{number}" for number in late[1:]}
    assert set(contents(place)) == {f"a{number}" for number in range(600) if number != late[0]}


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become another user")
def test_other_users_are_not_answered(place: Path, keeper: HolderKeeper) -> None:
    place.chmod(0o755)
    (place / "holder.sock").chmod(0o666)  # a mistake that somebody might make
    program = f"""
import os, socket
os.setgid(65534); os.setuid(65534)
connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
connection.settimeout(10)
connection.connect({str(place / "holder.sock")!r})
try:
    connection.send(b"L")
    print(connection.recv(10))
except ConnectionError:
    print(b"")
"""
    done = subprocess.run([sys.executable, "-S", "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "b''\n"


def test_off_keeps_nothing(place: Path) -> None:
    assert choose_keeper("off", place, 1.0) is None and not list(place.iterdir())
