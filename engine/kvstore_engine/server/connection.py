"""uvicorn's server, and one HTTP connection over httptools with limits that uvicorn's lacks.

Only this module imports uvicorn. A connection does not read a body: `body` does.

| uvicorn, with httptools | this module |
|---|---|
| A head may have any size and take any time. | It has at most `MAX_HEAD_BYTES` and takes at most `HEAD_TIMEOUT_S`. |
| A client that stops reading keeps its connection and its answer. | It keeps them until `WRITE_TIMEOUT_S`. |
| A request that offers another protocol (`Upgrade: h2c`, as Java's client does) loses its body. | It keeps the body. |
| The end of a client with pipelined requests is seen after the first answer. | It is seen at once. |
| There may be one connection for each descriptor. | At most `most`; the one without a whole request for longest ends. |

uvicorn over h11 has a limit on the head, and none of the others.
"""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
from collections.abc import Iterator
from typing import Any

import httptools
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 1 << 16
HEAD_TIMEOUT_S = 60.0
WRITE_TIMEOUT_S = 60.0  # for a client to read what fills a socket's buffers
DIRECT = "kvengine.direct"  # the name of a `DirectWriter` among ASGI's extensions
_MOST_PIPELINED = 8  # requests behind the one that is answered; further ones are not read before it has ended
_OFFER = (b"connection", b"upgrade", b"http2-settings")
_BACKLOG = 128  # also the most that are accepted before one is closed
_KEEP_ALIVE_S = 75


class DirectWriter:
    """A writer of chunks of the answer of `cycle`, one request of a connection, that are sent at once: without a task's
    turn and the calls of every middleware, which ASGI's `send` would cost for each.
    """

    def __init__(self, cycle: Any) -> None:
        self._cycle = cycle

    @property
    def is_ready(self) -> bool:
        """True while the answer is under way and the client reads it, so that a chunk may be written."""
        cycle = self._cycle
        is_open = cycle.response_started and cycle.chunked_encoding and not cycle.response_complete
        return bool(is_open and not cycle.disconnected and not cycle.flow.write_paused)

    def write(self, body: bytes) -> None:
        """Send `body`, which is not empty, as the answer's next chunk."""
        self._cycle.transport.write(b"%x\r\n%b\r\n" % (len(body), body))


class HttpConnection(HttpToolsProtocol):
    """One client's HTTP connection in uvicorn. It limits the size of a request's head, the time in which the head must
    arrive, and the time that the client may take to read an answer.
    """

    most = 1024  # at once

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._idle_since_s = 0.0
        self._incomplete_bytes = 0  # since the last part of a request that was whole
        self._offers_other = False
        self._earlier: list[Any] = []
        self._head_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        super().connection_made(transport)
        self._idle_since_s = self.loop.time()
        self._watch_the_clock()
        self._make_room()

    def _make_room(self) -> None:
        """End an idle connection if there are too many: this one, if no other is idle."""
        if len(self.connections) > self.most:
            idle = [one for one in self.connections if isinstance(one, HttpConnection) and one.is_idle]
            leaves = min(idle, key=lambda one: one._idle_since_s)
            self.connections.discard(leaves)
            leaves.transport.abort()

    @property
    def is_idle(self) -> bool:
        """True if no request that has arrived completely is being answered on this connection."""
        cycle = self.cycle
        return not self.pipeline and (cycle is None or cycle.response_complete or cycle.more_body)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_the_clock()
        self._stop_the_write_clock()
        for cycle in self._earlier + [cycle for cycle, _ in self.pipeline]:
            if not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_the_write_clock()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_the_write_clock()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._idle_since_s = self.loop.time()
        if self.transport.is_closing() and self.transport.get_write_buffer_size():
            self._watch_the_write_clock()

    def timeout_keep_alive_handler(self) -> None:
        self._leave()

    def data_received(self, data: bytes) -> None:
        self._incomplete_bytes += len(data)
        self._feed(data)
        if self.transport.is_closing():
            return
        is_idle = self.cycle is None or self.cycle.response_complete
        if self._incomplete_bytes > MAX_HEAD_BYTES:
            if is_idle:
                self.send_400_response(f"The head of the request is larger than {MAX_HEAD_BYTES} bytes.")
            self.transport.close()
        elif is_idle:
            self._watch_the_clock()
        else:
            self._stop_the_clock()

    def _feed(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        try:
            for _ in range(_MOST_PIPELINED):
                try:
                    self.parser.feed_data(data)
                except httptools.HttpParserUpgrade as upgrade:
                    if self._offers_other:
                        # The parser takes what follows for the other protocol: another one gets it all once more.
                        self._offers_other = False
                        data = self._head_without_offer() + data[upgrade.args[0] :]
                        self.parser = httptools.HttpRequestParser(self)
                        continue
                return
        except httptools.HttpParserError:
            pass
        self.send_400_response("Invalid HTTP request received.")

    def on_headers_complete(self) -> None:
        self._incomplete_bytes = 0
        if self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT":
            self._offers_other = True
            return
        previous = self.cycle
        super().on_headers_complete()
        scope: Any = self.cycle.scope
        scope.setdefault("extensions", {})[DIRECT] = DirectWriter(self.cycle)
        if self.pipeline and len(self.pipeline) <= _MOST_PIPELINED:
            self._earlier = [cycle for cycle in [*self._earlier, previous] if not cycle.response_complete]
            self.flow.resume_reading()  # else the client's end would not be seen

    def on_chunk_header(self) -> None:
        self._incomplete_bytes = 0

    def on_body(self, body: bytes) -> None:
        self._incomplete_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        if not self._offers_other:
            super().on_message_complete()

    def _head_without_offer(self) -> bytes:
        method, version = self.parser.get_method(), self.parser.get_http_version().encode()
        lines = [b"%s %s HTTP/%s" % (method, self.url, version)]
        lines += [b"%s: %s" % (name, value) for name, value in self.headers if name not in _OFFER]
        return b"\r\n".join([*lines, b"", b""])

    def _watch_the_clock(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self._leave)

    def _stop_the_clock(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _watch_the_write_clock(self) -> None:
        if self._write_timer is None:
            self._write_timer = self.loop.call_later(WRITE_TIMEOUT_S, self.transport.abort)

    def _stop_the_write_clock(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def _leave(self) -> None:
        """Close the connection. Data that the client has not read is dropped: closing would wait for that for ever."""
        if self.transport.get_write_buffer_size():
            self.transport.abort()
        else:
            self.transport.close()


class HttpListener(uvicorn.Server):
    """An HTTP server of `application` on the listening socket `bound`. After `should_exit` was set, running requests
    may go on for `drain_s` seconds. It serves at most `connections` connections, and at most half as many as this
    process may have descriptors.
    """

    def __init__(
        self, application: ASGIApp, bound: socket.socket, drain_s: float, connections: int = HttpConnection.most
    ) -> None:
        most = min(connections, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)
        config = uvicorn.Config(
            application,
            http=type("BoundedConnection", (HttpConnection,), {"most": most}),
            ws="none",
            lifespan="off",  # a start that a signal may interrupt, and that may fail with one line, is `run`'s
            interface="asgi3",
            access_log=False,  # ours has tenants and tokens
            log_config=None,
            backlog=_BACKLOG,
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=max(1, round(drain_s)),
            server_header=False,
            proxy_headers=False,
        )
        super().__init__(config)
        self._bound = bound

    async def run_until_stopped(self) -> None:
        await self.serve(sockets=[self._bound])

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to `run_server`: this replaces uvicorn's method, which would end the process by the signal
        instead of with status 0.
        """
        yield
