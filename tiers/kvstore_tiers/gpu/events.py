"""What a worker has queued on its streams, and the thread that waits for its end.

Owns the streams and the events. Never decides what is queued.
Invariant: each piece of work is settled once, after it has ended on the device or when it will not run.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any

from kvstore_cuda.driver import DriverError
from kvstore_tiers.gpu.driver import Driver, ended_after

Settled = Callable[[DriverError | None], None]  # with what went wrong


class Events:
    """`settled` of what is queued is called on the thread that waits, or on the caller's."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._streams: list[Any] = []
        self._under_way: SimpleQueue[tuple[Any, Any, Settled] | None] = SimpleQueue()  # event, its stream
        self._spare: SimpleQueue[Any] = SimpleQueue()
        self._waiter = threading.Thread(target=self._wait, name="gpu-events", daemon=True)
        self._waiter.start()

    def stream(self) -> Any:
        """A new one, which `settle` waits for."""
        self._streams.append(self._driver.stream())
        return self._streams[-1]

    def queue(self, stream: Any, work: Callable[[], None], settled: Settled) -> None:
        """`work` queues something on the stream."""
        try:
            work()
            event = self._spare_event()
            try:
                self._driver.record(event, stream)
            except DriverError:
                self._spare.put(event)
                raise
        except DriverError as error:
            settled(ended_after(self._driver, error, stream))
        else:
            self._under_way.put((event, stream, settled))

    def _spare_event(self) -> Any:
        """From any thread: another one may take the last that is spare."""
        try:
            return self._spare.get_nowait()
        except Empty:
            return self._driver.event()

    def settle(self) -> None:
        """Wait until nothing is under way on the device."""
        for stream in self._streams:
            self._driver.synchronize(stream)

    def close(self) -> None:
        self._under_way.put(None)
        self._waiter.join()

    def _wait(self) -> None:
        self._driver.use_in_this_thread()
        while (item := self._under_way.get()) is not None:
            event, stream, settled = item
            failure: DriverError | None = None
            try:
                self._driver.wait(event)
                self._spare.put(event)
            except DriverError as error:
                failure = ended_after(self._driver, error, stream)
            settled(failure)
