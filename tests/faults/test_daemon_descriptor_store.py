"""Warm restart by a service manager's store for descriptors: kept, dropped, given back; what is not ours is left."""

from __future__ import annotations

import os
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstored.process import file_identity
from tests.reference.conversations import found_blocks, model, put_conversation
from tests.reference.descriptor_store import ServiceManager
from tests.reference.held_memory import holder_pid
from tests.reference.running_daemon import RunningDaemon, daemon_directory, eventually

SETTINGS = ("host.warm_restart=auto", "host.capacity=24MiB", "host.staging=4MiB", "nvme.enabled=false")
MODEL = model()
BLOCKS = 8


@pytest.fixture
def daemon() -> Iterator[RunningDaemon]:
    """The directories and the command line of a daemon; a service manager starts it."""
    with daemon_directory() as directory:
        yield RunningDaemon(directory, *SETTINGS)


@pytest.fixture
def manager(daemon: RunningDaemon) -> Iterator[ServiceManager]:
    with ServiceManager(daemon.directory) as running:
        yield running


def start(daemon: RunningDaemon, manager: ServiceManager, *, offers_store: bool = True) -> None:
    manager.start(daemon.command(), daemon.directory / "log", offers_store=offers_store)


def put(daemon: RunningDaemon, conversation: int) -> None:
    with daemon.connect(MODEL) as session:
        put_conversation(session, conversation, BLOCKS, durability="none")


def found(daemon: RunningDaemon, conversation: int) -> int:
    with daemon.connect(MODEL) as session:
        return found_blocks(session, conversation, BLOCKS)


def put_and_kill(daemon: RunningDaemon, manager: ServiceManager, conversation: int) -> None:
    """Put a conversation and kill the daemon; its ledger and an arena are in the store by then."""
    put(daemon, conversation)
    assert eventually(lambda: len(manager.names()) >= 2)
    manager.kill9()


@pytest.mark.slow
def test_blocks_come_back_from_the_store(daemon: RunningDaemon, manager: ServiceManager) -> None:
    start(daemon, manager)
    for conversation in range(20):
        put(daemon, conversation)
    assert eventually(lambda: "ledger" in manager.names() and len(manager.names()) >= 3)
    assert holder_pid(daemon.state_dir) == 0, "systemd keeps the descriptors, no holder runs"
    for life in range(2):
        stored = manager.names()
        manager.kill9()
        start(daemon, manager)
        assert daemon.status().counters["warm_blocks"] == 20 * BLOCKS
        assert manager.names() == stored, "what is stored already is not stored again"
        assert [found(daemon, conversation) for conversation in range(20)] == [BLOCKS] * 20, life
    assert manager.stop() == 0
    start(daemon, manager)
    assert [found(daemon, conversation) for conversation in range(20)] == [BLOCKS] * 20, "an orderly restart"
    assert manager.stop() == 0
    manager.forget()
    start(daemon, manager)
    assert daemon.status().blocks == 0


@pytest.mark.slow
def test_arenas_that_are_given_up_leave_the_store(daemon: RunningDaemon, manager: ServiceManager) -> None:
    start(daemon, manager)
    for conversation in range(60):
        put(daemon, conversation)
    before = manager.names()
    manager.kill9()
    daemon.settings = (*daemon.settings, "host.capacity=14MiB")
    start(daemon, manager)
    dropped = daemon.status().counters["warm_dropped_arenas"]
    assert dropped > 0
    assert eventually(lambda: len(manager.names()) == len(before) - dropped)
    assert daemon.tiers()["host"].used_bytes <= 14 << 20


@pytest.mark.slow
def test_turned_off_it_empties_the_store(daemon: RunningDaemon, manager: ServiceManager) -> None:
    start(daemon, manager)
    put_and_kill(daemon, manager, 1)
    daemon.settings = (*daemon.settings, "host.warm_restart=off")
    start(daemon, manager)
    assert daemon.status().blocks == 0
    assert eventually(lambda: manager.names() == [])


@pytest.mark.slow
def test_what_is_stored_under_our_names_and_is_not_ours_is_dropped(
    daemon: RunningDaemon, manager: ServiceManager
) -> None:
    start(daemon, manager)
    put_and_kill(daemon, manager, 1)
    kept = dict(manager.stored)
    with tempfile.TemporaryFile() as file:
        file.write(b"keep me")
        file.flush()
        manager.stored.append(("a77", os.dup(file.fileno())))
        name = next(name for name in kept if name.startswith("a"))
        os.close(kept[name])
        manager.stored[manager.stored.index((name, kept[name]))] = (name, os.dup(file.fileno()))
        start(daemon, manager)
        assert daemon.status().counters["warm_dropped_arenas"] == 1 and daemon.status().blocks == 0
        assert os.pread(file.fileno(), 16, 0) == b"keep me", "a file that is not ours is not touched"
    put(daemon, 1)
    assert found(daemon, 1) == BLOCKS


@pytest.mark.slow
def test_an_upgrade_with_another_format_ends_warm_restart_once_only(
    daemon: RunningDaemon, manager: ServiceManager
) -> None:
    start(daemon, manager)
    put_and_kill(daemon, manager, 1)
    os.pwrite(dict(manager.stored)["ledger"], b"\x63", 8)
    start(daemon, manager)
    assert daemon.status().blocks == 0 and "another format" in daemon.log
    assert eventually(lambda: manager.names().count("ledger") == 1), "the one that is of no use is stored no more"
    put_and_kill(daemon, manager, 2)
    start(daemon, manager)
    assert found(daemon, 2) == BLOCKS and daemon.status().counters["warm_blocks"] == BLOCKS


@pytest.mark.slow
def test_of_two_under_one_name_the_newest_is_taken(daemon: RunningDaemon, manager: ServiceManager) -> None:
    """A daemon before may have left two, which stored a new ledger beside one that it could not use."""
    start(daemon, manager)
    put_and_kill(daemon, manager, 1)
    manager.stored.append(("ledger", os.memfd_create("kvstore-ledger")))
    start(daemon, manager)
    assert found(daemon, 1) == BLOCKS


@pytest.mark.slow
def test_what_the_store_has_no_room_for_is_not_counted_on(daemon: RunningDaemon) -> None:
    with ServiceManager(daemon.directory, limit=3) as manager:  # the ledger and two arenas
        start(daemon, manager)
        for conversation in range(60):
            put(daemon, conversation)
        assert eventually(lambda: len(manager.names()) == 3)
        manager.kill9()
        start(daemon, manager)
        status = daemon.status()
        assert 0 < status.counters["warm_blocks"] < 60 * BLOCKS
        assert status.counters["warm_dropped_arenas"] == 0, "the ledger names none that is not stored"
        assert daemon.log.count("keeps 3 descriptors at most") == 1
        for conversation in range(60):
            put(daemon, conversation)
        assert manager.stop() == 0


@pytest.mark.slow
def test_without_a_store_the_holder_keeps_it(daemon: RunningDaemon, manager: ServiceManager) -> None:
    """An older systemd, or a unit without FileDescriptorStoreMax=."""
    start(daemon, manager, offers_store=False)
    put(daemon, 1)
    assert manager.names() == [] and holder_pid(daemon.state_dir) > 0
    manager.kill9()
    start(daemon, manager, offers_store=False)
    assert found(daemon, 1) == BLOCKS
    holder = holder_pid(daemon.state_dir)
    manager.kill9()
    start(daemon, manager)
    assert eventually(lambda: not Path(f"/proc/{holder}").exists()), "from now on systemd keeps it"
    assert daemon.status().blocks == 0


def test_asked_for_without_a_service_manager_it_says_so(daemon: RunningDaemon) -> None:
    daemon.settings = (*daemon.settings, "host.warm_restart=systemd")
    environment = {name: value for name, value in os.environ.items() if name != "NOTIFY_SOCKET"}
    done = subprocess.run(daemon.command(), env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "NOTIFY_SOCKET" in done.stderr and "Traceback" not in done.stderr


def test_a_listening_socket_of_the_manager_is_used_and_left(daemon: RunningDaemon, manager: ServiceManager) -> None:
    """A .socket unit: a client that comes before the daemon is served by it, and one that comes later waits for the
    next. Memory in the store comes beside the socket."""
    daemon.socket_dir.mkdir(mode=0o750, parents=True, exist_ok=True)
    path = daemon.socket_dir / "handshake.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(path))
        listener.listen()
        before = file_identity(path)
        manager.stored.append(("kvstored.socket", os.dup(listener.fileno())))
        start(daemon, manager)
        put_and_kill(daemon, manager, 1)
        start(daemon, manager)
        assert found(daemon, 1) == BLOCKS
        assert manager.stop() == 0
        assert file_identity(path) == before, "the manager listens there still"


@pytest.mark.slow
def test_a_removed_socket_of_the_manager_is_replaced_by_one_of_the_daemon(
    daemon: RunningDaemon, manager: ServiceManager
) -> None:
    daemon.socket_dir.mkdir(mode=0o750, parents=True, exist_ok=True)
    path = daemon.socket_dir / "handshake.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(path))
        listener.listen()
        manager.stored.append(("kvstored.socket", os.dup(listener.fileno())))
        start(daemon, manager)
        path.unlink()
        assert eventually(path.is_socket)
        put(daemon, 1)
        assert found(daemon, 1) == BLOCKS
        assert manager.stop() == 0
        assert not path.exists()
