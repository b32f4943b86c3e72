"""The socket files of a serving daemon, and the gRPC servers behind them: a file that was removed is bound again, and
its clients stay connected.

Invariant: a file that another process put there is left alone.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import grpc

from kvstored.process import file_identity
from kvstored.sockets import SocketError, remove_socket

log = logging.getLogger(__name__)
LOOK_S = 2.0
STOP_S = 0.5  # for calls of a server that stops
_LEAVING_S = 86_400.0  # for the calls of a server whose socket file was removed
Bind = Callable[[], Awaitable[None]]


@dataclass
class _File:
    path: Path
    bind: Bind
    identity: tuple[int, int] | None = None
    trouble: str = ""  # that was said already
    stays: bool = False  # when the daemon ends


class SocketFiles:
    """The socket files of a daemon. A file that was removed is made again by binding its socket anew. `prepare` makes
    the socket directory. `now_s` is a monotonic clock in seconds."""

    def __init__(self, prepare: Callable[[], None], now_s: Callable[[], float]) -> None:
        self._prepare, self._now_s = prepare, now_s
        self._files: list[_File] = []
        self._next_s = 0.0
        self._binding: asyncio.Task[None] | None = None

    async def bind(self, path: Path, bind: Bind, *, stays: bool = False) -> None:
        """Call `bind` to bind the socket `path`, now and whenever its file is found missing. With `stays`, the file is
        the service manager's, and is left when the daemon ends. Raises the errors of `bind`.
        """
        await bind()
        self.watch(path, bind, stays=stays)

    def watch(self, path: Path, bind: Bind, *, is_bound: bool = True, stays: bool = False) -> None:
        """Call `bind` to bind the socket `path` whenever its file is found missing. `is_bound` says whether the present
        file is this daemon's. With `stays`, that file is left when the daemon ends."""
        self._files.append(_File(path, bind, file_identity(path) if is_bound else None, stays=stays))

    def remove(self, path: Path) -> None:
        """Remove the file of the socket `path`, if it is this daemon's, and do not bind it again."""
        for file in [file for file in self._files if file.path == path]:
            self._files.remove(file)
            self._remove(file)

    def tick(self) -> None:
        """Check the files, if the last check was some seconds ago. Call it from a timer."""
        if self._now_s() < self._next_s or (self._binding is not None and not self._binding.done()):
            return
        self._next_s = self._now_s() + LOOK_S
        missing = [file for file in self._files if self._is_missing(file)]
        if missing:
            self._binding = asyncio.get_running_loop().create_task(self._bind_again(missing))

    async def close(self) -> None:
        """Stop checking the socket files, and remove the ones that belong to this daemon."""
        if self._binding is not None:
            self._binding.cancel()
            await asyncio.gather(self._binding, return_exceptions=True)
        for file in self._files:
            self._remove(file)
        self._files.clear()

    def _remove(self, file: _File) -> None:
        if not file.stays and file.identity is not None and file_identity(file.path) == file.identity:
            remove_socket(file.path)

    def _is_missing(self, file: _File) -> bool:
        found = file_identity(file.path)
        if found is not None and found != file.identity:
            self._say(file, "another process has put its own file there; clients that come now reach that one")
        return found is None

    async def _bind_again(self, missing: list[_File]) -> None:
        for file in missing:
            try:
                self._prepare()
                if file.path.parent.exists():  # else `bind` makes it
                    _require_room(file.path)
                await file.bind()
            except (SocketError, OSError) as error:
                why = error.strerror if isinstance(error, OSError) else error
                self._say(file, f"it was removed, and cannot be made again: {why}")
                continue
            file.identity, file.trouble, file.stays = file_identity(file.path), "", False
            log.warning("%s was removed, and is made again; connected clients did not notice", file.path)

    def _say(self, file: _File, trouble: str) -> None:
        if trouble != file.trouble:
            file.trouble = trouble
            log.error("%s: %s", file.path, trouble)


async def serve_grpc(
    files: SocketFiles,
    path: Path,
    make: Callable[[], grpc.aio.Server],
    admit: Callable[[Path], None],
    stack: AsyncExitStack,
) -> None:
    """Start the gRPC server that `make` returns, which is bound to `path`, and a new one whenever the file is found
    missing; `stack` stops it.

    `admit(path)` sets who may connect; if it raises, nothing is served, and no file is left. A server whose file was
    removed accepts nothing new, and ends with its last call.
    """
    served: list[grpc.aio.Server] = []
    leaving: set[asyncio.Task[None]] = set()

    async def bind() -> None:
        async with AsyncExitStack() as started:
            started.callback(remove_socket, path)
            server = make()
            await start_server(server, started)
            admit(path)
            started.pop_all()
        stack.push_async_callback(server.stop, STOP_S)
        for former in served:
            leaving.add(task := asyncio.create_task(former.stop(_LEAVING_S)))
            task.add_done_callback(leaving.discard)
        served[:] = [server]

    await files.bind(path, bind)


async def start_server(server: grpc.aio.Server, stack: AsyncExitStack) -> None:
    """Start `server`, which is bound already. `stack` stops it."""
    stack.push_async_callback(server.stop, STOP_S)
    await server.start()


def _require_room(path: Path) -> None:
    """Raise OSError if no file can be made at `path`. gRPC does not say why it cannot bind, but writes a line to stderr
    each time.
    """
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    path.unlink()
