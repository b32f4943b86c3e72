"""The copies of a worker: merged into runs, queued in batches.

Owns the streams of copies: one a direction, and one on the device. Never decides which copies go together: the caller
hands over all that it knows of at a time.

What is left of merged runs is large. A payload is one run (64 tokens of an 8B model: 8 MiB, of a model of 135M
parameters: 1.4), or a whole slot is; only header pages, one a block, are 4 KiB. At 4 GB/s a page takes 1 us, beside
28 us and more of its payload: a gather kernel, which is faster below some 28 KiB, would win 4 % at most, and take turns
with an engine's.
Invariant: each transfer is reported once, after its bytes are in place or when they will not be.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, get_args

from kvstore_cuda.copies import Run, Runs, Way
from kvstore_cuda.driver import DriverError
from kvstore_tiers.gpu.driver import Driver
from kvstore_tiers.gpu.events import Events

Ended = Callable[[int, DriverError | None], None]  # transfer, what went wrong


class Copies:
    """Of one device. `ended` is called as `Events` says."""

    def __init__(self, driver: Driver, events: Events, ended: Ended) -> None:
        self._driver = driver
        self._events = events
        self._ended = ended
        self._streams: dict[Way, Any] = {way: events.stream() for way in get_args(Way)}

    def start(self, transfers: Sequence[int], groups: Iterable[Sequence[Run]], way: Way) -> None:
        """Queue the copies of some transfers as one batch. Each group is of one registration of host memory, or of two
        chunks: no run reaches over the border of one, whose neighbour may be another."""
        stream = self._streams[way]
        runs = Runs.joined([Runs.of(group).merged() for group in groups])

        def settled(failure: DriverError | None) -> None:
            for transfer in transfers:
                self._ended(transfer, failure)

        self._events.queue(stream, lambda: self._driver.copy(runs, way, stream), settled)
