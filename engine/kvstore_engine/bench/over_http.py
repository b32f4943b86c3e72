"""Drives any OpenAI-style server with a load, over HTTP with streamed answers.

The module owns the clients: one connection a request, all in one thread, so that they take little from the server's
cores. Prompts are sent as token ids, so that every server computes equal prompts; `ignore_eos` keeps all answers at the
requested length (llama.cpp, vLLM and this engine understand it). A refused or broken request is an outcome, not an
exception.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from urllib.parse import SplitResult, urlsplit

from kvstore_engine.bench.summary import BenchmarkRun, RequestOutcome
from kvstore_engine.bench.workload import Arrivals, BenchRequest, ClosedLoop, Workload
from kvstore_engine.errors import OperationError, UsageError

_LINE_BYTES = 1 << 20
_CONNECT_S = 30.0
_SILENCE_S = 600.0  # a loaded server may take long for a long prompt


@dataclass(frozen=True, slots=True)
class MeasuredServer:
    """An HTTP server to measure. `model` is the name to ask for; None lets the server choose."""

    url: str
    model: str | None = None
    api_key: str | None = None


def run_over_http(endpoint: MeasuredServer, workload: Workload, arrivals: Arrivals) -> BenchmarkRun:
    """Send the requests of `workload` to the server `endpoint` at the times that `arrivals` gives, wait for all
    answers, and return the outcome of each request with its times. Raises OperationError if the server cannot be
    reached.
    """
    return asyncio.run(_Clients(endpoint).run(workload, arrivals))


class _Clients:
    def __init__(self, endpoint: MeasuredServer) -> None:
        self._endpoint = endpoint
        self._url = _split(endpoint.url)
        self._begin = 0.0

    async def run(self, workload: Workload, arrivals: Arrivals) -> BenchmarkRun:
        await self._reachable()
        self._begin = time.perf_counter()
        if isinstance(arrivals, ClosedLoop):
            waiting = iter(workload.requests)
            clients = [self._client(waiting) for _ in range(arrivals.concurrency)]
            outcomes = [outcome for each in await asyncio.gather(*clients) for outcome in each]
        else:
            due = arrivals.due_s(len(workload.requests))
            tasks = [self._at(at, request) for at, request in zip(due, workload.requests, strict=True)]
            outcomes = list(await asyncio.gather(*tasks))
        return BenchmarkRun(outcomes, self._now())

    async def _client(self, waiting: Iterator[BenchRequest]) -> list[RequestOutcome]:
        return [await self._ask(request, self._now()) for request in waiting]

    async def _at(self, due_s: float, request: BenchRequest) -> RequestOutcome:
        await asyncio.sleep(max(0.0, due_s - self._now()))
        return await self._ask(request, due_s)

    async def _ask(self, request: BenchRequest, due_s: float) -> RequestOutcome:
        outcome = RequestOutcome(request.id, request.kind, due_s, len(request.tokens))
        try:
            async with asyncio.timeout(_SILENCE_S):
                await self._exchange(request, outcome)
        except (OSError, EOFError, TimeoutError, ValueError) as error:
            outcome.message = str(error) or type(error).__name__
        outcome.end_s = self._now()
        return outcome

    async def _exchange(self, request: BenchRequest, outcome: RequestOutcome) -> None:
        body = {
            "prompt": request.tokens.tolist(), "max_tokens": request.max_tokens, "temperature": 0, "stream": True,
            "stream_options": {"include_usage": True}, "ignore_eos": True,
        }  # fmt: skip
        if self._endpoint.model:
            body["model"] = self._endpoint.model
        reader, writer = await self._connect()
        try:
            writer.write(self._head("POST", "/v1/completions", json.dumps(body).encode()))
            await writer.drain()
            status, lines = await _response(reader)
            if status != 200:
                outcome.message = await _complaint(status, lines)
                return
            async for line in lines:
                if line.startswith(b"data: {"):
                    self._note(outcome, json.loads(line[6:]))
        finally:
            writer.close()
        if not outcome.generated:
            outcome.generated = len(outcome.token_s)
        if not outcome.token_s:
            outcome.message = outcome.message or "the answer was empty"

    def _note(self, outcome: RequestOutcome, chunk: dict[str, object]) -> None:
        """Note one event of the stream: a piece of the answer, or the final account."""
        if error := chunk.get("error"):
            outcome.message = str(error)
        choices, usage = chunk.get("choices"), chunk.get("usage")
        if isinstance(choices, list) and choices:
            last = choices[0].get("finish_reason")
            if not last or choices[0].get("text"):
                outcome.token_s.append(self._now())
        if isinstance(usage, dict):
            outcome.generated = int(usage.get("completion_tokens") or 0)
            details = usage.get("prompt_tokens_details")
            if isinstance(details, dict) and details.get("cached_tokens") is not None:
                outcome.reused_tokens = int(details["cached_tokens"])

    async def _reachable(self) -> None:
        try:
            async with asyncio.timeout(_CONNECT_S):
                _, writer = await self._connect()
        except (OSError, TimeoutError) as error:
            raise OperationError(f"no server answers at {self._endpoint.url}: {error or 'it took too long'}") from None
        writer.close()

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        secure = self._url.scheme == "https"
        port = self._url.port or (443 if secure else 80)
        tls = ssl.create_default_context() if secure else None
        return await asyncio.open_connection(self._url.hostname, port, ssl=tls, limit=_LINE_BYTES)

    def _head(self, verb: str, path: str, body: bytes) -> bytes:
        base = self._url.path.rstrip("/").removesuffix("/v1")
        key = f"Authorization: Bearer {self._endpoint.api_key}\r\n" if self._endpoint.api_key else ""
        head = (
            f"{verb} {base}{path} HTTP/1.1\r\nHost: {self._url.netloc}\r\nConnection: close\r\n{key}"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body

    def _now(self) -> float:
        return time.perf_counter() - self._begin


def _split(url: str) -> SplitResult:
    parts = urlsplit(url if "://" in url else f"http://{url}")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UsageError(f"{url!r} is no URL of a server: write http://127.0.0.1:8080")
    return parts


async def _response(reader: asyncio.StreamReader) -> tuple[int, AsyncIterator[bytes]]:
    """Return the status, and the body's lines as they come."""
    words = (await reader.readline()).split(None, 2)
    if len(words) < 2 or not words[1].isdigit():
        raise ValueError("the server's answer is not HTTP")
    chunked = False
    while (line := await reader.readline()) not in (b"\r\n", b"\n", b""):
        name, _, value = line.partition(b":")
        chunked |= name.lower() == b"transfer-encoding" and b"chunked" in value.lower()
    return int(words[1]), _lines(_chunks(reader) if chunked else _plain(reader))


async def _chunks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while size := int((await reader.readline()).split(b";")[0] or b"0", 16):
        yield await reader.readexactly(size)
        await reader.readline()


async def _plain(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while piece := await reader.read(1 << 16):
        yield piece


async def _lines(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    rest = b""
    async for piece in pieces:
        *whole, rest = (rest + piece).split(b"\n")
        for line in whole:
            yield line.rstrip(b"\r")
    if rest:
        yield rest


async def _complaint(status: int, lines: AsyncIterator[bytes]) -> str:
    text = b"".join([line async for line in lines]).decode(errors="replace")
    try:
        said = json.loads(text)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        said = text[:200]
    return f"HTTP {status}: {said}"
