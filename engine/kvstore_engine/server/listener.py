"""uvicorn, told when to stop by us: the only module that imports it, but for `connection`.

Owns its configuration. Signals are `run`'s, since uvicorn would end the process by the signal that stopped it.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

import uvicorn

from kvstore_engine.server.app import Application
from kvstore_engine.server.connection import Connection

_BACKLOG = 1024
_KEEP_ALIVE_S = 75


class Listener(uvicorn.Server):
    """Serves `application` on `bound`, a socket that listens."""

    def __init__(self, application: Application, bound: socket.socket, drain_s: float) -> None:
        super().__init__(
            uvicorn.Config(
                application,
                http=Connection,
                ws="none",
                lifespan="off",
                interface="asgi3",
                access_log=False,  # a line for each request would cost more than the request
                log_config=None,
                backlog=_BACKLOG,
                timeout_keep_alive=_KEEP_ALIVE_S,
                timeout_graceful_shutdown=max(1, round(drain_s)),
                server_header=False,
                proxy_headers=False,
            )
        )
        self._bound = bound

    async def run_until_stopped(self) -> None:
        """Returns when `stop` has been called and what ran has ended or was cut off."""
        await self.serve(sockets=[self._bound])

    def stop(self) -> None:
        self.should_exit = True

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
