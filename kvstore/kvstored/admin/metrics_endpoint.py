"""The HTTP endpoint that monitoring scrapes: `GET /metrics`, in Prometheus' and OpenMetrics' text formats.

Owns its listener and its thread; the numbers are taken on the daemon's loop, so that they are of one moment. Never
does: serve anything else, or ask who is reading: the numbers name tenants, so `metrics.listen` belongs on loopback or
behind what the operator trusts.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from concurrent.futures import TimeoutError as FutureTimeout

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from kvstored.admin.metrics import Snapshot, families
from kvstored.admin.views import Views
from kvstored.sockets import SocketError
from kvstored.telemetry import Flows, Latencies

log = logging.getLogger(__name__)
SNAPSHOT_TIMEOUT_S = 5.0  # of a scrape; Prometheus gives up after 10 by default


class MetricsEndpoint:
    """Listens on `address`, host:port, as soon as it is made. Raises SocketError when it cannot."""

    def __init__(self, address: str, views: Views, flows: Flows, latencies: Latencies) -> None:
        def take() -> Snapshot:
            tiers, misses = views.tiers(with_classes=False), flows.misses_by_name()
            return Snapshot(views.status(), tiers, views.tenants(), misses, latencies.snapshot())

        registry = CollectorRegistry(auto_describe=False)
        registry.register(_OnLoop(asyncio.get_running_loop(), take))
        host, port = address.rsplit(":", 1)
        try:
            self._server, self._thread = start_http_server(int(port), host.strip("[]"), registry)
        except OSError as error:
            raise SocketError(f"cannot listen on metrics.listen {address}: {error.strerror or error}") from None

    def close(self) -> None:
        """Takes up to half a second: for a thread."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _OnLoop(Collector):
    def __init__(self, loop: asyncio.AbstractEventLoop, take: Callable[[], Snapshot]) -> None:
        self._loop, self._take = loop, take

    def collect(self) -> Iterator[Metric]:
        async def taken() -> Snapshot:
            return self._take()

        try:
            snapshot = asyncio.run_coroutine_threadsafe(taken(), self._loop).result(SNAPSHOT_TIMEOUT_S)
        except (FutureTimeout, RuntimeError):  # the daemon is stopping
            log.warning("a scrape of /metrics was not answered within %g s", SNAPSHOT_TIMEOUT_S)
            return
        yield from families(snapshot)
