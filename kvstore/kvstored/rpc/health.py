"""Health as gRPC's own protocol tells it (grpc.health.v1): SERVING while the daemon takes new work, else NOT_SERVING.

One state for every socket and every service. Follows the daemon's lifetime; never decides it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health

from kvstored.operations.lifetime import Lifetime, State

SERVICE = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name


class Health:
    """Answers Check and Watch for "" and for each of `services`, by their full names."""

    def __init__(self, lifetime: Lifetime, services: Iterable[str]) -> None:
        self._lifetime = lifetime
        self._servicer = health.HealthServicer()
        self._services = ("", *services)
        self._telling: set[asyncio.Task[None]] = set()
        lifetime.on_change.append(self._follow)
        self._follow(lifetime.state)

    def serve_on(self, server: grpc.aio.Server) -> None:
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)

    def _follow(self, _: State) -> None:
        """Those who watch are told by a task: a change of state waits for nobody."""
        task = asyncio.create_task(self._tell())
        self._telling.add(task)
        task.add_done_callback(self._telling.discard)

    async def _tell(self) -> None:
        status = health_pb2.HealthCheckResponse
        for service in self._services:  # the state as it is by then, so that of two tasks the later word counts
            is_serving = self._lifetime.state is State.SERVING
            await self._servicer.set(service, status.SERVING if is_serving else status.NOT_SERVING)
