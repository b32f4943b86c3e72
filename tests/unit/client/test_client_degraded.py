"""No daemon, a stopped one, a slow one, a restarted one: misses within the deadline, and the way back."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import kvstore_client
from kvstore_client import DaemonUnavailable, ErrorKind, Fingerprint, KVStoreError, LayerGroup, Session
from kvstore_client.connection import Connection
from kvstore_client.daemon_session import ClientOptions, DaemonSession, open_daemon_session
from kvstore_client.errors import ConnectError
from kvstore_client.results import Prefetched
from kvstore_client.transport.direct import DirectTransport
from kvstore_proto.v1 import kvstore_pb2 as pb
from tests.reference.fake_daemon import Client, FakeDaemon, Knobs, eventually
from tests.unit.client.test_client_put import staging_of

pytestmark = pytest.mark.usefixtures("each_stream")
FINGERPRINT = Fingerprint("m", "w", groups=(LayerGroup(0, "full", 0, (0, 1), 32),))
TOKENS = np.arange(64 * 3, dtype=np.int32)
PAYLOADS = [bytes([block]) * FINGERPRINT.payload_bytes() for block in range(3)]


def connect(directory: Path, **options: object) -> Session:
    settings: dict[str, object] = {"deadline_s": 30.0, "connect_timeout_s": 30.0} | options
    return kvstore_client.connect(directory, fingerprint=FINGERPRINT, **settings)  # type: ignore[arg-type]


def is_direct(session: Session) -> bool:
    connection = session._connection.current()
    return connection is not None and isinstance(connection.stream._transport, DirectTransport)


def reasons(session: Session, times: int) -> list[str]:
    """Return the reasons of lookups that do not wait long."""
    return [session.lookup(TOKENS, deadline_s=0.1).reason for _ in range(times)]


@contextmanager
def kept_waiting(daemon: FakeDaemon, operation: str) -> Iterator[None]:
    """The daemon answers `operation` at the end of this, and not before."""
    answer, may_answer = daemon.answer, threading.Event()

    def answer_late(client: Client, request: pb.Request) -> list[pb.Response]:
        assert request.WhichOneof("op") != operation or may_answer.wait(60)
        return answer(client, request)

    daemon.answer = answer_late  # type: ignore[method-assign]
    try:
        yield
    finally:
        may_answer.set()


def test_without_a_daemon_everything_is_a_miss_and_nothing_raises(tmp_path: Path) -> None:
    with connect(tmp_path / "none") as session:
        assert session.state == "degraded"
        assert session.lookup(TOKENS).reason == "no_daemon"
        with session.get(TOKENS) as lease:
            assert (len(lease), lease.valid, lease.reason) == (0, False, "no_daemon")
        receipt = session.put(TOKENS, payloads=PAYLOADS)
        assert (receipt.statuses, receipt.reason) == (["failed"] * 3, "no_daemon")
        assert session.prefetch(TOKENS) == Prefetched(0, 0, "no_daemon")
        assert session.ping() is None
        assert session.keys(TOKENS) is None
        assert "no daemon at" in session.statistics().last_error


def test_a_required_daemon_that_is_absent_is_an_error_with_advice(tmp_path: Path) -> None:
    with pytest.raises(DaemonUnavailable, match="kvstored serve --socket-dir"):
        connect(tmp_path / "none", required=True)


def test_a_stale_socket_is_distinguished_from_an_absent_one(tmp_path: Path) -> None:
    with FakeDaemon(tmp_path):
        pass
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stale:
        stale.bind(str(tmp_path / "handshake.sock"))
    with pytest.raises(DaemonUnavailable, match="stale socket"):
        connect(tmp_path, required=True)


def test_a_session_finds_a_daemon_that_starts_later(tmp_path: Path) -> None:
    with connect(tmp_path / "s") as session:
        assert session.state == "degraded"
        with FakeDaemon(tmp_path / "s"):
            eventually(lambda: session.state == "connected")
            assert session.put(TOKENS, payloads=PAYLOADS).stored_blocks == 3
            assert session.statistics().reconnects == 1


def test_a_restarted_daemon_is_found_and_old_leases_are_over(tmp_path: Path) -> None:
    with connect(tmp_path / "s") as session:
        with FakeDaemon(tmp_path / "s"):
            eventually(lambda: session.state == "connected")
            session.put(TOKENS, payloads=PAYLOADS)
            lease = session.get(TOKENS)
            view = lease.payload(1)
            assert lease.valid
        eventually(lambda: session.state == "degraded")
        assert not lease.valid
        assert lease.copy_into([np.empty(len(view), np.uint8)]) == 0
        assert view.tobytes() == PAYLOADS[1]
        with FakeDaemon(tmp_path / "s") as second:
            eventually(lambda: session.state == "connected")
            assert session.lookup(TOKENS).reason == "never_stored"
            assert session.put(TOKENS, payloads=PAYLOADS).stored_blocks == 3
            lease.release()
            assert not second.released


def test_timeouts_are_misses_and_degrade_after_some_in_a_row(tmp_path: Path) -> None:
    knobs = Knobs()
    with FakeDaemon(tmp_path / "s", knobs) as daemon, connect(tmp_path / "s", required=True) as session:
        knobs.silent |= {"lookup", "ping"}
        session._connection._connect_timeout_s = 1.0  # for a ping to be answered, now that it is connected
        assert reasons(session, 3) == ["deadline"] * 3
        assert session.state == "degraded"
        eventually(lambda: daemon.log.count("lookup") == 3)
        assert reasons(session, 50) == ["no_daemon"] * 50
        assert daemon.log.count("lookup") == 3
        assert session.statistics().timeouts == 3
        knobs.silent.clear()
        eventually(lambda: session.state == "connected")
        assert session.lookup(TOKENS).reason == "never_stored"
        assert session.statistics().reconnects == 0  # the connection, and its leases, were kept


def test_an_answer_between_timeouts_keeps_the_session(tmp_path: Path) -> None:
    knobs = Knobs()
    with FakeDaemon(tmp_path / "s", knobs), connect(tmp_path / "s", required=True) as session:
        knobs.silent.add("lookup")
        for _ in range(2):
            assert reasons(session, 2) == ["deadline"] * 2
            assert session.ping() is not None
        assert session.state == "connected"


def test_a_handshake_that_takes_all_the_time_is_a_failure_like_any_other(tmp_path: Path) -> None:
    with FakeDaemon(tmp_path):
        health: Any = SimpleNamespace(answered=lambda: None, stream_ended=lambda reason: None)
        options = ClientOptions(tmp_path, FINGERPRINT, "slow", 0)
        daemon_session = open_daemon_session(options, 30.0, health)
        try:
            assert daemon_session.ping(30.0)
            assert not daemon_session.ping(-0.5)
        finally:
            daemon_session.close()


def test_a_late_acquire_gives_its_lease_back(tmp_path: Path) -> None:
    with FakeDaemon(tmp_path / "s") as daemon, connect(tmp_path / "s", required=True) as session:
        assert session.put(TOKENS, payloads=PAYLOADS).stored_blocks == 3
        with kept_waiting(daemon, "acquire"), session.get(TOKENS, deadline_s=0.1) as lease:
            assert (len(lease), lease.reason) == (0, "deadline")
        eventually(lambda: len(daemon.released) == 1)
        assert not any(client.leases for client in daemon.clients.values())


def test_a_daemon_of_another_protocol_is_refused_in_words(tmp_path: Path) -> None:
    """One that takes our hello, and answers in a way that we do not know."""
    with (
        FakeDaemon(tmp_path / "s", Knobs(protocol_version=9)),
        pytest.raises(DaemonUnavailable, match=r"speaks protocol 9 .* this client 1 .* upgrade the older"),
    ):
        connect(tmp_path / "s", required=True)


def test_a_loan_that_comes_late_is_the_next_puts(tmp_path: Path) -> None:
    with (
        FakeDaemon(tmp_path / "s") as daemon,
        connect(tmp_path / "s", required=True, deadline_s=0.1) as session,
    ):
        with kept_waiting(daemon, "lend"):
            receipt = session.put(TOKENS, payloads=PAYLOADS)
        assert (receipt.statuses, receipt.reason) == (["failed"] * 3, "deadline")
        assert not daemon.stores
        eventually(lambda: staging_of(session).loan == 1)
        assert session.put(TOKENS, payloads=PAYLOADS).statuses == ["stored"] * 3


def test_an_ended_session_is_opened_anew(tmp_path: Path) -> None:
    with FakeDaemon(tmp_path / "s") as daemon, connect(tmp_path / "s", required=True) as session:
        daemon.knobs.errors["lookup"] = pb.Error(kind=pb.ERROR_KIND_UNAUTHENTICATED, message="expired")
        assert session.lookup(TOKENS).reason == "no_daemon"
        daemon.knobs.errors.clear()
        eventually(lambda: session.state == "connected")
        assert session.statistics().reconnects == 1
        assert len(daemon.clients) == 2


def test_a_broken_stream_is_reopened_and_leases_survive(tmp_path: Path) -> None:
    with FakeDaemon(tmp_path / "s") as daemon, connect(tmp_path / "s", required=True) as session:
        session.put(TOKENS, payloads=PAYLOADS)
        lease = session.get(TOKENS)
        daemon.break_streams()
        eventually(lambda: daemon.streams_opened == 2 and session.state == "connected")
        assert len(daemon.clients) == 1
        assert lease.valid
        daemon.knobs.silent.add("release")
        lease.release()
        eventually(lambda: "release" in daemon.log)
        assert not daemon.released
        daemon.knobs.silent.clear()
        daemon.break_streams()  # what was not confirmed is sent again on the next stream
        eventually(lambda: len(daemon.released) == 1)


def test_a_refusal_for_good_is_the_callers_mistake(tmp_path: Path) -> None:
    refusal = pb.Error(kind=pb.ERROR_KIND_FORBIDDEN, message="uid 1000 has no tenant")
    with FakeDaemon(tmp_path / "s", Knobs(refuse=refusal)):
        with pytest.raises(KVStoreError, match="uid 1000 has no tenant") as raised:
            connect(tmp_path / "s")
        assert raised.value.kind is ErrorKind.FORBIDDEN


def test_a_passing_refusal_degrades(tmp_path: Path) -> None:
    knobs = Knobs(refuse=pb.Error(kind=pb.ERROR_KIND_UNAVAILABLE, message="draining"))
    with FakeDaemon(tmp_path / "s", knobs), connect(tmp_path / "s") as session:
        assert session.state == "degraded"
        assert "draining" in session.statistics().last_error
        knobs.refuse = None
        eventually(lambda: session.state == "connected")


def test_a_daemon_that_opens_no_stream_in_time_does_not_cost_the_session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeDaemon, "is_direct", True)
    with FakeDaemon(tmp_path / "s") as daemon, connect(tmp_path / "s", required=True) as session:
        session.put(TOKENS, payloads=PAYLOADS)
        lease = session.get(TOKENS)
        daemon.grants_streams = False
        daemon.break_streams()
        eventually(lambda: daemon.streams_refused >= 3)
        assert session.state == "degraded" and lease.valid
        daemon.grants_streams = True
        eventually(lambda: session.state == "connected")
        assert lease.valid and session.statistics().reconnects == 0
        assert len(daemon.clients) == 1, "one handshake"


def _serve(directory: Path, ready: object, is_direct: bool) -> None:
    FakeDaemon.is_direct = is_direct
    with FakeDaemon(directory):
        ready.set()  # type: ignore[attr-defined]
        signal.pause()


def test_a_stopped_daemon_never_hangs_an_engine(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    ready = context.Event()
    process = context.Process(target=_serve, args=(tmp_path / "s", ready, FakeDaemon.is_direct), daemon=True)
    process.start()
    assert process.pid is not None
    try:
        assert ready.wait(60)
        with connect(tmp_path / "s", required=True) as session:
            assert is_direct(session) == FakeDaemon.is_direct
            assert session.put(TOKENS, payloads=PAYLOADS).stored_blocks == 3
            lease = session.get(TOKENS)
            os.kill(process.pid, signal.SIGSTOP)
            os.waitpid(process.pid, os.WUNTRACED)  # returns once it has stopped
            assert reasons(session, 4) == ["deadline"] * 3 + ["no_daemon"]
            assert session.put(TOKENS, payloads=PAYLOADS).statuses == ["failed"] * 3
            assert lease.valid  # its bytes stand until the lease expires, by our own clock
            with pytest.raises(DaemonUnavailable):
                connect(tmp_path / "s", required=True, connect_timeout_s=0.2)
            os.kill(process.pid, signal.SIGCONT)
            eventually(lambda: session.state == "connected")
            assert session.lookup(TOKENS).blocks == 3
            assert lease.valid
    finally:
        process.kill()
        process.join()


def test_a_forked_child_is_refused_and_the_parent_goes_on(tmp_path: Path) -> None:
    with FakeDaemon(tmp_path / "s"), connect(tmp_path / "s", required=True) as session:
        pid = os.fork()
        if pid == 0:
            try:
                session.lookup(TOKENS)
            except KVStoreError as error:
                session.close()
                os._exit(7 if "fork" in error.message else 8)
            os._exit(9)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
        assert session.lookup(TOKENS).reason == "never_stored"


class FailingOpen:
    """Counts attempts; each fails."""

    def __init__(self) -> None:
        self.attempts = 0

    def __call__(self, *_: object) -> DaemonSession:
        self.attempts += 1
        raise ConnectError(f"attempt {self.attempts}")


def test_reconnecting_waits_longer_each_time_and_ends_with_the_session() -> None:
    attempts = FailingOpen()
    delays: list[float] = []
    done = threading.Event()

    def wait(closing: threading.Event, delay_s: float) -> bool:
        delays.append(delay_s)
        if len(delays) == 12:
            done.set()
            return True
        return closing.is_set()

    options = ClientOptions(Path("nowhere"), FINGERPRINT, "", 0)
    connection = Connection(options, connect_timeout_s=1.0, rng=random.Random(3), open_session=attempts, wait=wait)
    with pytest.raises(ConnectError):
        connection.connect()
    assert done.wait(60)
    connection.close()
    assert attempts.attempts == 12  # one in connect, eleven in the background
    assert connection.last_error == "attempt 12"
    assert all(delay <= 2.0 for delay in delays)
    assert max(delays[6:]) > max(delays[:3])
    assert connection.state == "closed"
