"""The holder by itself: what it keeps, what it gives back, whom it answers, and when it ends."""

from __future__ import annotations

import logging
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from kvstore_tiers.child_processes import receive_packet, send_packet
from kvstored.lifetime.holder import MAX_CONNECTIONS
from kvstored.lifetime.warm import holders
from kvstored.lifetime.warm.descriptor_holder import HolderError
from kvstored.lifetime.warm.holders import ProcessHolder, choose_holder
from tests.reference.held_memory import held_memory, holder_pid
from tests.reference.running_daemon import eventually


@pytest.fixture
def place() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="kvh-") as directory:
        yield Path(directory)


@pytest.fixture
def holder(place: Path) -> Iterator[ProcessHolder]:
    made = ProcessHolder(place, 60.0)
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
def stopped(place: Path) -> Iterator[int]:
    """Stop the holder's process, which reads nothing until the end of this."""
    assert eventually(lambda: holder_pid(place) > 0)
    pid = holder_pid(place)
    os.kill(pid, signal.SIGSTOP)
    try:
        yield pid
    finally:
        os.kill(pid, signal.SIGCONT)


def late_python(place: Path) -> str:
    """Return a program that becomes this Python when the file `go` is there."""
    program = place / "late-python"
    program.write_text(f'#!/bin/sh\nwhile [ ! -e {place}/go ]; do sleep 0.01; done\nexec {sys.executable} "$@"\n')
    program.chmod(0o700)
    return str(program)


def has_ended(pid: int) -> bool:
    try:
        return not Path(f"/proc/{pid}/cmdline").read_bytes()  # no parent has reaped it yet
    except OSError:
        return True


@contextmanager
def connected(place: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.settimeout(60)
        connection.connect(str(place / "holder.sock"))
        yield connection


def test_it_keeps_replaces_and_drops(place: Path, holder: ProcessHolder) -> None:
    for name, content in (("a1", b"one"), ("a2", b"two"), ("a1", b"first")):
        descriptor = memory(content)
        assert holder.keep(name, descriptor)
        os.close(descriptor)
    assert contents(place) == {"a1": b"first", "a2": b"two"}
    holder.drop("a2")
    holder.drop("never there")
    assert contents(place) == {"a1": b"first"}
    assert (place / "holder.sock").stat().st_mode & 0o777 == 0o600


def test_a_next_daemon_gets_everything(place: Path) -> None:
    first = ProcessHolder(place, 60.0)
    descriptors = [memory(b"%d" % number) for number in range(300)]
    for number, descriptor in enumerate(descriptors):  # more than its queue takes before it runs
        first.keep(f"a{number}", descriptor)
    first.settle()
    assert first.unkept == 0
    for descriptor in descriptors:
        os.close(descriptor)
    holder = holder_pid(place)
    first.close(forget=False)
    second = ProcessHolder(place, 60.0)
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


def test_a_small_soft_limit_costs_nothing(place: Path) -> None:
    """A descriptor that the holder cannot take is dropped by the kernel without an error."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    open_now = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (open_now + 40, hard))
    try:
        holder = ProcessHolder(place, 60.0)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    holder.fetch()
    descriptor = memory(b"kept")
    for number in range(open_now + 200):
        holder.keep(f"a{number}", descriptor)
    holder.settle()
    assert len(contents(place)) == open_now + 200
    os.close(descriptor)
    holder.close(forget=True)


def test_no_more_is_sent_than_is_kept(place: Path, holder: ProcessHolder, caplog: pytest.LogCaptureFixture) -> None:
    holder.limit = 2
    descriptor = memory(b"kept")
    with caplog.at_level(logging.WARNING):
        kept = [holder.keep(f"a{number}", descriptor) for number in range(5)]
    assert kept == [True, True, False, False, False] and holder.unkept == 3 and not holder.is_behind
    assert [record.getMessage() for record in caplog.records] == [
        "the holder keeps 2 descriptors at most: memory beyond that will not survive a restart"
    ]
    assert holder.keep("a1", descriptor), "in place of what is there"
    holder.drop("a3")
    holder.drop("a0")
    assert holder.retry() == ["a2"] and holder.unkept == 1
    assert set(contents(place)) == {"a1", "a2"}
    os.close(descriptor)


def test_at_the_end_it_waits_for_what_is_on_its_way(place: Path, holder: ProcessHolder) -> None:
    descriptor = memory(b"kept")
    assert contents(place) == {}, "it runs, and has loaded its modules"
    with stopped(place):
        late = [f"a{number}" for number in range(600) if not holder.keep(f"a{number}", descriptor)]
        assert late and holder.is_behind
    assert sorted(holder.settle()) == sorted(late) and holder.unkept == 0
    os.close(descriptor)
    assert len(contents(place)) == 600


def test_a_new_one_is_not_waited_for(
    place: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A new one has nothing to give, and keeps what it is sent before it runs."""
    monkeypatch.setattr(holders, "_ANSWER_TIMEOUT_S", 0.3)
    monkeypatch.setattr(sys, "executable", late_python(place))
    holder = ProcessHolder(place, 60.0)
    assert holder.fetch() == {} and not caplog.records
    descriptor = memory(b"early")
    assert holder.keep("a1", descriptor)
    os.close(descriptor)
    (place / "go").touch()
    assert contents(place) == {"a1": b"early"} and not holder.lost
    holder.close(forget=True)


def test_a_late_one_does_not_take_anothers_file_for_its_own(
    place: Path, holder: ProcessHolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tempfile.TemporaryDirectory(prefix="kvh-") as elsewhere:
        monkeypatch.setattr(sys, "executable", late_python(Path(elsewhere)))
        late = ProcessHolder(Path(elsewhere), 60.0)
        late.close(forget=False)
        os.unlink(Path(elsewhere) / "holder.sock")
        (Path(elsewhere) / "holder.sock").touch()
        (Path(elsewhere) / "go").touch()
        assert eventually(lambda: holder_pid(Path(elsewhere)) == 0)
        assert (Path(elsewhere) / "holder.sock").exists()


def test_one_that_does_not_answer_is_given_up(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = ProcessHolder(place, 60.0)
    first.fetch()
    descriptor = memory(b"kept")
    assert first.keep("a1", descriptor)
    first.close(forget=False)
    monkeypatch.setattr(holders, "_ANSWER_TIMEOUT_S", 0.3)
    with stopped(place) as former:
        second = ProcessHolder(place, 60.0)
        assert second.fetch() == {}
    assert eventually(lambda: has_ended(former)), "and with it what it had"
    assert second.keep("a2", descriptor)
    assert eventually(lambda: contents(place) == {"a2": b"kept"})
    os.close(descriptor)
    second.close(forget=True)


def test_what_half_an_answer_gave_is_kept_by_another(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(holders, "_ANSWER_TIMEOUT_S", 0.3)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stuck:
        stuck.bind(str(place / "holder.sock"))
        stuck.listen(1)
        holder = ProcessHolder(place, 60.0)
        connection, _ = stuck.accept()
        with connection:
            descriptor = memory(b"given")
            send_packet(connection, b"Fa1", [descriptor])
            os.close(descriptor)
            found = holder.fetch()
    assert list(found) == ["a1"] and not holder.lost
    assert eventually(lambda: contents(place) == {"a1": b"given"})
    os.close(found["a1"])
    holder.close(forget=True)


def test_one_that_cannot_be_replaced_at_once_is_replaced_later(
    place: Path, holder: ProcessHolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses() -> socket.socket:
        raise HolderError("no process can be started")

    holder.fetch()
    assert eventually(lambda: holder_pid(place) > 0)
    os.kill(holder_pid(place), signal.SIGKILL)
    assert eventually(lambda: bool(holder.retry() or holder.lost))
    with monkeypatch.context() as patched:
        patched.setattr(holder, "_start", refuses)
        with pytest.raises(HolderError):
            holder.reopen()
        assert holder.retry() == [] and holder.lost
    holder.reopen()
    descriptor = memory(b"kept")
    assert holder.keep("a1", descriptor) and not holder.lost
    os.close(descriptor)
    assert contents(place) == {"a1": b"kept"}


def test_what_a_dying_daemon_sent_last_is_taken_in_before_others_are_answered(
    place: Path, holder: ProcessHolder
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


def test_connections_that_say_nothing_keep_no_daemon_out(place: Path) -> None:
    first = ProcessHolder(place, 60.0)
    descriptor = memory(b"kept")
    first.keep("a1", descriptor)
    os.close(descriptor)
    first.settle()
    assert eventually(lambda: holder_pid(place) > 0)
    holder = holder_pid(place)
    with ExitStack() as strangers:
        silent = [strangers.enter_context(connected(place)) for _ in range(3 * MAX_CONNECTIONS)]
        assert silent[0].recv(1) == b"", "the oldest has made room"
        assert len(os.listdir(f"/proc/{holder}/fd")) <= MAX_CONNECTIONS + 10
        assert contents(place) == {"a1": b"kept"}
        first.close(forget=False)
        second = ProcessHolder(place, 60.0)
        found = second.fetch()
        assert list(found) == ["a1"] and holder_pid(place) == holder
        os.close(found["a1"])
    second.close(forget=True)


def test_nonsense_is_survived(place: Path, holder: ProcessHolder) -> None:
    descriptor = memory(b"kept")
    assert holder.keep("a1", descriptor)
    with connected(place) as connection:
        for packet in (b"?", b"K", b"Kname", b"D", b"Snever", b"S", b"K" + b"x" * 500, b"\0\xff"):
            connection.send(packet)
        send_packet(connection, b"Dx", [descriptor])
    os.close(descriptor)
    assert contents(place) == {"a1": b"kept"}


def test_it_ends_when_no_process_needs_it(place: Path) -> None:
    empty = ProcessHolder(place, 60.0)
    assert eventually(lambda: holder_pid(place) > 0)
    empty.close(forget=False)
    assert eventually(lambda: holder_pid(place) == 0), "it holds nothing"
    assert not (place / "holder.sock").exists()
    impatient = ProcessHolder(place, 0.0)
    descriptor = memory(b"kept")
    assert impatient.keep("a1", descriptor)
    os.close(descriptor)
    impatient.close(forget=False)
    assert eventually(lambda: holder_pid(place) == 0), "no daemon came in time"


def test_it_ends_with_its_directory() -> None:
    with tempfile.TemporaryDirectory(prefix="kvh-") as directory:
        place = Path(directory)
        holder = ProcessHolder(place, 600.0)
        descriptor = memory(b"kept")
        assert holder.keep("a1", descriptor)
        os.close(descriptor)
        assert eventually(lambda: holder_pid(place) > 0)
        holder.close(forget=False)
    assert eventually(lambda: holder_pid(place) == 0)


def test_it_outlives_the_process_that_started_it(place: Path) -> None:
    program = f"""
import os, signal
from pathlib import Path
from kvstored.lifetime.warm.holders import ProcessHolder
holder = ProcessHolder(Path({str(place)!r}), 60.0)
descriptor = os.memfd_create("test")
os.write(descriptor, b"kept")
assert holder.keep("a1", descriptor)
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == -signal.SIGKILL
    assert contents(place) == {"a1": b"kept"}
    with connected(place) as connection:
        connection.send(b"Q")
    assert eventually(lambda: holder_pid(place) == 0)


def test_a_holder_that_does_not_read_does_not_delay_the_daemon(place: Path, holder: ProcessHolder) -> None:
    """The descriptors that cannot be sent at once are sent later, if they are still wanted then."""
    contents(place)
    holder.fetch()
    with stopped(place):
        descriptor = memory(b"kept")
        kept = [holder.keep(f"a{number}", descriptor) for number in range(600)]
        assert not all(kept) and holder.unkept > 0
        late = [number for number, sent in enumerate(kept) if not sent]
        holder.drop(f"a{late[0]}")
    sent_late: set[str] = set()
    assert eventually(lambda: bool(sent_late.update(holder.retry()) or holder.unkept == 0))
    os.close(descriptor)
    assert sent_late == {f"a{number}" for number in late[1:]}
    assert set(contents(place)) == {f"a{number}" for number in range(600) if number != late[0]}


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become another user")
def test_other_users_are_not_answered(place: Path, holder: ProcessHolder) -> None:
    place.chmod(0o755)
    (place / "holder.sock").chmod(0o666)  # a mistake that an operator might make
    program = f"""
import os, socket
os.setgid(65534); os.setuid(65534)
connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
connection.settimeout(60)
connection.connect({str(place / "holder.sock")!r})
try:
    connection.send(b"L")
    print(connection.recv(10))
except ConnectionError:
    print(b"")
"""
    done = subprocess.run([sys.executable, "-S", "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "b''\n"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs a second user")
def test_another_users_holder_is_given_nothing(place: Path) -> None:
    """Others who may write into the directory could put a socket there and wait for arenas."""
    place.chmod(0o777)
    program = f"""
import os, socket
os.setgid(65534); os.setuid(65534)
listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
listener.bind({str(place / "holder.sock")!r})
listener.listen()
print("listens", flush=True)
connection, _ = listener.accept()
print(connection.recv(64))
"""
    command = [sys.executable, "-S", "-c", program]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as stranger:
        assert stranger.stdout is not None and stranger.stdout.readline() == "listens\n"
        holder = ProcessHolder(place, 60.0)
        try:
            assert stranger.stdout.readline() == "b''\n", "it hears nothing but the end"
            assert eventually(lambda: holder_pid(place) not in (0, stranger.pid)), "we have one of our own"
        finally:
            holder.close(forget=True)


def test_off_keeps_nothing(place: Path) -> None:
    assert choose_holder("off", place, 1.0) is None and not list(place.iterdir())
