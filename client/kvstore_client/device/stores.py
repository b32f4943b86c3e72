"""Payloads on their way from pages of a pool to host memory: the copies of many are queued and waited for at once.

The module owns the payloads under way, and their parts of the buffer. It takes no lock and makes no context current:
the caller has done both. Invariants: a part of the buffer is reused only once its bytes have been taken; a registration
is given back once, when the copies have ended; then each payload knows whether they succeeded. Nothing here waits for a
rate.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from kvstore_client.device.pool import DevicePool, Pages
from kvstore_client.device.registered import RegisteredMemory, Registration
from kvstore_client.device.streams import CopyStream
from kvstore_client.memory import Bytes

BATCH_RUNS = 256  # as many copies are worth a call of their own; fewer wait for those of the next payload


@dataclass(slots=True, eq=False)
class Storing:
    """The copy of one payload from the device to `destination` in host memory, while it is under way. If `taken`, the
    registration of `destination`, is given, the device writes there directly. If it is None, the device writes to
    offset `at` of the pinned buffer, from where the payload is copied. Once `is_over` is True, `error` is the failure
    of the copy, or None if it succeeded.
    """

    destination: Bytes
    taken: Registration | None
    at: int
    is_over: bool = False
    error: BaseException | None = None


class _Collected:
    """Payloads whose copies are not queued yet: `addresses`, and for each the pages of its block in `pool`, behind
    events `after`.
    """

    def __init__(self, pool: DevicePool, after: Sequence[int]) -> None:
        self.pool, self.after = pool, tuple(after)
        self.blocks: list[tuple[int, ...]] = []
        self.addresses: list[int] = []

    def queue(self, stream: CopyStream) -> None:
        """Queue each layer behind its event, or all behind a single one. Raises DeviceError."""
        if len(self.after) > 1:
            batches = self.pool.from_pages(self.blocks, self.addresses)
        else:
            batches = [self.pool.from_pages_at_once(self.blocks, self.addresses)]
        for at, runs in enumerate(batches):
            if at < len(self.after):
                stream.wait(self.after[at])
            stream.queue(runs, "to host")

    @property
    def is_batch(self) -> bool:
        batches = len(self.pool.layers) if len(self.after) > 1 else 1
        return len(self.blocks) * self.pool.block_pages * self.pool.parts >= BATCH_RUNS * batches


class Stores:
    """A queue of stores (copies of blocks from pages of a pool to host memory) on the CUDA stream `stream`. Payloads
    for memory that is not in `registered` pass through `buffer`, which must hold at least one payload. `seen(nbytes,
    seconds)` is called with measured times of copies. `clock` returns seconds.
    """

    def __init__(
        self,
        stream: CopyStream,
        registered: RegisteredMemory,
        buffer: Bytes,
        *,
        seen: Callable[[int, float], None] = lambda nbytes, seconds: None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._seen, self._clock = seen, clock
        self._stream, self._registered = stream, registered
        self._buffer = buffer
        self._buffer_address: int = buffer.__array_interface__["data"][0]
        self._used = 0  # of the buffer
        self._under_way: list[Storing] = []
        self._collected: _Collected | None = None
        self._is_queued = False  # something of what is under way

    def begin(
        self, pool: DevicePool, destination: Bytes, block: Pages, after: Sequence[int], *, slice_bytes: int = 0
    ) -> Storing:
        """Begin to copy a block from its pages in `pool` to `destination`, a slot of staging memory or of an arena.
        Each layer is copied after its CUDA event in `after`, or all after a single event. With `slice_bytes`, copies
        are collected up to that many bytes, and the call then waits for them. Return the store, which `settle` ends.
        Raises DeviceError.
        """
        whole = destination.base if isinstance(destination.base, np.ndarray) else destination
        address = destination.__array_interface__["data"][0]
        start = address - whole.__array_interface__["data"][0]
        taken = self._registered.take(whole, start, destination.nbytes)
        storing = Storing(destination, taken, self._room(destination.nbytes) if taken is None else 0)
        self._under_way.append(storing)
        try:
            at = address if taken is not None else self._buffer_address + storing.at
            self._collect(pool, block, after, at, is_slice=bool(slice_bytes))
        except BaseException as error:
            self.settle(error)  # a part of it may be under way
            raise
        if slice_bytes and sum(each.destination.nbytes for each in self._under_way) >= slice_bytes:
            self.settle()
        return storing

    def settle(self, error: BaseException | None = None) -> None:
        """Wait for all stores that were begun, and note in each whether it succeeded. If `error` is given, all of them
        have failed with it.
        """
        settled, self._under_way = self._under_way, []
        if not settled:
            return
        nothing_else = self._collected is not None and not self._is_queued and not self._collected.after
        begun_s = self._clock()
        for step in (self._queue, self._stream.synchronize):
            try:
                step()
            except BaseException as raised:  # raised again where each of them is waited for
                error = error or raised
        if error is None and nothing_else:
            self._seen(sum(each.destination.nbytes for each in settled), self._clock() - begun_s)
        self._used, self._is_queued = 0, False
        for each in settled:
            if each.taken is not None:
                self._registered.give_back(each.taken)
            elif error is None:
                np.copyto(each.destination, self._buffer[each.at : each.at + each.destination.nbytes])
            each.error = error
            each.is_over = True

    def _collect(self, pool: DevicePool, block: Pages, after: Sequence[int], address: int, *, is_slice: bool) -> None:
        if self._collected and (self._collected.pool is not pool or self._collected.after != tuple(after)):
            self._queue()
        self._collected = self._collected or _Collected(pool, after)
        self._collected.blocks.append(pool.pages_of(block))
        self._collected.addresses.append(address)
        if self._collected.is_batch and not is_slice:
            self._queue()

    def _queue(self) -> None:
        collected, self._collected = self._collected, None
        if collected is not None:
            self._is_queued = True
            collected.queue(self._stream)

    def _room(self, nbytes: int) -> int:
        """Return the place of `nbytes` free bytes in the buffer. If the buffer is full, its payloads are stored
        first.
        """
        if self._used + nbytes > self._buffer.nbytes:
            self.settle()
        self._used += nbytes
        return self._used - nbytes
