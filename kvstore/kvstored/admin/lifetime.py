"""Flush, drain and stop: the orderly end of a daemon's life.

A draining daemon refuses new clients; connected clients are served until they leave.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from enum import Enum

from kvstore_proto.v1 import admin_pb2 as pb
from kvstored.admin.durable_copies import save
from kvstored.clients.handshake import HandshakeServer
from kvstored.clients.sessions import ClientSessions
from kvstored.store.assembly import Store

_DEFAULT_TIMEOUT_S = 30.0
_SHUTDOWN_DRAIN_MS = 10_000
_POLL_S = 0.05


class DaemonState(Enum):
    STARTING = "starting"
    SERVING = "serving"
    DRAINING = "draining"
    STOPPING = "stopping"


class Phase:
    """The present phase of the daemon: starting, serving, draining or stopping. The functions in `on_change` are called
    at once with each new phase. `ready_after_s` is the number of seconds from the start of the process to serving, 0
    before that."""

    def __init__(self) -> None:
        self._state = DaemonState.STARTING
        self.on_change: list[Callable[[DaemonState], None]] = []
        self.has_served = False
        self.ready_after_s = 0.0

    @property
    def state(self) -> DaemonState:
        return self._state

    @state.setter
    def state(self, state: DaemonState) -> None:
        self._state = state
        self.has_served = self.has_served or state is DaemonState.SERVING
        for notify in self.on_change:
            notify(state)


class Lifetime:
    """A service by which an operator flushes, drains or shuts down the daemon; it changes `phase`. `stop` is called to
    begin a shutdown and returns at once. `after_stop()` returns a sentence that says what happens to the blocks in DRAM
    after the shutdown."""

    def __init__(
        self,
        phase: Phase,
        handshake: HandshakeServer,
        sessions: ClientSessions,
        store: Store,
        stop: Callable[[], None],
        after_stop: Callable[[], str],
    ) -> None:
        self._phase = phase
        self._handshake = handshake
        self._sessions = sessions
        self._store = store
        self._stop = stop
        self._after_stop = after_stop
        self._shutting_down: asyncio.Task[None] | None = None

    async def flush(self, request: pb.FlushRequest) -> pb.FlushReply:
        """Write the blocks that are only in memory to NVMe, as far as nothing there has to leave that was used as late.
        Return how many were written, how many are still pending, and how many were kept in memory.
        """
        residency, writeback = self._store.residency, self._store.writeback
        if writeback is None:
            return pb.FlushReply()
        timeout_s = (request.timeout_ms / 1000) or _DEFAULT_TIMEOUT_S
        saved, left, kept = await save(residency, writeback, range(residency.in_memory), timeout_s)
        return pb.FlushReply(written_blocks=saved, pending_blocks=left, kept_blocks=kept)

    async def drain(self, request: pb.DrainRequest) -> pb.DrainReply:
        """Refuse new clients, and wait until the connected ones have left or the timeout in `request` is over. With
        `undo` in `request`, accept new clients again. Return the numbers of clients, leases and unwritten blocks that
        are left."""
        phase, writeback = self._phase, self._store.writeback
        self._handshake.accepting = request.undo
        phase.state = DaemonState.SERVING if request.undo else DaemonState.DRAINING
        if not request.undo:
            deadline = asyncio.get_running_loop().time() + ((request.timeout_ms / 1000) or _DEFAULT_TIMEOUT_S)
            while len(self._sessions) and asyncio.get_running_loop().time() < deadline:
                await asyncio.sleep(_POLL_S)
            if writeback is not None:
                await writeback.flush(max(1.0, deadline - asyncio.get_running_loop().time()))
        return pb.DrainReply(
            clients_left=len(self._sessions),
            leases_left=len(self._store.leases),
            pending_blocks=writeback.pending() if writeback is not None else 0,
            state=phase.state.value,
        )

    def shutdown(self, request: pb.ShutdownRequest) -> pb.ShutdownReply:
        """Begin to stop the daemon, and return its pid. With `now` in `request` it stops at once, otherwise after its
        clients had ten seconds to leave. Waiting blocks are written to NVMe in both cases."""
        self._shutting_down = asyncio.create_task(self._shut_down(request.now))
        return pb.ShutdownReply(pid=os.getpid(), after_stop=self._after_stop())

    async def _shut_down(self, now: bool) -> None:
        if not now:
            await self.drain(pb.DrainRequest(timeout_ms=_SHUTDOWN_DRAIN_MS))
        self._phase.state = DaemonState.STOPPING
        await asyncio.sleep(_POLL_S)  # the answer goes out first
        self._stop()
