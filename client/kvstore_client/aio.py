"""The session for asyncio: `await` instead of waiting.

    async with await kvstore_client.aio.connect(fingerprint=fingerprint) as session:
        with await session.get(tokens) as lease:
            ...
        with await session.get_stream(tokens) as stream:
            async for first, lease in stream:
                ...

The module owns a few threads in which the synchronous session works, and the results of cancelled calls. It adds no
behaviour: arguments, results, misses and errors are documented in `kvstore_client.Session`. A call takes some 50 us
more for the thread; in return there is one client, not two, and payload functions and copies never run on the event
loop. Invariants: nothing here blocks the loop; a lease that a cancelled call was granted is given back.
"""

from __future__ import annotations

import asyncio
import contextvars
import os
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial, wraps
from inspect import getdoc
from operator import attrgetter
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, TypeVar

from kvstore_client.arguments import UINT32_MAX, count
from kvstore_client.entry import connect as connect_now
from kvstore_client.errors import invalid
from kvstore_client.lease import Lease
from kvstore_client.lease_stream import LayerStreams, LeasedRun, LeaseStream
from kvstore_client.results import Statistics
from kvstore_client.session import Session
from kvstore_proto.fingerprint import Fingerprint, LayerGroup
from kvstore_proto.identity import BlockKeys
from kvstore_proto.token_ids import TokenIds

DEFAULT_THREADS = 8
Submit = Callable[[Callable[[], Any]], Future[Any]]
Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def _in_thread(
    method: Callable[Concatenate[Session, Arguments], Result], discard: Callable[[Result], None] | None = None
) -> Callable[Concatenate[AsyncSession, Arguments], Coroutine[Any, Any, Result]]:
    """Return a method to await, which runs `method` of `Session` in a thread. `discard` gets a result that arrives
    after the call was cancelled.
    """

    @wraps(method)
    async def call(self: AsyncSession, /, *arguments: Arguments.args, **options: Arguments.kwargs) -> Result:
        return await self._call(partial(method, self._session, *arguments, **options), discard)

    call.__doc__ = f"{getdoc(method)}\n\nRuns in a thread: await it."
    return call


class AsyncSession:
    """A session with the daemon for asyncio, made by `kvstore_client.aio.connect`. It runs the calls of the synchronous
    `session` in `threads` threads; further calls wait for a free thread. Cancelling a call stops the waiting, not the
    call: a put continues to its end. Payload functions of a put run in a thread. A get returns an ordinary `Lease`:
    reading and releasing it do not block, but its `renew` asks the daemon, so call that through `asyncio.to_thread`.
    """

    def __init__(self, session: Session, threads: int = DEFAULT_THREADS) -> None:
        self._session = session
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="kvstore-aio")

    lookup = _in_thread(Session.lookup)
    probe = _in_thread(Session.probe)  # the first one fetches the index
    contains = _in_thread(Session.contains)
    resume_point = _in_thread(Session.resume_point)
    get = _in_thread(Session.get, Lease.release)
    put = _in_thread(Session.put)
    prefetch = _in_thread(Session.prefetch)
    hint = _in_thread(Session.hint)
    touch = _in_thread(Session.touch)
    delete = _in_thread(Session.delete)
    explain = _in_thread(Session.explain)
    bump_weights = _in_thread(Session.bump_weights)
    ping = _in_thread(Session.ping)

    @property
    def fingerprint(self) -> Fingerprint:
        return self._session.fingerprint

    @property
    def block_tokens(self) -> int:
        return self._session.block_tokens

    @property
    def state(self) -> str:
        """The state of the connection to the daemon: "connected", "degraded" or "closed". See `Session.state`."""
        return self._session.state

    async def get_stream(self, tokens: TokenIds | None = None, **options: Any) -> AsyncLeaseStream:
        """Ask the daemon for the stored blocks of the prefix `tokens`, and return a stream that leases them run by run,
        as `Session.get_stream` does with the same `options`. The stream occupies one of the session's threads while
        it waits for its next blocks.
        """
        stream = await self._call(partial(self._session.get_stream, tokens, **options), LeaseStream.close)
        return AsyncLeaseStream(stream, self._submit)

    async def get_layers(self, tokens: TokenIds | None = None, **options: Any) -> LayerStreams[AsyncLeaseStream]:
        """Ask the daemon for the stored blocks of the prefix `tokens`, and return one stream for each layer group, as
        `Session.get_layers` does with the same `options`.
        """
        streams = await self._call(partial(self._session.get_layers, tokens, **options), LayerStreams.close)
        return LayerStreams(AsyncLeaseStream(stream, self._submit) for stream in streams)

    def wake(self) -> None:
        """Prepare the daemon for a call that follows soon, as `Session.wake` does. It runs in a thread, and this call
        does not wait for its end.
        """
        self._submit(self._session.wake)

    def keys(self, tokens: TokenIds, group: int | None = None) -> BlockKeys | None:
        """Return the keys of the whole blocks of `tokens` in the layer group `group`, as `Session.keys` does. They are
        computed in this thread, without the daemon. None means that the keys are not known, because there was no
        daemon yet.
        """
        return self._session.keys(tokens, group)

    def statistics(self) -> Statistics:
        return self._session.statistics()

    async def close(self) -> None:
        """End the session. Calls in flight end as misses; calls that still wait for a thread raise
        KVStoreError(INVALID), as every call of a closed session does.
        """
        await asyncio.to_thread(self._session.close)
        self._threads.shutdown(wait=False)

    async def __aenter__(self) -> AsyncSession:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _call(self, work: Callable[[], Result], discard: Callable[[Result], None] | None = None) -> Result:
        """Return the result of `work`, done in a thread. `discard` gets a result that arrives after the call was
        cancelled.
        """
        running = self._submit(work)
        try:
            # Shielded, because cancelling the wrapper would cancel `running` and hide whether it had begun.
            return await asyncio.shield(asyncio.wrap_future(running))
        except asyncio.CancelledError:
            if not running.cancel() and discard is not None:
                running.add_done_callback(partial(_discard, discard))
            raise

    def _submit(self, work: Callable[[], Result]) -> Future[Result]:
        try:
            return self._threads.submit(contextvars.copy_context().run, work)
        except RuntimeError:  # the pool is shut down
            raise invalid("this session is closed") from None


def _shown(name: str) -> Any:
    """Return a property that shows the attribute of that name of the stream beneath."""
    return property(attrgetter(f"_stream.{name}"), doc="")


class AsyncLeaseStream:
    """A `LeaseStream` for asyncio: `async for` yields runs of leased blocks as the daemon grants them. One task uses
    it. Closing it does not block and releases every lease of the stream, so a plain `with` is enough. If a task is
    cancelled while it waits for a run, the next iteration gets that run.
    """

    def __init__(self, stream: LeaseStream, submit: Submit) -> None:
        self._stream = stream
        self._submit = submit
        self._next: Future[LeasedRun | None] | None = None

    group: LayerGroup = _shown("group")
    tiers: tuple[str, ...] = _shown("tiers")
    ready_s: tuple[float, ...] = _shown("ready_s")
    reason: str = _shown("reason")
    blocks: int = _shown("blocks")
    payload_bytes: int = _shown("payload_bytes")

    async def expect(self) -> int:
        """Wait, without blocking the event loop, for the daemon's first answer, and return the number of blocks that
        the stream will lease at most (`LeaseStream.expect`).
        """
        return await asyncio.shield(asyncio.wrap_future(self._submit(self._stream.expect)))

    def __aiter__(self) -> AsyncLeaseStream:
        return self

    async def __anext__(self) -> LeasedRun:
        if self._next is None:
            self._next = self._submit(partial(next, self._stream, None))
        run = await asyncio.shield(asyncio.wrap_future(self._next))
        self._next = None
        if run is None:
            raise StopAsyncIteration
        return run

    def close(self) -> None:
        """Close the stream and release the leases of all runs that it yielded, as `LeaseStream.close` does. It does not
        block.
        """
        self._stream.close()

    def __enter__(self) -> AsyncLeaseStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


async def connect(
    socket: str | os.PathLike[str] | None = None,
    *,
    fingerprint: Fingerprint,
    threads: int = DEFAULT_THREADS,
    **options: Any,
) -> AsyncSession:
    """Connect to the daemon whose directory or socket is `socket`, as `kvstore_client.connect` does, and return the
    session to await. The event loop is not blocked. `threads` is the most calls in flight at once. `options` are the
    other arguments of `kvstore_client.connect`, whose errors this function raises.
    """
    count("threads", threads, least=1, most=UINT32_MAX)
    session = await asyncio.to_thread(connect_now, socket, fingerprint=fingerprint, **options)
    return AsyncSession(session, threads)


def _discard(discard: Callable[[Result], None], done: Future[Result]) -> None:
    if not done.cancelled() and done.exception() is None:
        discard(done.result())
