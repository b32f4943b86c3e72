"""The worker reads slot images from files by itself: the header page to host memory, the payload to the device.

Owns the threads that read and the stream of their copies. Never judges what it has read, but that it is whole.
Invariant: each load is reported once, when nothing of it is under way any more; its descriptor is closed then.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue
from threading import Thread

from kvstore_cuda.copies import Run, Runs
from kvstore_cuda.driver import DriverError
from kvstore_proto.arena import HEADER_BYTES
from kvstore_tiers.gpu.direct_storage import DirectStorage
from kvstore_tiers.gpu.driver import Driver
from kvstore_tiers.gpu.events import Events
from kvstore_tiers.sizes import aligned_up

READERS = 4  # chosen, not measured: each has a whole block under way
Ended = Callable[[int, OSError | None], None]  # transfer, what went wrong; with an errno where the file cannot be read


@dataclass(frozen=True, slots=True)
class FileRead:
    """Of a file from `offset` on: a header page to `host`, and the payload to the address `device`, by way of the rest
    of `host` (at the address `host_address`) unless it `is_direct`."""

    transfer: int
    descriptor: int
    offset: int
    payload_bytes: int
    host: memoryview
    host_address: int
    device: int
    is_direct: bool


class FileReads:
    """`direct` is None where there is no direct storage. `ended` is called on threads of ours or of `events`."""

    def __init__(self, driver: Driver, events: Events, direct: DirectStorage | None, ended: Ended) -> None:
        self._driver = driver
        self._events = events
        self._stream = events.stream()
        self._direct = direct
        self._ended = ended
        self._queue: SimpleQueue[FileRead] = SimpleQueue()
        self._threads: list[Thread] = []

    def start(self, read: FileRead) -> None:
        """Returns at once; the descriptor is ours from now on."""
        if not self._threads:
            self._threads = [Thread(target=self._serve, name=f"gpu-file-{at}", daemon=True) for at in range(READERS)]
            for thread in self._threads:
                thread.start()
        self._queue.put(read)

    def _serve(self) -> None:
        self._driver.use_in_this_thread()
        while True:
            read = self._queue.get()
            try:
                self._read(read)
            except OSError as error:
                self._end(read, error)

    def _read(self, read: FileRead) -> None:
        payload_pages = aligned_up(read.payload_bytes)
        if read.is_direct:
            if self._direct is None:
                raise OSError("this worker has no direct storage")
            _read_whole(read.descriptor, read.host[:HEADER_BYTES], read.offset)
            device, at = read.device, read.offset + HEADER_BYTES
            got = self._direct.read(read.descriptor, at, device, payload_pages)
            if got != payload_pages:
                raise OSError(f"direct storage read {got} of {payload_pages} bytes")
            self._end(read, None)
            return
        _read_whole(read.descriptor, read.host[: HEADER_BYTES + payload_pages], read.offset)
        run = Runs.of([Run(read.device, read.host_address + HEADER_BYTES, read.payload_bytes)])

        def settled(failure: DriverError | None) -> None:
            self._end(read, failure)

        stream = self._stream
        self._events.queue(stream, lambda: self._driver.copy(run, "to device", stream), settled)

    def _end(self, read: FileRead, failure: OSError | None) -> None:
        os.close(read.descriptor)
        self._ended(read.transfer, failure)


def _read_whole(descriptor: int, into: memoryview, offset: int) -> None:
    """One call: the kernel reads that much at once. Raises OSError."""
    got = os.preadv(descriptor, [into], offset)
    if got != len(into):
        raise OSError(errno.EIO, f"{got} of {len(into)} bytes read")
