"""Tokens that go from the scheduler's socket straight to the client's: the stream is the one that ASGI would send."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest

pytest.importorskip("uvicorn", reason="the extra server is not installed")
pytest.importorskip("httptools", reason="the extra server is not installed")

from kvstore_engine.batching.events import Event, Finished, Token, Usage
from kvstore_engine.server import engine_client, messages
from kvstore_engine.server.app import application
from kvstore_engine.server.connection import DirectWriter, HttpListener
from kvstore_engine.server.engine_client import EngineClient
from kvstore_engine.server.keys import KeyRing
from kvstore_engine.server.metrics import Metrics
from kvstore_engine.server.options import EngineOptions
from kvstore_engine.server.renderers import Renderer
from kvstore_engine.server.service import ServedModel, Service
from tests.reference.tiny_llama import write_tiny_llama

_ANSWERS = 2
_ASKS = {
    "/v1/completions": {"prompt": "the", "n": _ANSWERS},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "the"}], "n": _ANSWERS},
}


class _Scheduler:
    """The other end of the engine's socket: it answers as the test says."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def asked(self) -> str:
        """Return the id of the next request."""
        header, blob = messages.lengths(await self._reader.readexactly(messages.LENGTHS.size))
        raw = await self._reader.readexactly(header + blob)
        name: str = json.loads(raw[:header])["id"]
        return name

    def send(self, *events: Event) -> None:
        for header in messages.events_headers(events):
            self._writer.write(messages.encode(header))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    return ServedModel.open(write_tiny_llama(tmp_path_factory.mktemp("model") / "tiny.gguf"), "tiny", ())


@contextlib.asynccontextmanager
async def _serving(model: ServedModel) -> AsyncIterator[tuple[int, _Scheduler]]:
    """A server over an engine that is one end of a socket; the other end is given with the server's port."""
    ours, theirs = socket.socketpair()
    client = EngineClient(EngineOptions("m.gguf"))
    loop = asyncio.get_running_loop()
    frames = lambda: engine_client._Frames(client._deliver)  # noqa: E731
    client._writer, client._frames = await loop.create_connection(frames, sock=ours)
    client.state, client.context = "ready", 4096
    service = Service(model, client, KeyRing(None), Metrics(), 1 << 20)
    with socket.create_server(("127.0.0.1", 0)) as bound:
        listener = HttpListener(application(service), bound, 1.0)
        serving = asyncio.create_task(listener.run_until_stopped())
        yield bound.getsockname()[1], _Scheduler(*await asyncio.open_connection(sock=theirs))
        listener.should_exit = True
        await serving
        await client.close()


async def _post(port: int, path: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    body = json.dumps({**_ASKS[path], "stream": True}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    return reader, writer


def _read(raw: bytes) -> list[Any]:
    """Return the chunks of a stream; the transfer's own chunks and its end are checked."""
    head, _, rest = raw.partition(b"\r\n\r\n")
    assert b" 200 " in head.split(b"\r\n")[0]
    body = b""
    while True:
        size, _, rest = rest.partition(b"\r\n")
        if not int(size, 16):
            break
        body, rest = body + rest[: int(size, 16)], rest[int(size, 16) + 2 :]
    lines = [line.removeprefix("data: ") for line in body.decode().split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def _steps(name: str, texts: list[str]) -> list[list[Event]]:
    tokens: list[list[Event]] = [
        [Token(name, index, number, f"{text}{index}") for index in range(_ANSWERS)] for number, text in enumerate(texts)
    ]
    return [*tokens, [Finished(name, index, "length", Usage(), "", "!") for index in range(_ANSWERS)]]


def _texts(path: str, chunks: list[Any]) -> list[str]:
    found = ["" for _ in range(_ANSWERS)]
    for chunk in chunks:
        (choice,) = chunk["choices"]
        found[choice["index"]] += choice["text"] if "text" in choice else choice["delta"].get("content", "")
    return found


@pytest.mark.parametrize("path", list(_ASKS))
def test_a_stream_is_the_same_whether_its_steps_come_together_or_one_by_one(
    path: str, model: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts, written = ['a"', "", "é\n", "𝄞", "\x00text"], []
    write = DirectWriter.write
    monkeypatch.setattr(DirectWriter, "write", lambda self, body: (written.append(body), write(self, body))[1])

    async def answer(pause_s: float) -> list[Any]:
        async with _serving(model) as (port, scheduler):
            reader, writer = await _post(port, path)
            for step in _steps(await scheduler.asked(), texts):
                scheduler.send(*step)
                await asyncio.sleep(pause_s)
            raw = await reader.read()
            writer.close()
        return [{**chunk, "id": "", "created": 0} for chunk in _read(raw)]

    one_by_one = asyncio.run(answer(0.02))
    assert len(written) >= len(texts) - 2, "the steps behind the first, but for the one without text"
    assert _texts(path, one_by_one) == ["".join(f"{text}{index}" for text in texts) + "!" for index in range(_ANSWERS)]
    monkeypatch.setattr(DirectWriter, "is_ready", False)
    assert asyncio.run(answer(0.0)) == one_by_one


def test_a_client_that_pauses_gets_every_token_once_and_in_order(model: ServedModel) -> None:
    """Tokens that its socket does not take wait in the queue, and later ones wait behind them."""
    path, letters = "/v1/completions", 800

    async def run() -> list[str]:
        async with _serving(model) as (port, scheduler):
            reader, writer = await _post(port, path)
            for step in _steps(await scheduler.asked(), [f"<{number}{'x' * 4000}>" for number in range(letters)]):
                scheduler.send(*step)
                await asyncio.sleep(0)
            raw = await reader.read()
            writer.close()
        return _texts(path, _read(raw))

    for index, text in enumerate(asyncio.run(run())):
        assert text == "".join(f"<{number}{'x' * 4000}>{index}" for number in range(letters)) + "!"


def test_a_step_that_cannot_be_written_ends_its_answer_with_the_error_alone(
    model: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> list[Any]:
        async with _serving(model) as (port, scheduler):
            reader, writer = await _post(port, "/v1/completions")
            first, second, *_ = _steps(await scheduler.asked(), ["a", "b"])
            scheduler.send(*first)
            await reader.readuntil(b"a1")
            monkeypatch.setattr(Renderer, "text_event", lambda *_: 1 / 0)
            scheduler.send(*second)
            rest = await reader.read()
            writer.close()
            _, other = await _post(port, "/v1/completions")
            await scheduler.asked()  # of the cancelled request first
            other.close()
        lines = [line for line in rest.split(b"\n\n") if b"data: {" in line]
        return [json.loads(line[line.index(b"{") :]) for line in lines]

    error = asyncio.run(run())[-1]["error"]
    assert error["message"] == "an error in the server: its log says more"
