"""Bounded memory for images in the form of a codec, on their way into a slot or out of one.

Owns its buffers, which are used again: pages that are touched for the first time cost more than most codecs. Invariant:
all buffers together have at most `most_bytes`, but for one larger than that, which is given out alone.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from kvstore_tiers.segments import AlignedBuffer, Segment


class Scratch:
    """`most_bytes` of memory. Calls come from any thread."""

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self._idle: list[AlignedBuffer] = []  # the one used last is at the end
        self._out_bytes = 0
        self._changed = threading.Condition()

    @property
    def out_bytes(self) -> int:
        """Return the bytes that are given out now."""
        return self._out_bytes

    def try_take(self, nbytes: int) -> AlignedBuffer | None:
        """Return a buffer of at least `nbytes`, for `give_back`; None while others have the memory."""
        with self._changed:
            return self._take(nbytes)

    def give_back(self, buffer: AlignedBuffer) -> None:
        with self._changed:
            self._out_bytes -= buffer.nbytes
            if buffer.nbytes <= self.most_bytes:
                self._idle.append(buffer)
            self._changed.notify_all()

    @contextmanager
    def take(self, nbytes: int) -> Iterator[Segment]:
        """Give `nbytes` to the body, once there is room: for threads that may wait."""
        with self._changed:
            while (buffer := self._take(nbytes)) is None:
                self._changed.wait()
        try:
            yield buffer.segment(nbytes)
        finally:
            self.give_back(buffer)

    def _take(self, nbytes: int) -> AlignedBuffer | None:
        fitting = [at for at, buffer in enumerate(self._idle) if nbytes <= buffer.nbytes <= 2 * nbytes]
        if fitting:
            buffer = self._idle.pop(fitting[-1])
        elif self._out_bytes and self._out_bytes + nbytes > self.most_bytes:
            return None
        else:
            while self._idle and self._out_bytes + nbytes + sum(idle.nbytes for idle in self._idle) > self.most_bytes:
                del self._idle[0]
            buffer = AlignedBuffer(nbytes)
        self._out_bytes += buffer.nbytes
        return buffer
