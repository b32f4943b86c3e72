"""A proxy of a Unix socket that is slow, or loses connections: a network between a daemon and its remote store."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PIECE_BYTES = 64 << 10


class UnixProxy:
    """`delay_s` is added to each piece, in each direction, without limiting how many are on their way; of the pieces, a
    share of `loss` breaks its connection instead."""

    def __init__(self, target: Path) -> None:
        self._target = target
        self.delay_s = 0.0
        self.loss = 0.0
        self._random = random.Random(1)

    async def serve(self, path: Path, ready: threading.Event) -> None:
        server = await asyncio.start_unix_server(self._connected, str(path))
        ready.set()
        async with server:
            await server.serve_forever()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there, back = await asyncio.open_unix_connection(str(self._target))
        except OSError:
            writer.close()
            return
        passing = [asyncio.create_task(self._pass(*pair)) for pair in ((reader, back), (there, writer))]
        await asyncio.wait(passing, return_when=asyncio.FIRST_COMPLETED)
        for task in passing:
            task.cancel()
        for end in (writer, back):
            end.close()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        loop = asyncio.get_running_loop()
        pieces: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()

        async def deliver() -> None:
            while True:
                due_s, piece = await pieces.get()
                await asyncio.sleep(max(0.0, due_s - loop.time()))
                writer.write(piece)
                await writer.drain()

        delivering = asyncio.create_task(deliver())
        try:
            while piece := await reader.read(PIECE_BYTES):
                if self._random.random() < self.loss:
                    return
                pieces.put_nowait((loop.time() + self.delay_s, piece))
        except OSError:
            pass
        finally:
            delivering.cancel()


@contextmanager
def unix_proxy(target: Path, path: Path) -> Iterator[UnixProxy]:
    """Serves `path` in a thread of its own, until the end."""
    proxy, ready, loop = UnixProxy(target), threading.Event(), asyncio.new_event_loop()
    serving = loop.create_task(proxy.serve(path, ready))

    def run() -> None:
        with suppress(asyncio.CancelledError):
            loop.run_until_complete(serving)

    thread = threading.Thread(target=run, name="proxy", daemon=True)
    thread.start()
    ready.wait()
    try:
        yield proxy
    finally:
        loop.call_soon_threadsafe(serving.cancel)
        thread.join()
