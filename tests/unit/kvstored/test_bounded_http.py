"""The HTTP server of /metrics: what it answers, and what a peer that does not behave costs."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest

from kvstored.admin import metrics_endpoint
from kvstored.admin.metrics_endpoint import MAX_HEAD_BYTES, BoundedHttp
from tests.reference.running_daemon import eventually

MOST = 4


def application(request: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
    if request["PATH_INFO"] == "/wrong":
        raise RuntimeError
    start("200 OK", [("Content-Type", "text/plain")])
    size = 50_000_000 if request["PATH_INFO"] == "/large" else 0
    return [request["HTTP_ACCEPT"].encode() + b" " + request["QUERY_STRING"].encode() + bytes(size)]


@pytest.fixture
def port() -> Iterator[int]:
    listener = socket.create_server(("127.0.0.1", 0), backlog=MOST)
    server = BoundedHttp(listener, application, MOST)
    yield int(listener.getsockname()[1])
    server.close()


def connected(port: int, says: bytes = b"") -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port), 10)
    connection.sendall(says)
    return connection


def answer_to(port: int, says: bytes) -> bytes:
    with connected(port, says) as connection:
        return b"".join(iter(lambda: connection.recv(1 << 16), b""))


def asking(path: str, method: str = "GET") -> bytes:
    return f"{method} {path} HTTP/1.1\r\nHost: x\r\nAccept: text/plain\r\n\r\n".encode()


@pytest.mark.parametrize(
    ("says", "begins", "ends"),
    [
        (asking("/metrics?a=1"), b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n", b"\r\n\r\ntext/plain a=1"),
        (asking("/metrics", "HEAD"), b"HTTP/1.1 200 OK\r\n", b"Connection: close\r\n\r\n"),
        (b"GET /\r\n\r\n", b"HTTP/1.1 400 ", b"\r\n\r\n"),
        (b"\x16\x03\x01 \x00 \x00\r\n\r\n", b"HTTP/1.1 400 ", b"\r\n\r\n"),
        (asking("/" + "x" * MAX_HEAD_BYTES), b"HTTP/1.1 431 ", b"\r\n\r\n"),
        (asking("/wrong"), b"HTTP/1.1 500 ", b"\r\n\r\n"),
    ],
)  # fmt: skip
def test_requests_and_what_is_none(port: int, says: bytes, begins: bytes, ends: bytes) -> None:
    answer = answer_to(port, says)
    assert answer.startswith(begins) and answer.endswith(ends)


@pytest.mark.parametrize("says", [b"", b"G", b"GET /metrics HTTP/1.1\r\n", b"GET /metrics HTTP/1.1\r\nHost: x\r\n"])
def test_half_open_connections_keep_nobody_out(port: int, says: bytes) -> None:
    strangers = [connected(port, says) for _ in range(10 * MOST)]
    assert answer_to(port, asking("/metrics")).startswith(b"HTTP/1.1 200")
    for each in strangers:
        each.close()


@pytest.mark.parametrize(("limit", "says"), [("REQUEST_S", b"GET /"), ("ANSWER_S", asking("/large"))])
def test_a_peer_that_waits_is_cut_off(port: int, limit: str, says: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_endpoint, limit, 0.05)
    with connected(port, says) as connection:

        def is_cut_off() -> bool:
            """Return whether the server cut a client off: to write shows it; to read would be to behave."""
            try:
                connection.send(b"x")
            except OSError:
                return True
            return False

        assert eventually(is_cut_off)
