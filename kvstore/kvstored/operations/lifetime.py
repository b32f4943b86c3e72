"""Flush, drain and stop: the end of a daemon's life in good order.

Draining refuses new clients and new puts wait for nothing; reads go on until the clients leave.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from enum import Enum

from kvstore_proto.v1 import admin_pb2 as pb
from kvstored.dataplane.handshake import HandshakeServer
from kvstored.dataplane.leases import LeaseTable
from kvstored.dataplane.sessions import SessionTable
from kvstored.movement.writeback import WriteBack

_DEFAULT_TIMEOUT_S = 30.0
_POLL_S = 0.05


class State(Enum):
    STARTING = "starting"
    SERVING = "serving"
    DRAINING = "draining"
    STOPPING = "stopping"


class Lifetime:
    """`stop` is called once a shutdown is wanted; it returns at once."""

    def __init__(
        self,
        handshake: HandshakeServer,
        sessions: SessionTable,
        leases: LeaseTable,
        writeback: WriteBack | None,
        stop: Callable[[], None],
    ) -> None:
        self._handshake = handshake
        self._sessions = sessions
        self._leases = leases
        self._writeback = writeback
        self._stop = stop
        self.state = State.STARTING

    async def flush(self, request: pb.FlushRequest) -> pb.FlushReply:
        if self._writeback is None:
            return pb.FlushReply()
        before = self._writeback.pending()
        left = await self._writeback.flush((request.timeout_ms / 1000) or _DEFAULT_TIMEOUT_S)
        return pb.FlushReply(written_blocks=max(0, before - left), pending_blocks=left)

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
        self.state = State.STOPPING
        asyncio.get_running_loop().call_later(0.05, self._stop)  # the answer goes out first
        return pb.ShutdownReply(pid=os.getpid())
