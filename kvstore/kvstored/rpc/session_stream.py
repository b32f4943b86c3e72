"""The KVStore service: one bidirectional stream a client, many requests in flight.

Requests that need no bytes to move are answered inline; the others run as tasks and answer by request id when they are
done. Never touches payload. Invariants: a stream lives no longer than its session; a request is answered, with a result
or an error, or the stream is over.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator
from typing import Any

import grpc

from kvstore_proto.errors import ErrorKind, KVStoreError
from kvstore_proto.v1 import kvstore_pb2 as pb
from kvstore_proto.v1 import kvstore_pb2_grpc
from kvstored.clock import Clock
from kvstored.dataplane.sessions import Session, SessionTable
from kvstored.telemetry import Latencies
from kvstored.verbs import Verbs

log = logging.getLogger(__name__)
TOKEN_METADATA = "kvstored-session-bin"
LAST_REPLY_S = 1.0  # for a reply to go out before a stream ends; then the client gets no status


class SessionService(kvstore_pb2_grpc.KVStoreServicer):
    """See the module. `inflight_limit` bounds the tasks of one client, over all its streams."""

    def __init__(
        self, sessions: SessionTable, verbs: Verbs, inflight_limit: int, latencies: Latencies, clock: Clock
    ) -> None:
        self._sessions = sessions
        self._verbs = verbs
        self._inflight_limit = inflight_limit
        self._latencies = latencies
        self._clock = clock

    async def Session(self, request_iterator: Any, context: Any) -> None:  # type: ignore[override]  # noqa: N802
        token = next((value for key, value in context.invocation_metadata() or () if key == TOKEN_METADATA), b"")
        session = self._sessions.find(bytes(token) if not isinstance(token, str) else token.encode())
        if session is None:
            await context.abort(
                grpc.StatusCode.UNAUTHENTICATED,
                "no such session: connect to the handshake socket first, and keep that connection open",
            )
            return
        stream = _Stream(session, self._verbs, context, self._inflight_limit, self._latencies, self._clock)
        task = asyncio.current_task()
        assert task is not None

        ending: list[asyncio.Task[None]] = []

        def ended() -> None:
            ending.append(asyncio.create_task(stream.end(task)))

        session.on_close.append(ended)
        try:
            with contextlib.suppress(_StreamOver):
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


class _StreamOver(Exception):
    """Nothing can be read or sent any more: the client or its stream is gone."""


class _Stream:
    """One open stream: reads requests, keeps answers whole and in one writer at a time."""

    def __init__(
        self,
        session: Session,
        verbs: Verbs,
        context: Any,
        inflight_limit: int,
        latencies: Latencies,
        clock: Clock,
    ) -> None:
        self._session = session
        self._verbs = verbs
        self._context = context
        self._inflight_limit = inflight_limit
        self._latencies = latencies
        self._now_ns = clock.monotonic_ns
        self._writing = asyncio.Lock()  # gRPC allows one write at a time on a stream
        self._tasks: set[asyncio.Task[None]] = set()

    async def serve(self) -> None:
        while True:
            request = await self._read()
            if request is grpc.aio.EOF:
                await self._finish_tasks()
                return
            if self._session.closed:
                continue  # what comes while `end` waits is not begun
            reply = self._begin(request)
            if reply is not None:
                await self._send(request.request_id, reply)

    async def _read(self) -> Any:
        try:
            return await self._context.read()
        except Exception as error:  # gRPC names the end of a stream in several ways
            raise _StreamOver from error

    async def end(self, serving: asyncio.Task[Any]) -> None:
        """Cancel `serving`, but no write: gRPC does not end a stream while a reply is on its way out."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LAST_REPLY_S):
                await self._writing.acquire()  # for good: nothing more is written
        serving.cancel()

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()

    def _begin(self, request: pb.Request) -> pb.Response | None:
        """The answer of a request that is done at once; None when a task will answer."""
        began_ns = self._now_ns()
        op = request.WhichOneof("op")
        try:
            if not request.request_id:
                raise KVStoreError(ErrorKind.INVALID, "request_id must not be 0")
            if op is None:
                raise KVStoreError(ErrorKind.INVALID, "a request of a kind this daemon does not know")
            quick = self._verbs.quick(self._session, op, request)
            if quick is not None:
                self._latencies.add(op, self._now_ns() - began_ns)
                return quick
            if self._session.in_flight >= self._inflight_limit:
                raise KVStoreError(
                    ErrorKind.THROTTLED,
                    f"{self._inflight_limit} requests of this client are waiting already",
                    5,
                )
            replies = self._verbs.slow(self._session, op, request)
        except KVStoreError as error:
            return error_reply(error)
        except Exception:
            return self._broken(op or "request")
        task = asyncio.create_task(self._run(request.request_id, op, replies, began_ns))
        self._session.in_flight += 1
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return None

    def _done(self, task: asyncio.Task[None]) -> None:
        self._session.in_flight -= 1
        self._tasks.discard(task)

    async def _run(self, request_id: int, op: str, replies: AsyncGenerator[pb.Response, None], began_ns: int) -> None:
        with contextlib.suppress(_StreamOver):
            await self._answer(request_id, op, replies, began_ns)

    async def _answer(
        self, request_id: int, op: str, replies: AsyncGenerator[pb.Response, None], began_ns: int
    ) -> None:
        is_first = True
        try:
            async for reply in replies:
                if is_first:  # a commit may answer twice; the client goes on after the first
                    self._latencies.add(op, self._now_ns() - began_ns)
                    is_first = False
                await self._send(request_id, reply)
        except KVStoreError as error:
            await self._send(request_id, error_reply(error))
        except _StreamOver:
            raise
        except Exception:
            await self._send(request_id, self._broken(op))

    def _broken(self, op: str) -> pb.Response:
        """The answer to a request that ran into a mistake of ours; to be made where the exception is handled."""
        log.exception("request %s of %s failed", op, self._session.client_name)
        return error_reply(KVStoreError(ErrorKind.INTERNAL, f"{op} failed inside the daemon; its log has the details"))

    async def _send(self, request_id: int, reply: pb.Response) -> None:
        reply.request_id = request_id
        try:
            async with self._writing:
                await self._context.write(reply)
        except asyncio.CancelledError:
            self._verbs.undelivered(self._session, reply)
            raise
        except Exception as error:  # as in `_read`
            self._verbs.undelivered(self._session, reply)
            raise _StreamOver from error

    async def _finish_tasks(self) -> None:
        """The client sends no more: it may still wait for answers."""
        while self._tasks:
            await asyncio.wait(set(self._tasks))


def error_reply(error: KVStoreError) -> pb.Response:
    return pb.Response(
        error=pb.Error(
            kind=pb.ErrorKind.ValueType(error.kind), message=error.message, retry_after_ms=error.retry_after_ms
        )
    )
