"""Bad input on the wire: each is answered with an error text, affects no other client, and leaves nothing behind."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from kvstore_proto.framing import frame
from kvstore_proto.v1 import handshake_pb2 as hs
from kvstore_proto.v1 import kvstore_pb2 as pb
from tests.reference.conversations import model, payloads_of, tokens_of
from tests.reference.raw_client import RawClient, connect_seqpacket
from tests.reference.running_daemon import RunningDaemon, eventually, running_daemon

MODEL = model()
MAX_KEYS = 128


@pytest.fixture(scope="module")
def daemon() -> Iterator[RunningDaemon]:
    with running_daemon(f"limits.max_keys={MAX_KEYS}", "limits.max_clients=24", "nvme.enabled=false") as running:
        yield running


@pytest.fixture
def client(daemon: RunningDaemon) -> Iterator[RawClient]:
    with RawClient(daemon.socket_dir, MODEL) as raw:
        yield raw


@pytest.fixture(autouse=True)
def nothing_is_left_behind(daemon: RunningDaemon) -> Iterator[None]:
    yield
    assert eventually(lambda: daemon.status().leases == 0), "leases outlive their client"
    assert "Traceback" not in daemon.log, daemon.log


def error_of(response: pb.Response) -> tuple[int, str]:
    assert response.HasField("error"), response
    return response.error.kind, response.error.message


def lookup_of(keys: bytes, **fields: int) -> pb.Lookup:
    return pb.Lookup(sets=[pb.KeySet(keys=keys, **fields)])


# Whole requests


@pytest.mark.parametrize(
    ("request_fields", "kind", "says"),
    [
        ({"request_id": 0, "ping": pb.Ping()}, pb.ERROR_KIND_INVALID, "must not be 0"),
        ({}, pb.ERROR_KIND_INVALID, "does not know"),
        ({"lookup": lookup_of(b"x" * 17)}, pb.ERROR_KIND_INVALID, "16 bytes each"),
        ({"lookup": lookup_of(bytes(16 * (MAX_KEYS + 1)))}, pb.ERROR_KIND_TOO_LARGE, f"limit is {MAX_KEYS}"),
        (
            {"lookup": pb.Lookup(sets=[pb.KeySet(keys=bytes(16 * MAX_KEYS)), pb.KeySet(keys=bytes(16))])},
            pb.ERROR_KIND_TOO_LARGE,
            f"limit is {MAX_KEYS}",
        ),
        ({"lookup": lookup_of(b"x" * 16, group=9)}, pb.ERROR_KIND_INVALID, "layer group 9"),
        ({"acquire": pb.Acquire(set=pb.KeySet(keys=b"x" * 31))}, pb.ERROR_KIND_INVALID, "16 bytes each"),
        ({"acquire": pb.Acquire(set=pb.KeySet(keys=b"x" * 16, group=1))}, pb.ERROR_KIND_INVALID, "layer group 1"),
        ({"prefetch": pb.Prefetch(set=pb.KeySet(keys=b"x"))}, pb.ERROR_KIND_INVALID, "16 bytes each"),
        ({"touch": pb.Touch(set=pb.KeySet(keys=b"x"))}, pb.ERROR_KIND_INVALID, "16 bytes each"),
        ({"store": pb.Store(keys=bytes(16 * (MAX_KEYS + 1)))}, pb.ERROR_KIND_TOO_LARGE, f"limit is {MAX_KEYS}"),
    ],
)
def test_a_wrong_request_is_answered_and_the_stream_goes_on(
    client: RawClient, request_fields: dict[str, object], kind: int, says: str
) -> None:
    found_kind, message = error_of(client.ask(**request_fields))
    assert (found_kind, says in message) == (kind, True), message
    assert client.ask(ping=pb.Ping(payload=b"still here")).ping.payload == b"still here"


def test_a_message_over_the_limit_ends_the_stream_not_the_session(client: RawClient) -> None:
    client.open_stream()
    with pytest.raises(grpc.RpcError) as caught:
        client.ask(ping=pb.Ping(payload=bytes(3 << 20)))
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    client.end_stream()
    assert client.ask(ping=pb.Ping()).HasField("ping")


# Keys


def test_unknown_keys_are_misses_and_duplicates_are_answered_each(client: RawClient, daemon: RunningDaemon) -> None:
    tokens = tokens_of(1, 2)
    with daemon.connect() as session:
        session.put(tokens, payloads=payloads_of(1, 2, MODEL))
    first, second = client.keys(tokens)
    reply = client.ask(lookup=lookup_of(first + first + b"?" * 16 + second)).lookup.sets[0]
    assert (reply.usable_blocks, list(reply.tiers)) == (2, [2, 2, 0, 2])
    assert reply.miss_reason == pb.MISS_REASON_NEVER_STORED
    held = client.ask(acquire=pb.Acquire(set=pb.KeySet(keys=first + first))).acquire
    assert held.blocks == 2 and held.offsets[0] == held.offsets[1]
    assert client.ask(release=pb.Release(lease_ids=[held.lease_id, held.lease_id])).release.released == 1


def test_an_unknown_match_counts_as_prefix(client: RawClient, daemon: RunningDaemon) -> None:
    tokens = tokens_of(2, 1)
    with daemon.connect() as session:
        session.put(tokens, payloads=payloads_of(2, 1, MODEL))
    request = pb.KeySet(keys=b"?" * 16 + client.keys(tokens).packed, window_blocks=1)
    request.match = 7  # type: ignore[assignment]  # a newer client's
    assert client.ask(lookup=pb.Lookup(sets=[request])).lookup.sets[0].usable_blocks == 0


# Leases


def test_a_forged_lease_is_neither_renewed_nor_released(client: RawClient, daemon: RunningDaemon) -> None:
    tokens = tokens_of(8, 2)
    with daemon.connect() as session:
        session.put(tokens, payloads=payloads_of(8, 2, MODEL))
        with session.get(tokens) as lease:
            assert lease.valid
            ids = range(1, 2000)
            assert client.ask(touch=pb.Touch(lease_ids=ids)).touch.renewed == 0
            assert client.ask(release=pb.Release(lease_ids=ids)).release.released == 0
            assert daemon.status().leases == 1


# Sessions and the handshake socket


@pytest.mark.parametrize("token", [b"", b"forged-forged-16", bytes(16), b"x" * 5000])
def test_a_forged_token_opens_no_stream(client: RawClient, token: bytes) -> None:
    client.open_stream(token)
    with pytest.raises(grpc.RpcError) as caught:
        client.next_response()
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


def test_a_token_ends_with_its_handshake_connection(client: RawClient) -> None:
    assert client.ask(ping=pb.Ping()).HasField("ping")
    client.connection.close()
    with pytest.raises(grpc.RpcError):  # it may break off in the middle of a reply, so with any code
        client.next_response()
    client.end_stream()
    client.open_stream()
    with pytest.raises(grpc.RpcError) as caught:
        client.next_response()
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


@pytest.mark.parametrize("garbage", [b"\xff" * 40, b"\x0a\xff\xff\xff\xff\x7f", os.urandom(60_000), b"\x00"])
def test_garbage_on_the_handshake_socket_is_refused(daemon: RunningDaemon, garbage: bytes) -> None:
    with connect_seqpacket(daemon.socket_dir / "handshake.sock") as connection:
        connection.send(garbage)
        reply = hs.DaemonPacket.FromString(connection.recv(1 << 17))
        assert reply.refused.kind == pb.ERROR_KIND_INVALID
        assert connection.recv(10) == b""


def test_an_arena_before_hello_and_a_second_hello(daemon: RunningDaemon, client: RawClient) -> None:
    with connect_seqpacket(daemon.socket_dir / "handshake.sock") as connection:
        connection.send(hs.ClientPacket(arena=hs.ArenaRequest(arena_id=1)).SerializeToString())
        assert hs.DaemonPacket.FromString(connection.recv(1 << 17)).refused.kind == pb.ERROR_KIND_UNAUTHENTICATED
    hello = hs.Hello(protocol_version=1, fingerprint=MODEL.canonical())
    reply, _ = client.shake(hs.ClientPacket(hello=hello))
    assert "says hello once" in reply.refused.message
    reply, _ = client.shake(hs.ClientPacket(arena=hs.ArenaRequest(arena_id=10**6)))
    assert reply.refused.kind == pb.ERROR_KIND_NOT_FOUND
    assert client.ask(ping=pb.Ping()).HasField("ping"), "a wrong question does not cost the session"


@pytest.mark.parametrize(
    ("hello", "says"),
    [
        ({"protocol_version": 9}, "speaks protocol 9"),
        ({"fingerprint": b"{"}, "not JSON"),
        ({"fingerprint": b"[]"}, "wrong shape"),
        ({"fingerprint": b'{"groups": []}'}, "wrong shape"),
        ({"fingerprint": b"[" * 30_000}, "not JSON"),
        ({"fingerprint": MODEL.canonical().replace(b'"group_id":0', b'"group_id":1099511627776')}, "group"),
        ({"fingerprint": MODEL.canonical().replace(b'"weights"', b'""')}, "weights_digest is empty"),
    ],
)
def test_a_wrong_hello_is_refused_in_words(daemon: RunningDaemon, hello: dict[str, object], says: str) -> None:
    refusals = daemon.status().counters["sessions_refused"]
    with RawClient(daemon.socket_dir, MODEL, **hello) as client:
        assert client.refused is not None and says in client.refused.message
        assert client.refused.kind == pb.ERROR_KIND_INVALID
    assert daemon.status().counters["sessions_refused"] == refusals + 1


def test_many_refused_hellos_write_few_lines(daemon: RunningDaemon) -> None:
    before, refusals = daemon.log.count("refused pid"), daemon.status().counters["sessions_refused"]
    for _ in range(100):
        with RawClient(daemon.socket_dir, MODEL, protocol_version=9) as client:
            assert client.refused is not None
    assert daemon.status().counters["sessions_refused"] == refusals + 100
    assert daemon.log.count("refused pid") - before <= 60, "in three minutes at most"


@pytest.mark.parametrize("name", ["a\0b", "\N{PILE OF POO}" * 64, "two\nlines \x1b[31m", "x" * 60_000])
def test_a_strange_name_is_only_a_name(daemon: RunningDaemon, name: str) -> None:
    with RawClient(daemon.socket_dir, MODEL, client_name=name) as client:
        assert client.refused is None and client.staging_fd >= 0
        assert client.ask(ping=pb.Ping()).HasField("ping")
    assert name not in daemon.log


def test_refused_hellos_cost_no_staging(daemon: RunningDaemon) -> None:
    for _ in range(12):  # of 2 MiB each, from a pool of 8
        broken = MODEL.canonical().replace(b'"group_id":0', b'"group_id":70000')
        with RawClient(daemon.socket_dir, MODEL, staging_bytes=2 << 20, fingerprint=broken) as client:
            assert client.refused is not None
    with RawClient(daemon.socket_dir, MODEL, staging_bytes=2 << 20) as client:
        assert client.welcome.staging_bytes == 2 << 20


def test_clients_over_the_limit_are_refused_and_welcome_again_later(daemon: RunningDaemon) -> None:
    assert eventually(lambda: daemon.status().clients == 0)
    crowd = [RawClient(daemon.socket_dir, MODEL, staging_bytes=0) for _ in range(24)]
    assert all(client.refused is None for client in crowd)
    with RawClient(daemon.socket_dir, MODEL) as one_more:
        assert one_more.refused is not None and one_more.refused.kind == pb.ERROR_KIND_THROTTLED
    for client in crowd:
        client.close()
    assert eventually(lambda: daemon.status().clients == 0)
    with RawClient(daemon.socket_dir, MODEL) as later:
        assert later.refused is None


def kernel_refuses_descriptors() -> bool:
    """Return whether a Unix socket can have it so, from Linux 6.16 on."""
    with socket.socket(socket.AF_UNIX) as probe, contextlib.suppress(OSError):
        probe.setsockopt(socket.SOL_SOCKET, 83, 0)  # SO_PASSRIGHTS
        return True
    return False


def test_descriptors_sent_to_the_daemon_are_not_kept_and_refused_where_the_kernel_can(daemon: RunningDaemon) -> None:
    """A daemon that drops a TCP socket which lingers answers nobody for as long as the sender wants."""
    assert eventually(lambda: daemon.status().clients == 0)
    with RawClient(daemon.socket_dir, MODEL) as client:
        _, descriptor = client.shake(hs.ClientPacket(direct_stream=hs.DirectStreamRequest()))
        before = daemon.descriptors()
        packet = hs.ClientPacket(arena=hs.ArenaRequest(arena_id=10**6)).SerializeToString()
        ping = frame(pb.Request(request_id=1, ping=pb.Ping()).SerializeToString())
        with socket.socket(fileno=descriptor) as stream, open(os.devnull) as reading, open(os.devnull) as writing:
            for connection, data in ((client.connection, packet), (stream, ping)) * 10:
                with pytest.raises(PermissionError) if kernel_refuses_descriptors() else contextlib.nullcontext():
                    socket.send_fds(connection, [data], [reading.fileno(), writing.fileno()])
                    connection.recv(1 << 17)
            assert daemon.descriptors() <= before + 5, "40 were sent"


def test_a_clients_staging_memory_goes_with_it(daemon: RunningDaemon) -> None:
    def mapped() -> int:
        return Path(f"/proc/{daemon.pid}/maps").read_text().count("kvstored-staging")

    assert eventually(lambda: mapped() == 0)
    with RawClient(daemon.socket_dir, MODEL) as client:
        client.lend()
        assert client.store(client.keys(tokens_of(9, 1)), [1]) == [pb.STORE_STATUS_STORED]
        assert mapped() == 1
    assert eventually(lambda: mapped() == 0), "the memory of a client that is gone is still held"
