"""A direct stream against a real daemon: the client's own way, and what clients without manners do with it."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from kvstore_client import Session
from kvstore_client.transport.direct import DirectTransport
from kvstore_proto.framing import Frames, frame
from kvstore_proto.v1 import handshake_pb2 as hs
from kvstore_proto.v1 import kvstore_pb2 as pb
from tests.reference.conversations import holds, model, payloads_of, tokens_of
from tests.reference.raw_client import RawClient, connect_seqpacket
from tests.reference.running_daemon import RunningDaemon, eventually, running_daemon

MODEL = model()
PATIENCE_S = 60.0
MESSAGE_LIMIT = 2 << 20


@pytest.fixture(scope="module")
def daemon() -> Iterator[RunningDaemon]:
    with running_daemon("nvme.enabled=false") as running:
        yield running


@pytest.fixture(autouse=True)
def nothing_is_left_behind(daemon: RunningDaemon) -> Iterator[None]:
    assert eventually(daemon.knows_its_state)
    before = daemon.descriptors()
    yield
    assert eventually(lambda: daemon.status().leases == 0), "leases outlive their client"
    assert eventually(lambda: daemon.descriptors() <= before + 2), "descriptors outlive their client"
    assert "Traceback" not in daemon.log, daemon.log


class RawStream:
    """One direct stream of a session, without manners."""

    def __init__(self, raw: RawClient) -> None:
        reply, descriptor = raw.shake(hs.ClientPacket(direct_stream=hs.DirectStreamRequest()))
        assert reply.HasField("direct_stream"), reply
        self.socket = socket.socket(fileno=descriptor)
        self.socket.settimeout(PATIENCE_S)
        self._frames = Frames(1 << 22)

    def send(self, *requests: pb.Request) -> None:
        self.socket.sendall(b"".join(frame(request.SerializeToString()) for request in requests))

    def answer(self) -> pb.Response | None:
        """The next one; None at the end."""
        while (message := self._frames.take()) is None:
            try:
                data = self.socket.recv(1 << 16)
            except ConnectionResetError:  # the daemon had not read all
                return None
            if not data:
                return None
            self._frames.feed(data)
        return pb.Response.FromString(message)

    def ask(self, request: pb.Request) -> pb.Response | None:
        self.send(request)
        return self.answer()


def ping(request_id: int, payload: bytes = b"") -> pb.Request:
    return pb.Request(request_id=request_id, ping=pb.Ping(payload=payload))


def break_stream(session: Session) -> None:
    connection = session._connection.current()
    assert connection is not None
    transport = connection.stream._transport
    assert isinstance(transport, DirectTransport)
    transport._socket.shutdown(socket.SHUT_RDWR)


def test_our_client_takes_it_and_one_through_grpc_sees_the_same_blocks(daemon: RunningDaemon) -> None:
    tokens, payloads = tokens_of(1, 8), payloads_of(1, 8, MODEL)
    with daemon.connect() as direct, daemon.connect(stream="grpc") as through_grpc:
        assert direct.put(tokens, payloads=payloads).stored_blocks == 8
        for session in (direct, through_grpc):
            assert session.lookup(tokens).blocks == 8
            with session.get(tokens) as lease:
                assert holds(lease, payloads)
        assert isinstance(direct._connection.current().stream._transport, DirectTransport)  # type: ignore[union-attr]
        assert not isinstance(through_grpc._connection.current().stream._transport, DirectTransport)  # type: ignore[union-attr]


def test_a_client_on_a_direct_stream_never_loads_grpc(daemon: RunningDaemon) -> None:

    script = f"""
import sys, kvstore_client
from kvstore_client import Fingerprint, LayerGroup
model = Fingerprint("m", "w", groups=(LayerGroup(0, "full", 0, (0, 1), 32),))
with kvstore_client.connect({str(daemon.socket_dir)!r}, fingerprint=model, required=True, deadline_s=20) as session:
    assert session.ping() is not None
print("grpc" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "False", done.stdout + done.stderr


def test_leases_survive_a_stream_that_breaks_and_the_next_one_serves(daemon: RunningDaemon) -> None:
    tokens, payloads = tokens_of(2, 8), payloads_of(2, 8, MODEL)
    with daemon.connect() as session:
        session.put(tokens, payloads=payloads)
        with session.get(tokens) as lease:
            for _ in range(3):
                break_stream(session)
                assert eventually(lambda: session.state == "connected" and session.ping() is not None)
                assert lease.valid and holds(lease, payloads)
            assert session.lookup(tokens).blocks == 8
            assert session.statistics().reconnects == 0, "it is the same handshake"


def test_a_request_that_is_too_long_ends_the_stream_in_words_and_the_session_goes_on(daemon: RunningDaemon) -> None:
    with daemon.connect() as session:
        connection = session._connection.current()
        assert connection is not None
        call = connection.stream.submit(ping(0, bytes(MESSAGE_LIMIT)))
        answered = call.wait(PATIENCE_S)
        assert answered is not None and answered.error.kind == pb.ERROR_KIND_UNAVAILABLE
        assert f"more than {MESSAGE_LIMIT}" in answered.error.message
        assert eventually(lambda: session.state == "connected" and session.ping() is not None)


def test_a_stream_is_asked_for_after_hello(daemon: RunningDaemon) -> None:
    with connect_seqpacket(daemon.socket_dir / "handshake.sock") as connection:
        connection.send(hs.ClientPacket(direct_stream=hs.DirectStreamRequest()).SerializeToString())
        refused = hs.DaemonPacket.FromString(connection.recv(1 << 16)).refused
        assert refused.kind == pb.ERROR_KIND_UNAUTHENTICATED and "hello first" in refused.message


def test_to_ask_again_ends_the_stream_before_and_holds_no_more_descriptors(daemon: RunningDaemon) -> None:
    with RawClient(daemon.socket_dir, MODEL) as raw:
        first = RawStream(raw)
        assert first.ask(ping(1)) is not None
        before = daemon.descriptors()
        streams = [RawStream(raw) for _ in range(50)]
        assert first.answer() is None
        answer = streams[-1].ask(ping(2))
        assert answer is not None and answer.request_id == 2
        assert all(stream.answer() is None for stream in streams[:-1])
        assert eventually(lambda: daemon.descriptors() <= before)


def test_a_flood_of_one_client_keeps_no_other_waiting(daemon: RunningDaemon) -> None:
    """The client sends without ever reading: the daemon stops taking its requests, and nothing is held for it without
    end.
    """
    with RawClient(daemon.socket_dir, MODEL) as raw, daemon.connect() as session:
        flood = RawStream(raw)
        flood.socket.settimeout(1.0)
        data, sent = b"".join(frame(ping(i, bytes(4096)).SerializeToString()) for i in range(1, 257)), 0
        with pytest.raises(TimeoutError):
            while sent < 256 << 20:
                sent += flood.socket.send(data[sent % len(data) :])
        assert sent < 8 << 20, "what sockets and buffers hold"
        for _ in range(20):
            assert session.ping() is not None


def test_a_client_that_never_pauses_keeps_no_other_waiting(daemon: RunningDaemon) -> None:
    """The client has hundreds of requests on the way at any time, and reads what comes."""
    is_over = threading.Event()
    with RawClient(daemon.socket_dir, MODEL) as raw, daemon.connect() as session:
        flood = RawStream(raw)
        data = b"".join(frame(ping(i).SerializeToString()) for i in range(1, 1025))

        def send() -> None:
            with contextlib.suppress(OSError):
                while not is_over.is_set():
                    flood.socket.sendall(data)

        def read() -> None:
            with contextlib.suppress(OSError):
                while flood.socket.recv(1 << 16):
                    pass

        threads = [threading.Thread(target=target, daemon=True) for target in (send, read)]
        for thread in threads:
            thread.start()
        try:
            for _ in range(50):
                assert session.ping(deadline_s=PATIENCE_S) is not None
        finally:
            is_over.set()
            flood.socket.shutdown(socket.SHUT_RDWR)
            for thread in threads:
                thread.join(PATIENCE_S)


def test_a_stream_ends_with_its_handshake(daemon: RunningDaemon) -> None:
    raw = RawClient(daemon.socket_dir, MODEL)
    stream = RawStream(raw)
    assert stream.ask(ping(1)) is not None
    raw.connection.close()
    assert stream.answer() is None
