"""The HTTP process keeps for a client that does not read a bounded amount, and the engine hears of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import numpy as np
from starlette.requests import ClientDisconnect
from starlette.types import Message

from kvstore_engine.batching.events import Token
from kvstore_engine.sampler import SamplingSettings
from kvstore_engine.server import messages
from kvstore_engine.server.engine_client import EngineClient
from kvstore_engine.server.messages import Ask
from kvstore_engine.server.options import EngineOptions
from kvstore_engine.server.responses import ServerSentEvents, Step


def test_an_answer_that_is_not_read_is_given_up_and_one_that_is_read_is_not() -> None:
    """A client that does not read its stream: what waits for it is bounded, and the engine computes no more for it."""

    class Writer:
        written = b""

        def write(self, data: bytes) -> None:
            self.written += data

    async def run() -> None:
        client, writer = EngineClient(EngineOptions("m.gguf")), Writer()
        client.state, client._writer = "ready", writer  # type: ignore[assignment]  # it only writes
        asks = [Ask(name, np.array([1], np.int32), 1 << 20, SamplingSettings()) for name in ("a", "b", "c")]
        stuck, taken = client.submit(asks[:2]), client.submit(asks[2:])
        for number in range(20_000):
            client._deliver([Token(ask.id, 0, number, "x") for ask in asks])
            assert await taken.next() == [Token("c", 0, number, "x")]
            assert stuck._queue.qsize() <= 8192
        assert client.requests == 1
        assert await stuck.next() is None
        for name in ("a", "b"):
            assert messages.encode({"op": "cancel", "id": name}) in writer.written
        assert messages.encode({"op": "cancel", "id": "c"}) not in writer.written

    asyncio.run(run())


def test_a_stream_that_is_given_up_has_no_end_that_looks_whole() -> None:
    """The connection is cut by uvicorn without a last message of the body, and the client sees a broken transfer."""
    sent: list[Message] = []

    async def steps() -> AsyncGenerator[Step]:
        yield []

    async def events() -> AsyncGenerator[bytes]:
        yield b"data: {}\n\n"
        raise ClientDisconnect

    async def run() -> None:
        async def send(message: Message) -> None:
            sent.append(message)

        async def receive() -> Message:
            return {"type": "http.disconnect"}

        await ServerSentEvents(steps(), events())({"type": "http"}, receive, send)

    asyncio.run(run())
    assert [message["type"] for message in sent] == ["http.response.start", "http.response.body"]
    assert sent[-1]["more_body"]
