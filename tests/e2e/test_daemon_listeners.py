"""Every listener of the daemon, filled with connections that say nothing: engines still connect, descriptors are
bounded."""

from __future__ import annotations

import hashlib
import os
import shutil
import socket
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from tests.reference.conversations import model, put_conversation, tokens_of
from tests.reference.running_daemon import RunningDaemon, connected_as, eventually, free_port, running_daemon
from tests.reference.unary_client import by_tokens, unary_client

MODEL = model()
STRANGERS = 60
BOUND = 8
NOTHING, HALF = b"", b"GET /metrics HTTP/1.1\r\n"


@pytest.fixture(scope="module")
def ports() -> dict[str, int]:
    return {name: free_port() for name in ("metrics", "unary")}


@pytest.fixture(scope="module")
def daemon(ports: dict[str, int], tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningDaemon]:
    tokens = tmp_path_factory.mktemp("tokens") / "tokens"
    tokens.write_text(f"uid-{os.getuid()} {hashlib.sha256(b'secret').hexdigest()}\n")
    tokens.chmod(0o600)
    with running_daemon(
        f"metrics.listen=[::1]:{ports['metrics']}", f"metrics.connections={BOUND}",
        f"unary.listen=[::1]:{ports['unary']}", f"unary.tokens_file={tokens}", f"unary.connections={BOUND}",
        f"limits.stream_connections={BOUND}", f"limits.admin_connections={BOUND}",
        f"limits.handshakes_per_user={BOUND}",
    ) as running:  # fmt: skip
        yield running


@contextmanager
def filled(connect: Callable[[], socket.socket], says: bytes) -> Iterator[None]:
    """Open many connections that send these bytes alone; connections that are closed at once count too."""
    with ExitStack() as stack:
        for _ in range(STRANGERS):
            connection = stack.enter_context(connect())
            if says:
                with suppress(OSError):
                    connection.send(says)
        yield


def over_tcp(port: int) -> Callable[[], socket.socket]:
    return lambda: socket.create_connection(("::1", port), 10)


def over_unix(path: Path, kind: int) -> Callable[[], socket.socket]:
    def connected() -> socket.socket:
        connection = socket.socket(socket.AF_UNIX, kind)
        connection.settimeout(10)
        connection.connect(str(path))
        return connection

    return connected


@pytest.mark.parametrize("name", ["metrics", "unary", "handshake.sock", "data.sock", "unary.sock", "admin.sock"])
def test_engines_connect_whatever_fills_a_listener(daemon: RunningDaemon, ports: dict[str, int], name: str) -> None:
    if name in ports:
        connect = over_tcp(ports[name])
    else:
        kind = socket.SOCK_SEQPACKET if name == "handshake.sock" else socket.SOCK_STREAM
        connect = over_unix(daemon.socket_dir / name, kind)
    assert eventually(daemon.knows_its_state)
    before = daemon.descriptors()
    with filled(connect, HALF if name in ports else NOTHING):
        with daemon.connect(MODEL) as session:
            put_conversation(session, 1, 2)
        assert eventually(lambda: daemon.descriptors() <= before + BOUND + 4), name
        if name == "metrics":
            with urllib.request.urlopen(f"http://[::1]:{ports['metrics']}/metrics", timeout=10) as reply:
                assert reply.status == 200
    assert eventually(lambda: daemon.descriptors() <= before + 4), "all is given back"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to be two users")
def test_a_user_with_handshakes_that_never_end_locks_nobody_out() -> None:
    with running_daemon("limits.max_clients=16", "limits.handshakes_per_user=4") as daemon:
        daemon.directory.chmod(0o755)
        daemon.socket_dir.chmod(0o755)
        handshake = daemon.socket_dir / "handshake.sock"
        handshake.chmod(0o666)
        os.seteuid(4711)
        try:
            with filled(over_unix(handshake, socket.SOCK_SEQPACKET), NOTHING):
                os.seteuid(0)
                with connected_as(daemon, 4712, MODEL) as session:
                    put_conversation(session, 1, 2)
        finally:
            os.seteuid(0)


def test_removed_sockets_are_there_again_and_connected_clients_go_on() -> None:
    with running_daemon("nvme.enabled=false") as daemon, daemon.connect(MODEL) as session:
        put_conversation(session, 1, 2)
        modes = {path.name: path.stat().st_mode for path in daemon.socket_dir.glob("*.sock")}
        shutil.rmtree(daemon.socket_dir)
        assert eventually(lambda: {p.name: p.stat().st_mode for p in daemon.socket_dir.glob("*.sock")} == modes)
        put_conversation(session, 2, 2)
        with daemon.connect(MODEL) as other:
            assert other.lookup(tokens_of(2, 2)).blocks == 2
        assert daemon.status().clients == 1
        with unary_client(f"unix:{daemon.socket_dir}/unary.sock") as client:
            assert client.lookup(by_tokens(MODEL, tokens_of(2, 2))).keys


@pytest.mark.slow
def test_sockets_that_are_removed_again_and_again_leave_no_descriptors() -> None:
    with running_daemon("nvme.enabled=false") as daemon, daemon.connect(MODEL) as session:
        put_conversation(session, 1, 2)
        assert eventually(daemon.knows_its_state)
        names, before = {path.name for path in daemon.socket_dir.glob("*.sock")}, daemon.descriptors()
        for _ in range(4):
            shutil.rmtree(daemon.socket_dir)
            assert eventually(lambda: {path.name for path in daemon.socket_dir.glob("*.sock")} == names)
        assert eventually(lambda: daemon.descriptors() <= before + 4), "one that has no file listens no more"
        assert {path.name for path in daemon.socket_dir.iterdir()} == names
        put_conversation(session, 2, 2)
        with daemon.connect(MODEL) as other:
            assert other.lookup(tokens_of(2, 2)).blocks == 2
