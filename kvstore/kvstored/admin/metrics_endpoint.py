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

log = logging.getLogger(__name__)
SNAPSHOT_TIMEOUT_S = 5.0  # of a scrape; Prometheus gives up after 10 by default


class MetricsEndpoint:
    """Listens as soon as it is made. Raises OSError when it cannot."""

    def __init__(self, host: str, port: int, take: Callable[[], Snapshot]) -> None:
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_OnLoop(asyncio.get_running_loop(), take))
        self._server, self._thread = start_http_server(port, host.strip("[]"), registry)
        self.port = int(self._server.server_port)

    def close(self) -> None:
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
