"""The worker process of a remote tier: it runs the tier's driver, seals what is written and opens what was read.

    python -m kvstore_tiers.remote.worker SOCKET_FD MEMORY_FD

One side of a socket pair carries JSON messages; values travel in the shared memory. The first message has the settings
(`RemoteSettings`), the first answer says that the driver is open, or why it is not. Then each request has a number, and
one answer with that number. The process ends when its daemon does. Writes that wait together go to the driver in one
call; reads come together in one request. The daemon decides what is stored and read.
"""

from __future__ import annotations

import errno
import json
import logging
import mmap
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from queue import Empty, SimpleQueue
from typing import Any

from kvstore_tiers.objects import DamagedObject
from kvstore_tiers.remote.driver import Driver, MemoryHeld, Placed, WriteResult
from kvstore_tiers.remote.drivers import open_driver
from kvstore_tiers.remote.encryption import Sealer
from kvstore_tiers.remote.envelope import HEAD_BYTES, TAG_BYTES, value_bytes
from kvstore_tiers.remote.process import RemoteSettings

WRITE_BATCH = 64
Message = dict[str, Any]
_LOG = logging.getLogger(__name__)


class RemoteWorker:
    """The worker process of a remote tier, as an object: it reads the daemon's requests from `connection`, calls the
    store's `driver`, and answers. Values are exchanged in `memory`, which the daemon maps too. `sealer` encrypts them.
    """

    def __init__(self, connection: Connection, memory: memoryview, driver: Driver, sealer: Sealer) -> None:
        self._connection = connection
        self._memory = memory
        self._driver = driver
        self._sealer = sealer
        self._sending = threading.Lock()
        self._queues: dict[str, SimpleQueue[Message]] = {kind: SimpleQueue() for kind in ("read", "write", "ask")}

    def run(self, readers: int, writers: int) -> None:
        """Serve the daemon's requests until it closes the connection, with `readers` threads for reads and `writers`
        threads for writes and removals.
        """
        for kind, count, most, serve in (
            ("read", readers, 1, self._read),
            ("write", writers, WRITE_BATCH, self._write),
            ("ask", 1, 1, self._ask),
        ):
            for number in range(count):
                serving = threading.Thread(
                    target=self._serve, args=(self._queues[kind], most, serve), name=f"{kind}-{number}", daemon=True
                )
                serving.start()
        kinds = {"read": "read", "write": "write", "remove": "write", "evict": "write"}
        while True:
            try:
                request = json.loads(self._connection.recv_bytes())
            except (EOFError, OSError):
                return
            self._queues[kinds.get(request["verb"], "ask")].put(request)

    def _serve(self, queue: SimpleQueue[Message], most: int, serve: Callable[[Sequence[Message]], None]) -> None:
        while True:
            requests = [queue.get()]
            with suppress(Empty):
                while len(requests) < most:
                    requests.append(queue.get_nowait())
            try:
                serve(requests)
            except MemoryHeld as error:  # an answer would let the daemon use that memory again
                _LOG.error("the worker ends: %s", error)
                os._exit(1)
            except Exception as error:
                if not isinstance(error, OSError):
                    _LOG.exception("the driver broke")
                failure = {"error": str(error) or type(error).__name__, "errno": _errno_of(error)}
                for request in requests:
                    self._answer(request, failure)

    def _answer(self, request: Message, answer: Message) -> None:
        """Answer a request. Only the first answer counts for the daemon."""
        with self._sending:
            self._connection.send_bytes(json.dumps({"id": request["id"], **answer}).encode())

    # Kinds of requests

    def _read(self, requests: Sequence[Message]) -> None:
        """Read the values of one request; each read has the place of the value, and of the image to open."""
        (request,) = requests
        reads = request["reads"]
        names = [bytes.fromhex(read["name"]) for read in reads]
        values = [self._part(read["value"]) for read in reads]
        sizes = self._driver.read(
            [Placed(self._sealer.value_name(name), value) for name, value in zip(names, values, strict=True)]
        )
        found = [self._opened(*each) for each in zip(reads, names, values, sizes, strict=True)]
        self._answer(request, {"found": found})

    def _opened(self, read: Message, name: bytes, value: memoryview, size: int) -> list[int] | str | None:
        """Return offset and bytes of the image, or the defect of the value; None if there is no value."""
        if not size:
            return None
        if size > len(value):
            return f"the value has {size} bytes, more than {len(value)}"
        offset, nbytes = read["image"]
        try:
            image = self._sealer.open(name, value[:size], self._part((offset, nbytes)), plain=read["plain"])
        except DamagedObject as damage:
            return str(damage)
        is_in_value = len(image) > 0 and size == value_bytes(len(image)) and value[5] == 0
        return [read["value"][0] + HEAD_BYTES if is_in_value else offset, len(image)]

    def _write(self, requests: Sequence[Message]) -> None:
        """Write values, evict and remove, in order: neighbours of one kind in one call."""
        at = 0
        while at < len(requests):
            verb, end = requests[at]["verb"], at
            while end < len(requests) and requests[end]["verb"] == verb:
                end += 1
            same, at = requests[at:end], end
            if verb == "write":
                self._write_values(same)
                continue
            names = [self._sealer.value_name(bytes.fromhex(name)) for request in same for name in request["names"]]
            if verb == "remove":
                self._driver.remove(names)
            elif not self._driver.evicts:
                self._driver.evict(names)
            for request in same:
                self._answer(request, {})

    def _write_values(self, requests: Sequence[Message]) -> None:
        placed: list[Placed] = []
        for request in requests:
            name, value = bytes.fromhex(request["name"]), self._part(request["value"])
            image = self._part(request["image"])
            self._sealer.seal(name, image, value, plain=request["plain"])
            placed.append(Placed(self._sealer.value_name(name), value))
        for request, written in zip(requests, self._driver.write(placed), strict=True):
            if written is WriteResult.NO_ROOM:
                self._answer(request, {"error": "the store has no room", "errno": errno.ENOSPC})
            elif written is WriteResult.BEGUN:
                self._answer(
                    request, {"error": "another node is writing this value, or died at it", "errno": errno.EBUSY}
                )
            else:
                self._answer(request, {})

    def _ask(self, requests: Sequence[Message]) -> None:
        (request,) = requests
        if request["verb"] == "probe":
            self._driver.probe()
            self._answer(request, {})
            return
        sizes = self._driver.sizes([self._sealer.value_name(bytes.fromhex(name)) for name in request["names"]])
        overhead = HEAD_BYTES + TAG_BYTES
        self._answer(request, {"sizes": [max(0, size - overhead) for size in sizes]})

    def _part(self, place: Sequence[int]) -> memoryview:
        offset, nbytes = place
        return self._memory[offset : offset + nbytes]


def _errno_of(error: Exception) -> int:
    if isinstance(error, TimeoutError):
        return errno.ETIMEDOUT
    return (error.errno if isinstance(error, OSError) else 0) or errno.EIO


def main() -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's: the daemon ends this process
    logging.basicConfig(format="kvstored remote worker: %(message)s", level=logging.WARNING)
    connection = Connection(int(sys.argv[1]))
    mapping = mmap.mmap(int(sys.argv[2]), 0)
    settings = RemoteSettings.unpack(connection.recv_bytes())
    try:
        driver = open_driver(
            settings.url, timeout_s=settings.timeout_s, threads=settings.readers + settings.writers + 1,
            credentials=settings.credentials,
        )  # fmt: skip
        driver.follow(settings.owner, settings.generation)
        driver.lend(memoryview(mapping))
    except Exception as error:
        connection.send_bytes(json.dumps({"refused": str(error) or type(error).__name__}).encode())
        return 1
    connection.send_bytes(json.dumps({"largest_bytes": driver.largest_value_bytes}).encode())
    worker = RemoteWorker(connection, memoryview(mapping), driver, Sealer(bytes.fromhex(settings.secret)))
    worker.run(min(settings.readers, driver.reads_at_once), settings.writers)
    driver.close()
    return 0


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)  # threads of the driver's library may still run
