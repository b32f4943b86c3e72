"""An empty stream echo: the daemon's kind of server and the client's kind of stream, with no logic between them.

The server (a child process) hands each message back as the bytes it came in; a request and its response share the
number of `request_id`, so the client's own `RequestStream` takes the echo for an answer. What remains is the sockets,
the waking of threads and, on a gRPC stream, gRPC: the least that any call on this kind of stream can cost on this
machine.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import socket
import tempfile
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.synchronize import Event
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import grpc

from kvstore_client.stream import RequestStream
from kvstore_client.transport.base import Transport
from kvstore_client.transport.direct import DirectTransport
from kvstore_client.transport.over_grpc import METHOD, GrpcTransport
from kvstore_proto.v1 import kvstore_pb2 as wire

START_TIMEOUT_S = 20.0
Kind = Literal["direct", "grpc"]


class EchoClient:
    """`ping()` is one round trip of an empty message."""

    def __init__(self, transport: Transport) -> None:
        health = SimpleNamespace(answered=lambda: None, stream_ended=lambda reason: None)
        self._stream = RequestStream(transport, health, deque())  # type: ignore[arg-type]  # the part that a stream calls

    def ping(self) -> None:
        answer = self._stream.submit(wire.Request(ping=wire.Ping())).wait(10.0)
        if answer is None or answer.HasField("error"):
            raise RuntimeError(f"the echo did not come back: {answer}")

    def close(self) -> None:
        self._stream.close()


@contextmanager
def echo(kind: Kind = "direct") -> Iterator[EchoClient]:
    """A client of an echo server that lives as long as the context."""
    spawning = multiprocessing.get_context("spawn")
    serve, connect = _KINDS[kind]
    with tempfile.TemporaryDirectory(prefix="kvecho-") as directory:
        path, ready = Path(directory) / "echo.sock", spawning.Event()
        server = spawning.Process(target=serve, args=(path, ready), daemon=True)
        server.start()
        try:
            if not ready.wait(START_TIMEOUT_S):
                raise SystemExit("the echo server did not start")
            client = EchoClient(connect(path))
            try:
                yield client
            finally:
                client.close()
        finally:
            server.terminate()
            server.join()


class _HandBack(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._transport.write(data)


def _serve_direct(path: Path, ready: Event) -> None:
    async def until_killed() -> None:
        server = await asyncio.get_running_loop().create_unix_server(_HandBack, str(path))
        ready.set()
        await server.serve_forever()

    asyncio.run(until_killed())


def _connect_direct(path: Path) -> Transport:
    connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connected.connect(str(path))
    return DirectTransport(connected)


def _serve_grpc(path: Path, ready: Event) -> None:
    asyncio.run(_serve_grpc_until_killed(path, ready))


async def _serve_grpc_until_killed(path: Path, ready: Event) -> None:
    async def session(_: Any, context: Any) -> None:
        while (message := await context.read()) is not grpc.aio.EOF:
            await context.write(message)

    _, service, method = METHOD.split("/")
    server = grpc.aio.server()
    handler = grpc.method_handlers_generic_handler(service, {method: grpc.stream_stream_rpc_method_handler(session)})
    server.add_generic_rpc_handlers((handler,))
    server.add_insecure_port(f"unix:{path}")
    await server.start()
    ready.set()
    await server.wait_for_termination()


def _connect_grpc(path: Path) -> Transport:
    return GrpcTransport(path, b"")


_KINDS: dict[Kind, tuple[Callable[[Path, Event], None], Callable[[Path], Transport]]] = {
    "direct": (_serve_direct, _connect_direct),
    "grpc": (_serve_grpc, _connect_grpc),
}
