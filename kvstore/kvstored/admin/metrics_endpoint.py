"""The HTTP endpoint that monitoring scrapes: `GET /metrics`, in Prometheus' and OpenMetrics' text formats.

The module owns its listener and connections: one request a connection, each within a time limit, and a bounded number
of connections. The figures are taken on the daemon's loop, so that they are of one moment. It serves nothing else, and
does not ask who is reading: the figures name tenants, so `metrics.listen` belongs on loopback or behind a proxy that
the operator trusts.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import io
import logging
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from http import HTTPStatus
from typing import Any

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from kvstored.admin.metrics import MetricsSnapshot, families
from kvstored.admin.views import Views
from kvstored.config import ConfigError
from kvstored.config.addresses import address_of, numeric
from kvstored.config.schema import MetricsSection
from kvstored.process import connections_within
from kvstored.sockets import SocketError
from kvstored.telemetry import Latencies

log = logging.getLogger(__name__)
SNAPSHOT_TIMEOUT_S = 5.0  # of a scrape; Prometheus gives up after 10 by default
REQUEST_S = 5.0
ANSWER_S = 15.0
MAX_HEAD_BYTES = 8 << 10
BACKLOG = 32  # the most that are accepted before one is closed
Application = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]


def serve_metrics(section: MetricsSection, views: Views, latencies: Latencies) -> BoundedHttp:
    """Return an HTTP server that answers `GET /metrics` where `section` says, until it is closed. Raises
    SocketError.
    """
    flows = views.parts.store.flows

    def take() -> MetricsSnapshot:
        tiers, misses = views.tiers(with_classes=False), flows.misses_by_name()
        return MetricsSnapshot(views.status(), tiers, views.tenants(), misses, latencies.snapshot())

    registry = CollectorRegistry(auto_describe=False)
    registry.register(_OnLoop(asyncio.get_running_loop(), take))
    most = connections_within(section.connections)
    return BoundedHttp(_listener(section.listen, most), make_wsgi_app(registry), most)


def _listener(listen: str, backlog: int) -> socket.socket:
    setting = "metrics.listen"
    try:
        address = numeric(setting, address_of(setting, listen, ""))
        family = socket.AF_INET6 if address.is_ipv6 else socket.AF_INET
        host = "" if address.host == "*" else address.host
        return socket.create_server((host, address.port), family=family, backlog=backlog)
    except ConfigError as error:
        raise SocketError(str(error)) from None
    except OSError as error:
        raise SocketError(f"cannot listen on {setting} {listen}: {error.strerror or error}") from None


class _OnLoop(Collector):
    def __init__(self, loop: asyncio.AbstractEventLoop, take: Callable[[], MetricsSnapshot]) -> None:
        self._loop, self._take = loop, take

    def collect(self) -> Iterator[Metric]:
        async def taken() -> MetricsSnapshot:
            return self._take()

        try:
            snapshot = asyncio.run_coroutine_threadsafe(taken(), self._loop).result(SNAPSHOT_TIMEOUT_S)
        except (FutureTimeout, RuntimeError):  # the daemon is stopping
            log.warning("a scrape of /metrics was not answered within %g s", SNAPSHOT_TIMEOUT_S)
            return
        yield from families(snapshot)


class BoundedHttp:
    """An HTTP server in its own thread. It runs the WSGI `application` for requests on `listener`, from construction
    until `close`.

    A connection is ended `REQUEST_S` and `ANSWER_S` seconds after it began, even if its peer says nothing. Over `most`
    connections, the oldest one that has not sent its request is ended, so that half-open connections keep no scraper
    out."""

    def __init__(self, listener: socket.socket, application: Application, most: int) -> None:
        self._listener, self._application, self._most = listener, application, most
        self._open: set[asyncio.StreamWriter] = set()
        self._without_request: dict[asyncio.StreamWriter, None] = {}  # oldest first
        self._answering = ThreadPoolExecutor(1, thread_name_prefix="metrics-answer")
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End all connections and the server's thread."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._answering.shutdown(wait=True, cancel_futures=True)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        start = asyncio.start_server(self._connected, sock=self._listener, limit=MAX_HEAD_BYTES, backlog=BACKLOG)
        server = self._loop.run_until_complete(start)
        self._loop.run_forever()
        server.close()
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        self._loop.close()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open.add(writer)
        self._without_request[writer] = None
        if len(self._open) > self._most:
            oldest = next(iter(self._without_request))
            self._forget(oldest)
            oldest.transport.abort()
        try:
            async with asyncio.timeout(REQUEST_S):
                head = await self._head(reader)
            self._without_request.pop(writer, None)
            async with asyncio.timeout(ANSWER_S):
                writer.write(head if isinstance(head, bytes) else await self._answer(head))
                writer.close()
                await writer.wait_closed()
        except (TimeoutError, OSError, asyncio.IncompleteReadError):
            pass
        finally:
            self._forget(writer)
            writer.transport.abort()

    def _forget(self, writer: asyncio.StreamWriter) -> None:
        self._without_request.pop(writer, None)
        self._open.discard(writer)

    async def _head(self, reader: asyncio.StreamReader) -> dict[str, Any] | bytes:
        """Return a request, in WSGI's form; or the answer to bytes that are no request."""
        try:
            raw = await reader.readuntil(b"\r\n\r\n")
        except asyncio.LimitOverrunError:
            return _reply(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
        line, _, fields = raw.partition(b"\r\n")
        words = line.decode("latin-1").split(" ")
        try:
            headers = http.client.parse_headers(io.BytesIO(fields))
        except http.client.HTTPException:
            headers = None
        if headers is None or len(words) != 3 or not words[2].startswith("HTTP/"):
            return _reply(HTTPStatus.BAD_REQUEST)
        path, _, query = words[1].partition("?")
        found = {"REQUEST_METHOD": words[0], "PATH_INFO": path, "QUERY_STRING": query, "HTTP_ACCEPT_ENCODING": ""}
        return found | {f"HTTP_{name.upper().replace('-', '_')}": value for name, value in headers.items()}

    async def _answer(self, request: dict[str, Any]) -> bytes:
        def answered() -> bytes:
            head: list[Any] = []
            body = b"".join(self._application(request, lambda status, headers: head.extend((status, headers))))
            return _raw(head[0], head[1], b"" if request["REQUEST_METHOD"] == "HEAD" else body, len(body))

        with contextlib.suppress(Exception):  # which the application has logged
            return await self._loop.run_in_executor(self._answering, answered)
        return _reply(HTTPStatus.INTERNAL_SERVER_ERROR)


def _reply(status: HTTPStatus) -> bytes:
    return _raw(f"{status.value} {status.phrase}", [], b"", 0)


def _raw(status: str, headers: Iterable[tuple[str, str]], body: bytes, length: int) -> bytes:
    lines = [f"HTTP/1.1 {status}", *(f"{name}: {value}" for name, value in headers)]
    lines += [f"Content-Length: {length}", "Connection: close", "", ""]
    return "\r\n".join(lines).encode("latin-1") + body
