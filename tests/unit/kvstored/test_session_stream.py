"""The end of a session ends its stream with a status, also when a reply is on its way out just then."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from kvstore_proto.v1 import kvstore_pb2 as pb
from kvstored.rpc import session_stream
from kvstored.rpc.requests import StreamServices
from kvstored.rpc.session_stream import TOKEN_METADATA, SessionService

TOKEN = bytes(16)
PING = pb.Request(request_id=1, ping=pb.Ping())


class Context:
    """gRPC's rule: a status is refused while a message is on its way, and a second one always."""

    def __init__(self) -> None:
        self.requests: asyncio.Queue[pb.Request] = asyncio.Queue()
        self.goes_out = asyncio.Event()
        self.is_writing = asyncio.Event()
        self.on_its_way = False
        self.status: grpc.StatusCode | None = None

    def invocation_metadata(self) -> tuple[tuple[str, bytes], ...]:
        return ((TOKEN_METADATA, TOKEN),)

    async def read(self) -> pb.Request:
        return await self.requests.get()

    async def write(self, reply: pb.Response) -> None:
        self.on_its_way = True
        self.is_writing.set()
        await self.goes_out.wait()  # also when who waits is cancelled, the message stays on its way
        self.on_its_way = False

    async def abort(self, status: grpc.StatusCode, details: str) -> None:
        if self.on_its_way:
            raise grpc.aio.InternalError("too many operations")
        assert self.status is None
        self.status = status
        raise grpc.aio.AbortError


class Scene:
    def __init__(self) -> None:
        self.context = Context()
        self.answered: list[str] = []
        self.session = SimpleNamespace(closed=False, on_close=[], in_flight=0, client_name="test")
        verbs: Any = SimpleNamespace(quick={"ping": self._quick}, undelivered=lambda session, reply: None)
        sessions: Any = SimpleNamespace(find={TOKEN: self.session}.get)
        latencies: Any = SimpleNamespace(add=lambda op, ns: None)
        clock: Any = SimpleNamespace(monotonic_ns=lambda: 0)
        nothing: Any = None
        service = SessionService(sessions, StreamServices(verbs, 8, nothing, latencies, clock, nothing))
        self.serving = asyncio.ensure_future(service.Session(None, self.context))

    def _quick(self, session: object, request: pb.Request) -> pb.Response:
        self.answered.append(request.WhichOneof("op") or "")
        return pb.Response(ping=pb.PingReply())

    def close(self) -> None:
        self.session.closed = True
        actions: list[Callable[[], None]] = self.session.on_close
        for action in actions:
            action()

    async def ended(self) -> grpc.StatusCode | None:
        await asyncio.wait([self.serving], timeout=60)
        assert self.serving.cancelled() or isinstance(self.serving.exception(), grpc.aio.AbortError)
        return self.context.status


def test_a_stream_that_waits_for_a_request_ends_with_its_session() -> None:
    async def scenario() -> None:
        scene = Scene()
        await asyncio.sleep(0)
        scene.close()
        assert await scene.ended() is grpc.StatusCode.UNAUTHENTICATED

    asyncio.run(scenario())


def test_a_reply_on_its_way_goes_out_before_the_stream_is_ended_and_nothing_is_begun_meanwhile() -> None:
    async def scenario() -> None:
        scene = Scene()
        scene.context.requests.put_nowait(PING)
        await scene.context.is_writing.wait()
        scene.context.requests.put_nowait(PING)
        scene.close()
        scene.context.goes_out.set()
        assert await scene.ended() is grpc.StatusCode.UNAUTHENTICATED
        assert scene.answered == ["ping"]

    asyncio.run(scenario())


def test_a_client_that_does_not_read_cannot_keep_its_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_stream, "LAST_REPLY_S", 0.01)

    async def scenario() -> None:
        scene = Scene()
        scene.context.requests.put_nowait(PING)
        await scene.context.is_writing.wait()
        scene.close()
        assert await scene.ended() is None
        assert scene.serving.cancelled()

    asyncio.run(scenario())
