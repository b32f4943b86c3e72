"""Callers over a Unix socket and over TCP: tokens, tenants that never meet, TLS, what a stranger gets to hear."""

from __future__ import annotations

import hashlib
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from kvstore_proto.v1 import admin_pb2
from kvstore_proto.v1 import kvstore_pb2 as kv
from kvstore_proto.v1 import unary_pb2 as pb
from tests.reference.conversations import model, payloads_of, tokens_of
from tests.reference.running_daemon import DaemonDied, RunningDaemon, free_port, running_daemon
from tests.reference.unary_client import by_tokens, names, unary_client

MODEL = model()
TOKENS = {"alpha": "correct horse", "beta": "battery staple"}
TENANTS = "".join(f'[[tenant]]\nname = "{name}"\n' for name in TOKENS)
STRANGERS = [None, "", "wrong", "correct hors", "correct horse2"]


def write_tokens(path: Path) -> Path:
    lines = [f"{name} {hashlib.sha256(token.encode()).hexdigest()}\n" for name, token in TOKENS.items()]
    path.touch(0o600)
    path.write_text("# tenant, SHA-256 of its token\n" + "".join(lines))
    return path


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("callers")
    write_tokens(directory / "tokens")
    (directory / "kvstored.toml").write_text(TENANTS)
    return directory


@pytest.fixture(scope="module")
def port() -> int:
    return free_port()


@pytest.fixture(scope="module")
def daemon(place: Path, port: int) -> Iterator[RunningDaemon]:
    settings = (f"unary.listen=127.0.0.1:{port}", f"unary.tokens_file={place / 'tokens'}")
    with running_daemon(*settings, config=place / "kvstored.toml") as running:
        yield running


@pytest.fixture(params=["tcp", "unix"])
def target(request: pytest.FixtureRequest, daemon: RunningDaemon, port: int) -> str:
    return f"127.0.0.1:{port}" if request.param == "tcp" else f"unix:{daemon.socket_dir}/unary.sock"


def test_two_tenants_never_see_each_others_bytes(target: str) -> None:
    number = 1 if target.startswith("unix") else 2
    chain = by_tokens(MODEL, tokens_of(number, 2))
    payloads = payloads_of(number, 2, MODEL)
    with unary_client(target, TOKENS["alpha"]) as alpha, unary_client(target, TOKENS["beta"]) as beta:
        stored = alpha.put(chain, payloads)
        assert names(stored.statuses) == ["STORED"] * 2
        for stolen in (chain, pb.Chain(keys=stored.keys)):  # the very keys do not help, either
            assert names(beta.lookup(stolen).statuses) == ["MISS"] * 2
            assert not beta.get(stolen).payloads
            assert names(beta.prefetch(stolen).statuses) == ["MISS"] * 2
            assert names(beta.delete(stolen).statuses) == ["MISS"] * 2
        assert beta.lookup(chain).keys != stored.keys
        assert names(beta.put(chain, payloads[::-1]).statuses) == ["STORED"] * 2
        assert names(beta.delete(chain).statuses) == ["DELETED"] * 2
        assert list(alpha.get(chain).payloads) == [payload.tobytes() for payload in payloads]


def test_two_tenants_may_use_the_same_names(daemon: RunningDaemon, target: str) -> None:
    chain = pb.Chain(object=target, object_blocks=2)
    with unary_client(target, TOKENS["alpha"]) as alpha, unary_client(target, TOKENS["beta"]) as beta:
        assert names(alpha.put(chain, [b"alpha", b"one"]).statuses) == ["STORED"] * 2
        assert names(beta.put(chain, [b"beta", b"two"]).statuses) == ["STORED"] * 2
        daemon.drop("host")  # NVMe knows blocks by their keys alone
        assert list(alpha.get(chain).payloads) == [b"alpha", b"one"]
        assert list(beta.get(chain).payloads) == [b"beta", b"two"]
        assert names(beta.delete(chain).statuses) == ["DELETED"] * 2
        assert list(alpha.get(chain).payloads) == [b"alpha", b"one"]


def test_the_same_tenant_by_either_way(daemon: RunningDaemon, port: int) -> None:
    chain = by_tokens(MODEL, tokens_of(3, 1))
    with unary_client(f"127.0.0.1:{port}", TOKENS["alpha"]) as remote:
        remote.put(chain, payloads_of(3, 1, MODEL))
    with unary_client(f"unix:{daemon.socket_dir}/unary.sock", TOKENS["alpha"]) as local:
        assert names(local.lookup(chain).statuses) == ["PRESENT"]
    with unary_client(f"unix:{daemon.socket_dir}/unary.sock") as own_user:
        assert names(own_user.lookup(chain).statuses) == ["MISS"], "without a token it is the daemon's own user"
    blocks = daemon.ask("Blocks", admin_pb2.BlocksRequest(tenant="alpha", limit=100)).blocks
    assert blocks


@pytest.mark.parametrize("token", STRANGERS)
@pytest.mark.parametrize("method", ["Lookup", "Put", "Get", "Prefetch", "Touch", "Delete"])
def test_a_stranger_is_turned_away(port: int, daemon: RunningDaemon, token: str | None, method: str) -> None:
    with unary_client(f"127.0.0.1:{port}", token) as client, pytest.raises(grpc.RpcError) as caught:
        client.ask(method, getattr(pb, f"Unary{method}Request")())
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
    said = caught.value.details()
    assert ("authorization: Bearer" if token is None else "the token is not known") in said
    assert not any(secret in daemon.log for secret in TOKENS.values())


def test_another_scheme_than_bearer_is_no_token(port: int, daemon: RunningDaemon) -> None:
    with unary_client(f"127.0.0.1:{port}") as client, pytest.raises(grpc.RpcError) as caught:
        client.stub.Lookup(
            pb.UnaryLookupRequest(), timeout=60, metadata=(("authorization", f"Basic {TOKENS['alpha']}"),)
        )
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


def test_a_wrong_token_is_refused_on_the_socket_too(daemon: RunningDaemon) -> None:
    with (
        unary_client(f"unix:{daemon.socket_dir}/unary.sock", "wrong") as client,
        pytest.raises(grpc.RpcError) as caught,
    ):
        client.lookup(pb.Chain())
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
    kinds = {item.key: item.value for item in caught.value.trailing_metadata()}
    assert kinds["kvstored-error-kind"] == "UNAUTHENTICATED"


def test_a_stranger_is_turned_away_before_its_message_is_read(port: int, daemon: RunningDaemon) -> None:
    """Else anybody could have the daemon hold unary.message bytes for each connection."""
    payload = bytes(64 << 20)  # over the limit as well: had it been read, the answer would say so
    with unary_client(f"127.0.0.1:{port}", "wrong") as client, pytest.raises(grpc.RpcError) as caught:
        client.put(pb.Chain(object="x"), [payload])
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


def test_a_token_without_a_tokens_file_is_refused_and_not_passed_over() -> None:
    with (
        running_daemon("nvme.enabled=false") as plain,
        unary_client(f"unix:{plain.socket_dir}/unary.sock", "x") as client,
        pytest.raises(grpc.RpcError) as caught,
    ):
        client.lookup(pb.Chain())
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert "unary.tokens_file" in caught.value.details()


def test_the_daemons_user_needs_a_tenant_like_anybody() -> None:
    with (
        running_daemon("nvme.enabled=false", "tenants.default=refuse") as strict,
        unary_client(f"unix:{strict.socket_dir}/unary.sock") as client,
        pytest.raises(grpc.RpcError) as caught,
    ):
        client.lookup(pb.Chain())
    assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED
    assert "[[tenant]] uids" in caught.value.details()


def reflected(channel: grpc.Channel, metadata: Any = ()) -> set[str]:
    stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
    asked = reflection_pb2.ServerReflectionRequest(list_services="")
    answers = stub.ServerReflectionInfo(iter([asked]), timeout=60, metadata=metadata)
    return {service.name for answer in answers for service in answer.list_services_response.service}


def test_over_tcp_health_and_reflection_need_a_token_and_on_the_unix_socket_none(
    daemon: RunningDaemon, port: int
) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        health: Any = health_pb2_grpc.HealthStub(channel)
        asked = health_pb2.HealthCheckRequest(service="kvstore.v1.KVStoreUnary")
        with pytest.raises(grpc.RpcError) as refused:
            health.Check(asked, timeout=60)
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
        reply = health.Check(asked, timeout=60, metadata=(("authorization", f"Bearer {TOKENS['beta']}"),))
        assert reply.status == health_pb2.HealthCheckResponse.SERVING
        with pytest.raises(grpc.RpcError) as caught:
            reflected(channel)
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        bearer = (("authorization", f"Bearer {TOKENS['beta']}"),)
        assert "kvstore.v1.KVStoreUnary" in reflected(channel, bearer)
    with grpc.insecure_channel(f"unix:{daemon.socket_dir}/unary.sock") as channel:
        assert health_pb2_grpc.HealthStub(channel).Check(asked, timeout=60).status == reply.status
        assert reflected(channel) >= {"kvstore.v1.KVStoreUnary", "grpc.health.v1.Health"}


def test_tls(place: Path) -> None:
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("openssl is not installed: no certificate can be made")
    certificate, secret = place / "cert.pem", place / "key.pem"
    subprocess.run(
        [openssl, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost",
         "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1", "-keyout", secret, "-out", certificate],
        check=True, capture_output=True,
    )  # fmt: skip
    port = free_port()
    settings = (
        f"unary.listen=127.0.0.1:{port}", f"unary.tokens_file={place / 'tokens'}",
        f"unary.tls_cert={certificate}", f"unary.tls_key={secret}", "nvme.enabled=false",
    )  # fmt: skip
    with running_daemon(*settings, config=place / "kvstored.toml"):
        trusted = grpc.ssl_channel_credentials(certificate.read_bytes())
        with unary_client(f"localhost:{port}", TOKENS["alpha"], trusted) as client:
            assert names(client.put(pb.Chain(object="x"), [b"x"]).statuses) == ["STORED"]
            assert list(client.put(pb.Chain(object="x"), [b"x"]).durability) == [kv.DURABILITY_VOLATILE]
        with unary_client(f"localhost:{port}", TOKENS["alpha"]) as plain, pytest.raises(grpc.RpcError) as caught:
            plain.lookup(pb.Chain())
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (["unary.tokens_file={place}/absent"], "cannot read"),
        (["unary.tokens_file={place}/open"], "chmod 600"),
        (["unary.tokens_file={place}/tokens", "unary.listen=127.0.0.1:{taken}"], "cannot listen on 127.0.0.1"),
        (
            ["unary.tokens_file={place}/tokens", "unary.listen=127.0.0.1:{port}",
             "unary.tls_cert={place}/tokens", "unary.tls_key={place}/tokens"],
            "do not make a pair",
        ),
        (
            ["unary.tokens_file={place}/tokens", "unary.listen=127.0.0.1:{port}",
             "unary.tls_cert={place}/absent", "unary.tls_key={place}/absent"],
            "cannot be read",
        ),
    ],
    ids=["absent", "open to others", "taken port", "not a pair", "no certificate"],
)  # fmt: skip
def test_what_cannot_be_used_stops_the_start_with_one_line(place: Path, settings: list[str], says: str) -> None:
    write_tokens(place / "open")
    (place / "open").chmod(0o644)
    with closing(socket.socket()) as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        known = {"place": place, "taken": busy.getsockname()[1], "port": free_port()}
        chosen = [setting.format(**known) for setting in settings]
        with (
            pytest.raises(DaemonDied, match="exit status 2") as caught,
            running_daemon(*chosen, "nvme.enabled=false", config=place / "kvstored.toml"),
        ):
            pytest.fail("it started")
    last = str(caught.value).strip().splitlines()[-1]
    assert last.startswith("kvstored: ") and says in last
    assert "Traceback" not in str(caught.value)
