"""uvicorn's server and its configuration: with `connection`, the only module that imports it."""

from __future__ import annotations

import contextlib
import resource
import socket
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp

from kvstore_engine.server.connection import Connection

_BACKLOG = 128  # also the most that are accepted before one is closed
_KEEP_ALIVE_S = 75


class Listener(uvicorn.Server):
    """Serves `application` on `bound`, a socket that listens, until `should_exit` is set and what ran has ended or was
    cut off after `drain_s`. At most `connections` at once, and half of the descriptors that there may be.
    """

    def __init__(
        self, application: ASGIApp, bound: socket.socket, drain_s: float, connections: int = Connection.most
    ) -> None:
        most = min(connections, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)
        config = uvicorn.Config(
            application,
            http=type("BoundedConnection", (Connection,), {"most": most}),
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
        """Signals are `run`'s: uvicorn ends the process by the signal that stopped it, and not with status 0."""
        yield
