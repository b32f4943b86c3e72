"""Flush, drain and stop: the end of a daemon's life in good order.

Draining refuses new clients; those connected are served until they leave.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from enum import Enum

from kvstore_proto.v1 import admin_pb2 as pb
from kvstored.admin.durable_copies import save
from kvstored.clients.handshake import HandshakeServer
from kvstored.clients.sessions import SessionTable
from kvstored.store.blocks import Residency
from kvstored.store.leases import LeaseTable
from kvstored.store.transfer.writeback import WriteBack

_DEFAULT_TIMEOUT_S = 30.0
_SHUTDOWN_DRAIN_MS = 10_000
_POLL_S = 0.05


class State(Enum):
    STARTING = "starting"
    SERVING = "serving"
    DRAINING = "draining"
    STOPPING = "stopping"


class Lifetime:
    """`stop` is called once a shutdown is wanted; it returns at once. `after_stop()` says what becomes of DRAM then."""

    def __init__(
        self,
        handshake: HandshakeServer,
        sessions: SessionTable,
        leases: LeaseTable,
        residency: Residency,
        writeback: WriteBack | None,
        stop: Callable[[], None],
        after_stop: Callable[[], str],
    ) -> None:
        self._handshake = handshake
        self._sessions = sessions
        self._leases = leases
        self._residency = residency
        self._shutting_down: asyncio.Task[None] | None = None
        self._writeback = writeback
        self._stop = stop
        self._after_stop = after_stop
        self._state = State.STARTING
        self.on_change: list[Callable[[State], None]] = []  # each is called with the new state, at once

    @property
    def state(self) -> State:
        return self._state

    @state.setter
    def state(self, state: State) -> None:
        self._state = state
        for notify in self.on_change:
            notify(state)

    async def flush(self, request: pb.FlushRequest) -> pb.FlushReply:
        """Write what is only in DRAM, regardless of the durability that each put asked for."""
        if self._writeback is None:
            return pb.FlushReply()
        timeout_s = (request.timeout_ms / 1000) or _DEFAULT_TIMEOUT_S
        in_memory = range(self._residency.in_memory)
        saved, left = await save(self._residency, self._writeback, in_memory, timeout_s)
        return pb.FlushReply(written_blocks=saved, pending_blocks=left)

    async def drain(self, request: pb.DrainRequest) -> pb.DrainReply:
        """Refuse new clients, wait until the others have left or the time is up; `undo` takes new ones again."""
        if request.undo:
            self.state = State.SERVING
            self._handshake.accepting = True
        else:
            self.state = State.DRAINING
            self._handshake.accepting = False
            deadline = asyncio.get_running_loop().time() + ((request.timeout_ms / 1000) or _DEFAULT_TIMEOUT_S)
            while len(self._sessions) and asyncio.get_running_loop().time() < deadline:
                await asyncio.sleep(_POLL_S)
            if self._writeback is not None:
                await self._writeback.flush(max(1.0, deadline - asyncio.get_running_loop().time()))
        return pb.DrainReply(
            clients_left=len(self._sessions),
            leases_left=len(self._leases),
            pending_blocks=self._writeback.pending() if self._writeback is not None else 0,
            state=self.state.value,
        )

    def shutdown(self, request: pb.ShutdownRequest) -> pb.ShutdownReply:
        """Stop: at once with `now`, else after clients had some time to leave. Either way the daemon flushes."""
        self._shutting_down = asyncio.create_task(self._shut_down(request.now))
        return pb.ShutdownReply(pid=os.getpid(), after_stop=self._after_stop())

    async def _shut_down(self, now: bool) -> None:
        if not now:
            await self.drain(pb.DrainRequest(timeout_ms=_SHUTDOWN_DRAIN_MS))
        self.state = State.STOPPING
        await asyncio.sleep(_POLL_S)  # the answer goes out first
        self._stop()
