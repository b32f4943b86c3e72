"""The copies of a worker: merged into runs, queued in batches, their ends awaited by a thread of its own.

Owns the streams, one a direction, and the events. Never decides which copies go together: the caller hands over all
that it knows of at a time.
Invariant: each transfer is reported once, after its bytes are in place or when they will not be.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from queue import SimpleQueue
from typing import Any

from kvstore_proto.cuda_driver import DriverError
from kvstore_tiers.gpu.driver import Driver, Run

Ended = Callable[[int, str, bool], None]  # transfer, what went wrong, whether the context is broken


def merged(runs: Iterable[Run]) -> list[Run]:
    """The same copies with neighbours in one: the driver merges none, and small ones are slow."""
    joined: list[Run] = []
    for run in sorted(runs, key=lambda run: run.to):
        last = joined[-1] if joined else None
        if last and last.to + last.nbytes == run.to and last.source + last.nbytes == run.source:
            joined[-1] = Run(last.to, last.source, last.nbytes + run.nbytes)
        else:
            joined.append(run)
    return joined


class Copies:
    """Both directions of one device. `ended` is called on the thread that waits, or on the caller's."""

    def __init__(self, driver: Driver, ended: Ended) -> None:
        self._driver = driver
        self._ended = ended
        self._streams = {to_device: driver.stream() for to_device in (True, False)}
        self._under_way: SimpleQueue[tuple[Any, Sequence[int]] | None] = SimpleQueue()
        self._spare: SimpleQueue[Any] = SimpleQueue()
        self._waiter = threading.Thread(target=self._wait, name="gpu-events", daemon=True)
        self._waiter.start()

    def start(self, transfers: Sequence[int], runs: Sequence[Run], *, to_device: bool) -> None:
        """Queue the copies of some transfers as one batch."""
        stream = self._streams[to_device]
        try:
            self._driver.copy(merged(runs), to_device=to_device, stream=stream)
            event = self._driver.event() if self._spare.empty() else self._spare.get()
            self._driver.record(event, stream)
        except DriverError as error:
            self._fail(transfers, error, stream)
        else:
            self._under_way.put((event, transfers))

    def settle(self) -> None:
        """Wait until nothing is under way on the device."""
        for stream in self._streams.values():
            self._driver.synchronize(stream)

    def close(self) -> None:
        self._under_way.put(None)
        self._waiter.join()

    def _fail(self, transfers: Sequence[int], error: DriverError, stream: Any) -> None:
        """A part may be under way: nothing is reported before that has ended, since then memory is used anew."""
        try:
            self._driver.synchronize(stream)
        except DriverError as worse:
            error = worse
        for transfer in transfers:
            self._ended(transfer, str(error), error.is_final)

    def _wait(self) -> None:
        self._driver.use_in_this_thread()
        while (item := self._under_way.get()) is not None:
            event, transfers = item
            failure: DriverError | None = None
            try:
                self._driver.wait(event)
                self._spare.put(event)
            except DriverError as error:
                failure = error
            for transfer in transfers:
                self._ended(transfer, str(failure or ""), failure is not None and failure.is_final)
