"""An empty stream echo: the daemon's kind of server and the client's kind of stream, with no logic between them.

The server (a child process) hands each message back as the bytes it came in; a request and its response share the
number of `request_id`, so the client's own `Stream` takes the echo for an answer. What remains is gRPC, the sockets
and the waking of threads: the least that any call on a stream can cost on this machine.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import tempfile
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import grpc

from kvstore_client.stream import METHOD, Stream
from kvstore_proto.v1 import kvstore_pb2 as wire

START_TIMEOUT_S = 20.0


class EchoClient:
    """`ping()` is one round trip of an empty message."""

    def __init__(self, path: Path) -> None:
        self._stream = Stream(path, b"", on_end=lambda reason: None, on_answer=lambda: None, unreleased=deque())

    def ping(self) -> None:
        answer = self._stream.submit(wire.Request(ping=wire.Ping())).wait(10.0)
        if answer is None or answer.HasField("error"):
            raise RuntimeError(f"the echo did not come back: {answer}")

    def close(self) -> None:
        self._stream.close()


@contextmanager
def echo() -> Iterator[EchoClient]:
    """A client of an echo server that lives as long as the context."""
    spawning = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="kvecho-") as directory:
        path, ready = Path(directory) / "echo.sock", spawning.Event()
        server = spawning.Process(target=_serve, args=(path, ready), daemon=True)
        server.start()
        try:
            if not ready.wait(START_TIMEOUT_S):
                raise SystemExit("the echo server did not start")
            client = EchoClient(path)
            try:
                yield client
            finally:
                client.close()
        finally:
            server.terminate()
            server.join()


def _serve(path: Path, ready: Event) -> None:
    asyncio.run(_serve_until_killed(path, ready))


async def _serve_until_killed(path: Path, ready: Event) -> None:
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
