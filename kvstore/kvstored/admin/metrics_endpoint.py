"""The HTTP endpoint that monitoring scrapes: `GET /metrics`, in Prometheus' and OpenMetrics' text formats.

Owns its listener; the numbers are taken on the daemon's loop, so that they are of one moment. Never does: serve
anything else, or ask who is reading: the numbers name tenants, so `metrics.listen` belongs on loopback or behind what
the operator trusts.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import TimeoutError as FutureTimeout

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from kvstored.admin.bounded_http import BoundedHttp
from kvstored.admin.metrics import Snapshot, families
from kvstored.admin.views import Views
from kvstored.config import ConfigError
from kvstored.config.addresses import address_of, numeric
from kvstored.config.schema import MetricsSection
from kvstored.process import connections_within
from kvstored.sockets import SocketError
from kvstored.telemetry import Flows, Latencies

log = logging.getLogger(__name__)
SNAPSHOT_TIMEOUT_S = 5.0  # of a scrape; Prometheus gives up after 10 by default


class MetricsEndpoint:
    """Listens as `section` says, as soon as it is made. Raises SocketError when it cannot."""

    def __init__(self, section: MetricsSection, views: Views, flows: Flows, latencies: Latencies) -> None:
        def take() -> Snapshot:
            tiers, misses = views.tiers(with_classes=False), flows.misses_by_name()
            return Snapshot(views.status(), tiers, views.tenants(), misses, latencies.snapshot())

        registry = CollectorRegistry(auto_describe=False)
        registry.register(_OnLoop(asyncio.get_running_loop(), take))
        most = connections_within(section.connections)
        self._http = BoundedHttp(_listener(section.listen, most), make_wsgi_app(registry), most)

    def close(self) -> None:
        """End all connections; waits for a thread."""
        self._http.close()


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
