"""Health by gRPC's own protocol (grpc.health.v1): SERVING while the daemon takes new work, otherwise NOT_SERVING.

There is one state for every socket and every service, and one more for each tier, such as `kvstored.nvme` and
`kvstored.host`: NOT_SERVING while the tier is shed. A shed tier leaves the others SERVING, since blocks in DRAM go on
being served. The module follows the daemon's lifetime and its degraded modes; it never decides them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health

from kvstored.admin.lifetime import DaemonState, Phase
from kvstored.store.degraded.modes import SHEDDING, DegradedModes

SERVICE = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name

TIER_PREFIX = "kvstored."


class HealthService:
    """The gRPC health service: SERVING or NOT_SERVING for "" (the daemon), for each of `services` by full name, and for
    each of `tiers`.
    """

    def __init__(self, phase: Phase, services: Iterable[str], modes: DegradedModes, tiers: Iterable[str]) -> None:
        self._phase = phase
        self._modes = modes
        self._tiers = tuple(tiers)
        self._servicer = health.HealthServicer()
        self._services = ("", *services)
        self._updates: set[asyncio.Task[None]] = set()
        for followed in (phase, modes):
            followed.on_change.append(self._follow)
        self._follow(phase.state)

    def serve_on(self, server: grpc.aio.Server) -> None:
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)

    def _follow(self, _: DaemonState | str) -> None:
        """Let a task update the servicer, so that a change of state does not wait for watchers."""
        task = asyncio.create_task(self._update())
        self._updates.add(task)
        task.add_done_callback(self._updates.discard)

    async def _update(self) -> None:
        status = health_pb2.HealthCheckResponse
        is_serving = self._phase.state is DaemonState.SERVING
        for tier in self._tiers:
            is_up = is_serving and self._modes.mode(tier) not in SHEDDING
            await self._servicer.set(f"{TIER_PREFIX}{tier}", status.SERVING if is_up else status.NOT_SERVING)
        for service in self._services:  # the state of this moment: of two tasks the later one is right
            is_serving = self._phase.state is DaemonState.SERVING
            await self._servicer.set(service, status.SERVING if is_serving else status.NOT_SERVING)
