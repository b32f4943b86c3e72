"""The requests of one open stream, over any transport: answered at once, or by a task, by request id.

Requests that move no bytes are answered inline; the others run as tasks and answer when they are done. An acquire that
its client gives up is cancelled, and answered a last time. The module never touches payload, and never reads or writes
a stream. Invariant: a request is answered, with a result or an error, or the stream is over.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from functools import partial
from typing import NamedTuple

from kvstore_proto.errors import ErrorKind, KVStoreError
from kvstore_proto.v1 import kvstore_pb2 as pb
from kvstored.clients.pressure import Pressure, Work
from kvstored.clients.sessions import ClientSession
from kvstored.clock import Clock
from kvstored.completions import CompletionQueue
from kvstored.rpc.verbs import Verbs
from kvstored.telemetry import Latencies

log = logging.getLogger(__name__)
LAST_REPLY_S = 1.0  # for what was answered to go out before a stream ends


class StreamOver(Exception):
    """An error: a client's stream cannot be read or written any more, because the client or the stream is gone."""


class StreamServices(NamedTuple):
    """The objects that a stream needs to answer requests. `inflight_limit` bounds the running tasks of one client, over
    all its streams. `completions` has the work that follows an answer.
    """

    verbs: Verbs
    inflight_limit: int
    pressure: Pressure
    latencies: Latencies
    clock: Clock
    completions: CompletionQueue


class Requests:
    """A handler of the requests of one stream. `send` sends an answer that a task has made, and raises StreamOver if
    that cannot be done."""

    def __init__(
        self, session: ClientSession, services: StreamServices, send: Callable[[pb.Response], Awaitable[None]]
    ) -> None:
        self._session = session
        self._verbs = services.verbs
        self._inflight_limit = services.inflight_limit
        self._pressure = services.pressure
        self._latencies = services.latencies
        self._now_ns = services.clock.monotonic_ns
        self._send = send
        self._tasks: set[asyncio.Task[None]] = set()
        self._acquires: dict[int, asyncio.Task[None]] = {}  # of those, by request id
        self._given_up: set[int] = set()  # of those
        self._sending: set[int] = set()  # whose answer is on its way out

    def begin(self, request: pb.Request) -> pb.Response | None:
        """Begin `request`. Return its answer if it is done at once, or None when a task will send the answer later."""
        began_ns, op = self._now_ns(), request.WhichOneof("op")
        try:
            if not request.request_id:
                raise KVStoreError(ErrorKind.INVALID, "request_id must not be 0")
            if op is None:
                raise KVStoreError(ErrorKind.INVALID, "a request of a kind this daemon does not know")
            if op == "release":
                self._end_acquires(request.release.request_ids)
            elif op == "prefetch":
                self._pressure.check(self._session, Work.PREFETCH)
            verb = self._verbs.quick.get(op)
            reply = verb(self._session, request) if verb is not None else None
            if reply is None:
                self._begin_task(request, op, began_ns)
                return None
            self._latencies.add(op, self._now_ns() - began_ns)
        except KVStoreError as error:
            reply = error_reply(error)
        except Exception:
            reply = self._broken(op or "request")
        reply.request_id = request.request_id
        return reply

    async def finish(self) -> None:
        """Wait until all running requests are answered: the client sends no more requests but may wait for answers."""
        while self._tasks:
            await asyncio.wait(set(self._tasks))

    def cancel(self) -> None:
        """Cancel all running requests, since the stream is over."""
        self._given_up.clear()
        for task in self._tasks:
            task.cancel()

    def undelivered(self, reply: pb.Response) -> None:
        """Take back what `reply` granted (a lease, reserved slots), since it could not be sent."""
        self._verbs.undelivered(self._session, reply)

    def _begin_task(self, request: pb.Request, op: str, began_ns: int) -> None:
        """Let a task answer. Raises KVStoreError for a request that is wrong, or one too many."""
        if self._session.in_flight >= self._inflight_limit:
            raise KVStoreError(
                ErrorKind.THROTTLED, f"{self._inflight_limit} requests of this client are waiting already", 5
            )
        work, nbytes = self._pressure.measure(self._session, op, request)
        self._pressure.begin(self._session, work, nbytes)
        try:
            replies = self._verbs.slow[op](self._session, request)
        except Exception:
            self._pressure.end(self._session, nbytes)
            raise
        task = asyncio.create_task(self._run(request.request_id, op, replies, began_ns))
        self._session.in_flight += 1
        self._tasks.add(task)
        if op == "acquire":
            self._acquires[request.request_id] = task
        task.add_done_callback(partial(self._done, request.request_id, nbytes))

    def _done(self, request_id: int, nbytes: int, task: asyncio.Task[None]) -> None:
        self._session.in_flight -= 1
        self._pressure.end(self._session, nbytes)
        self._tasks.discard(task)
        self._acquires.pop(request_id, None)
        self._given_up.discard(request_id)

    def _end_acquires(self, request_ids: Iterable[int]) -> None:
        for request_id in self._acquires.keys() & request_ids:
            self._given_up.add(request_id)
            # Soon, because a task that has not begun would end without an answer.
            asyncio.get_running_loop().call_soon(self._end_acquire, request_id)

    def _end_acquire(self, request_id: int) -> None:
        task = self._acquires.get(request_id)
        if task is not None and request_id not in self._sending:  # gRPC takes no other message after half of one
            task.cancel()

    async def _run(self, request_id: int, op: str, replies: AsyncGenerator[pb.Response, None], began_ns: int) -> None:
        with contextlib.suppress(StreamOver):
            try:
                await self._answer(request_id, op, replies, began_ns)
            except asyncio.CancelledError:
                if request_id not in self._given_up:
                    raise
                await self._reply(request_id, pb.Response(acquire=pb.AcquireReply()))

    async def _answer(
        self, request_id: int, op: str, replies: AsyncGenerator[pb.Response, None], began_ns: int
    ) -> None:
        is_first = True
        try:
            async with contextlib.aclosing(replies):
                async for reply in replies:
                    if is_first:  # a store may answer twice; the client goes on after the first
                        self._latencies.add(op, self._now_ns() - began_ns)
                        is_first = False
                    await self._reply(request_id, reply)
                    if request_id in self._given_up and reply.acquire.more:
                        raise asyncio.CancelledError
        except KVStoreError as error:
            await self._reply(request_id, error_reply(error))
        except StreamOver:
            raise
        except Exception:
            await self._reply(request_id, self._broken(op))

    async def _reply(self, request_id: int, reply: pb.Response) -> None:
        reply.request_id = request_id
        self._sending.add(request_id)
        try:
            await self._send(reply)
        finally:
            self._sending.discard(request_id)

    def _broken(self, op: str) -> pb.Response:
        """Return the answer to a request that ran into a bug; call it in the handler of the exception."""
        log.exception("request %s of %s failed", op, self._session.client_name)
        return error_reply(KVStoreError(ErrorKind.INTERNAL, f"{op} failed inside the daemon; its log has the details"))


def error_reply(error: KVStoreError) -> pb.Response:
    return pb.Response(
        error=pb.Error(
            kind=pb.ErrorKind.ValueType(error.kind), message=error.message, retry_after_ms=error.retry_after_ms
        )
    )
