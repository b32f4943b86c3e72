"""Connections as clients should not use them: heads without end, silence, offers of other protocols, pipelines."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

pytest.importorskip("uvicorn", reason="the extra server is not installed")
pytest.importorskip("httptools", reason="the extra server is not installed")

from kvstore_engine.server import connection
from kvstore_engine.server.connection import HttpListener

_PATIENCE_S = 30.0
Application = Callable[[Any, Any, Any], Awaitable[None]]


class _Echo:
    """Answers with the body. A body of "wait" is never answered; `left` counts the clients that left meanwhile."""

    def __init__(self) -> None:
        self.waiting = self.left = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message.get("body", b""), message.get("more_body", False)
        if body == b"wait":
            self.waiting += 1
            assert (await receive())["type"] == "http.disconnect"
            self.left += 1
            return
        headers = [(b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})


@contextlib.asynccontextmanager
async def _listening(application: Application, connections: int = 64) -> AsyncIterator[tuple[int, HttpListener]]:
    with socket.create_server(("127.0.0.1", 0)) as bound:
        listener = HttpListener(application, bound, 1.0, connections)
        serving = asyncio.create_task(listener.run_until_stopped())
        yield bound.getsockname()[1], listener
        listener.should_exit = True
        await serving


async def _answer(port: int, *pieces: bytes) -> bytes:
    """Everything that the server says until it closes the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    with contextlib.suppress(ConnectionError):
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
    try:
        return await asyncio.wait_for(reader.read(), _PATIENCE_S)
    except ConnectionError:
        return b""
    finally:
        writer.close()


async def _echoed(*pieces: bytes) -> bytes:
    """Everything that an echo says to one client."""
    async with _listening(_Echo()) as (port, _):
        return await _answer(port, *pieces)


def _request(body: bytes, *lines: bytes) -> bytes:
    return b"\r\n".join([b"POST / HTTP/1.1", *lines, b"content-length: %d" % len(body), b"", body])


@pytest.mark.parametrize(
    "endless",
    [
        [b"GET / HTTP/1.1\r\nx: ", *[b"a" * 4096] * 100],
        [b"GET / HTTP/1.1\r\n", *[b"x: a\r\n" * 1000] * 100],
        [b"GET /", *[b"a" * 4096] * 100],
        [_request(b""), b"GET / HTTP/1.1\r\nx: ", *[b"a" * 4096] * 100],
        [b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n0\r\nx: ", *[b"a" * 4096] * 100],
    ],
    ids=["value", "headers", "path", "second request", "trailer"],
)
def test_a_head_without_end_ends_its_connection(endless: list[bytes]) -> None:
    assert b"200 OK\r\n\r\n" not in asyncio.run(_echoed(*endless))


@pytest.mark.parametrize("begin", [b"", b"\r\n", b"GET / HT"], ids=["nothing", "line", "half"])
def test_a_client_that_asks_for_nothing_is_not_kept(begin: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "HEAD_TIMEOUT_S", 0.05)
    assert asyncio.run(_echoed(begin)) == b""


def test_the_clock_runs_while_a_request_is_awaited_and_not_while_one_is_answered() -> None:
    echo = _Echo()

    async def run() -> None:
        async with _listening(echo) as (port, listener):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)

            def timers() -> list[asyncio.TimerHandle | None]:
                connections: set[Any] = listener.server_state.connections
                return [one._head_timer for one in connections]

            while not any(timers()):
                await asyncio.sleep(0)
            writer.write(_request(b""))
            await reader.readuntil(b"\r\n\r\n")
            assert timers() == [None]  # from here it is uvicorn's, until more comes
            writer.write(b"POST")
            while not any(timers()):
                await asyncio.sleep(0)
            writer.write(_request(b"wait").removeprefix(b"POST"))
            while not echo.waiting:
                await asyncio.sleep(0)
            assert timers() == [None]
            writer.close()

    asyncio.run(asyncio.wait_for(run(), _PATIENCE_S))


@pytest.mark.parametrize("size", [1, 10_000])
@pytest.mark.parametrize("is_chunked", [False, True])
def test_a_request_that_offers_another_protocol_keeps_its_body(size: int, is_chunked: bool) -> None:
    offer = [b"connection: Upgrade, HTTP2-Settings", b"upgrade: h2c", b"http2-settings: AAMA"]
    request = _request(b"hello", *offer)
    if is_chunked:
        chunks = [b"transfer-encoding: chunked", b"", b"2", b"he", b"3", b"llo", b"0", b"", b""]
        request = b"\r\n".join([b"POST / HTTP/1.1", *offer, *chunks])
    request += _request(b"again", b"connection: close")
    said = asyncio.run(_echoed(*(request[first : first + size] for first in range(0, len(request), size))))
    assert [part.partition(b"HTTP/1.1")[0] for part in said.split(b"\r\n\r\n")[1:]] == [b"hello", b"again"]


def test_offers_of_another_protocol_without_end_are_refused() -> None:
    request = _request(b"hello", b"connection: Upgrade", b"upgrade: h2c")
    assert b"HTTP/1.1 400 " in asyncio.run(_echoed(request * 12))


def test_requests_behind_another_one_end_with_their_client() -> None:
    echo = _Echo()

    async def run() -> None:
        async with _listening(echo) as (port, _):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(_request(b"wait") * 3)
            while not echo.waiting:
                await asyncio.sleep(0.01)
            writer.close()
            while not echo.left:
                await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(run(), _PATIENCE_S))
    assert (echo.waiting, echo.left) == (1, 1)


class _Flood:
    """Streams without end; `left` once its client has left."""

    def __init__(self) -> None:
        self.sent = 0
        self.left = asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await receive()

        async def watch() -> None:
            assert (await receive())["type"] == "http.disconnect"
            self.left.set()

        watcher = asyncio.create_task(watch())
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while not self.left.is_set():
            await send({"type": "http.response.body", "body": bytes(1 << 16), "more_body": True})
            self.sent += 1
            await asyncio.sleep(0)
        await watcher


def test_a_client_that_stops_reading_its_stream_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "WRITE_TIMEOUT_S", 0.1)
    flood = _Flood()

    async def run() -> None:
        async with _listening(flood) as (port, listener):
            with socket.create_connection(("127.0.0.1", port)) as client:  # never read
                client.sendall(_request(b""))
                await asyncio.wait_for(flood.left.wait(), _PATIENCE_S)
                assert not listener.server_state.connections

    asyncio.run(run())
    assert flood.sent < 1000, "a bounded number of pieces was held for it"


def test_a_client_that_reads_slowly_gets_it_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock is of single pauses, not of the whole answer."""
    size = 8 << 20
    timers: list[float] = []

    async def whole(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(size >> 16):
            await send({"type": "http.response.body", "body": bytes(1 << 16), "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    watch = connection.HttpConnection._watch_the_write_clock
    monkeypatch.setattr(
        connection.HttpConnection, "_watch_the_write_clock", lambda self: (timers.append(1.0), watch(self))[1]
    )

    async def run() -> None:
        async with _listening(whole) as (port, listener):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(_request(b""))
            await reader.readuntil(b"\r\n\r\n")
            got = 0
            while got < size:
                got += len(await asyncio.wait_for(reader.read(1 << 14), _PATIENCE_S))
            connections: set[Any] = listener.server_state.connections
            assert [one._write_timer for one in connections] == [None]
            writer.close()

    asyncio.run(run())
    assert timers, "it was slow enough to be waited for"


def test_what_a_client_has_not_taken_when_its_connection_ends_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """A whole answer, smaller than what makes uvicorn pause, is in the buffers of one that does not read."""
    monkeypatch.setattr(connection, "WRITE_TIMEOUT_S", 0.1)
    aborted = asyncio.Event()

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"connection", b"close")]})
        await send({"type": "http.response.body", "body": bytes(16 << 20)})

    lost = connection.HttpConnection.connection_lost

    def connection_lost(self: Any, exc: Exception | None) -> None:
        lost(self, exc)
        aborted.set()

    monkeypatch.setattr(connection.HttpConnection, "connection_lost", connection_lost)

    async def run() -> None:
        async with _listening(answer) as (port, _):
            with socket.create_connection(("127.0.0.1", port)) as client:
                client.sendall(_request(b""))
                await asyncio.wait_for(aborted.wait(), _PATIENCE_S)

    asyncio.run(run())


def test_what_is_not_http_gets_status_400() -> None:
    async def run() -> None:
        async with _listening(_Echo()) as (port, _):
            for raw in (b"NONSENSE\r\n\r\n", b"CONNECT a:80 HTTP/1.1\r\n\r\n", b"GET /\xff HTTP/1.1\r\n\r\n"):
                assert (await _answer(port, raw)).startswith(b"HTTP/1.1 400 ")

    asyncio.run(run())


@pytest.mark.parametrize("begin", [b"", b"GET / HT", _request(b"")], ids=["nothing", "half", "answered"])
def test_connections_that_ask_for_nothing_keep_nobody_out(begin: bytes) -> None:
    most = 8

    async def run() -> None:
        echo = _Echo()
        async with _listening(echo, most) as (port, listener):
            _, waits = await asyncio.open_connection("127.0.0.1", port)
            waits.write(_request(b"wait"))
            while not echo.waiting:
                await asyncio.sleep(0)
            idle = []
            for _ in range(5 * most):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(begin)
                idle.append((reader, writer))
            assert b"hello" in await _answer(port, _request(b"hello", b"connection: close"))
            assert len(listener.server_state.connections) <= most
            assert echo.left == 0, "one that waits for its answer stays"
            for _, writer in [*idle, (None, waits)]:
                writer.close()

    asyncio.run(run())


def test_where_all_wait_for_answers_a_newcomer_is_closed() -> None:
    async def run() -> None:
        echo = _Echo()
        async with _listening(echo, 2) as (port, _):
            writers = []
            for number in (1, 2):
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(_request(b"wait"))
                writers.append(writer)
                while echo.waiting < number:
                    await asyncio.sleep(0)
            assert await _answer(port, _request(b"hello")) == b""
            assert echo.left == 0
            for writer in writers:
                writer.close()

    asyncio.run(run())
