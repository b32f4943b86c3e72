"""Scratch is bounded memory for coded images on their way into a slot or out of one.

The module owns its buffers and uses them again, because the first touch of a new page costs more than most codecs.
Invariant: all buffers together have at most `most_bytes`; a single larger buffer is given out only while no other one
is.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from kvstore_tiers.segments import AlignedBuffer, Segment


class Scratch:
    """Memory of `most_bytes` bytes. Any thread may call it."""

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
        """Return a buffer of at least `nbytes` bytes, for `give_back` later; None while other callers use it all."""
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
        """Wait until there is room, and give a segment of `nbytes` bytes to the body of the `with` block. Only threads
        that may wait call it."""
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
