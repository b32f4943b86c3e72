"""The KVStore service: one bidirectional gRPC stream a client, many requests in flight.

The module ties a stream to its session and ends it with the session; `requests` answers. Invariant: a stream lives no
longer than its session.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import grpc

from kvstore_proto.v1 import kvstore_pb2 as pb
from kvstore_proto.v1 import kvstore_pb2_grpc
from kvstored.clients.sessions import ClientSession, ClientSessions
from kvstored.rpc.requests import LAST_REPLY_S, Requests, StreamOver, StreamServices

TOKEN_METADATA = "kvstored-session-bin"


class SessionService(kvstore_pb2_grpc.KVStoreServicer):
    """The gRPC service KVStore: each client has one bidirectional stream, tied to its session by a token."""

    def __init__(self, sessions: ClientSessions, answering: StreamServices) -> None:
        self._sessions = sessions
        self._answering = answering

    async def Session(self, request_iterator: Any, context: Any) -> None:  # type: ignore[override]  # noqa: N802
        token = next((value for key, value in context.invocation_metadata() or () if key == TOKEN_METADATA), b"")
        session = self._sessions.find(bytes(token) if not isinstance(token, str) else token.encode())
        if session is None:
            await context.abort(
                grpc.StatusCode.UNAUTHENTICATED,
                "no such session: connect to the handshake socket first, and keep that connection open",
            )
            return
        stream = _Stream(session, context, self._answering)
        task = asyncio.current_task()
        assert task is not None

        ending: list[asyncio.Task[None]] = []

        def ended() -> None:
            ending.append(asyncio.create_task(stream.end(task)))

        session.on_close.append(ended)
        try:
            with contextlib.suppress(StreamOver):
                await stream.serve()
        except asyncio.CancelledError:
            if not session.closed:
                raise  # the client's side ended it, or the server stops
            try:
                await context.abort(grpc.StatusCode.UNAUTHENTICATED, "the session has ended")
            except grpc.aio.InternalError:  # a reply still is on its way out, to a client that does not read
                raise asyncio.CancelledError from None
        finally:
            stream.close()
            if not session.closed:
                session.on_close.remove(ended)


class _Stream:
    """One open stream: it reads requests, and writes answers whole, one at a time."""

    def __init__(self, session: ClientSession, context: Any, answering: StreamServices) -> None:
        self._session = session
        self._context = context
        self._requests = Requests(session, answering, self._send)
        self._writing = asyncio.Lock()  # gRPC allows one write at a time on a stream

    async def serve(self) -> None:
        while True:
            request = await self._read()
            if request is grpc.aio.EOF:
                await self._requests.finish()
                return
            if self._session.closed:
                continue  # what comes while `end` waits is not begun
            reply = self._requests.begin(request)
            if reply is not None:
                await self._send(reply)

    async def _read(self) -> Any:
        try:
            return await self._context.read()
        except Exception as error:  # gRPC names the end of a stream in several ways
            raise StreamOver from error

    async def end(self, serving: asyncio.Task[Any]) -> None:
        """Cancel `serving`, but no write: gRPC does not end a stream while a reply is on its way out.

        A client that does not take its reply in time gets no status.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LAST_REPLY_S):
                await self._writing.acquire()  # for good: nothing more is written
        serving.cancel()

    def close(self) -> None:
        self._requests.cancel()

    async def _send(self, reply: pb.Response) -> None:
        try:
            async with self._writing:
                await self._context.write(reply)
        except asyncio.CancelledError:
            self._requests.undelivered(reply)
            raise
        except Exception as error:  # as in `_read`
            self._requests.undelivered(reply)
            raise StreamOver from error
