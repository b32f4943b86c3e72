"""Host memory that the device copies from and to, on behalf of memory that it does not know.

Owns a memfd that this process and the worker map, and which ranges of it are taken. Invariant: ranges that are taken
do not overlap.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading

from kvstore_tiers.sizes import aligned_up


class Bounce:
    """`nbytes` of it."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.descriptor = os.memfd_create("kvstore-bounce", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.fchmod(self.descriptor, 0o600)
        os.ftruncate(self.descriptor, nbytes)
        self._mapping = mmap.mmap(self.descriptor, nbytes)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._mapping))
        self._free = [(0, nbytes)]  # offset and bytes, by offset
        self._changed = threading.Condition()

    def take(self, nbytes: int) -> int:
        """The offset of a free range, which is waited for. Raises ValueError for one that can never be free."""
        wanted = aligned_up(nbytes)
        if wanted > self.nbytes:
            raise ValueError(f"{nbytes} bytes do not fit a bounce buffer of {self.nbytes}")
        with self._changed:
            while True:
                for position, (offset, free) in enumerate(self._free):
                    if free >= wanted:
                        left = [(offset + wanted, free - wanted)] if free > wanted else []
                        self._free[position : position + 1] = left
                        return offset
                self._changed.wait()

    def give_back(self, offset: int, nbytes: int) -> None:
        with self._changed:
            ranges = sorted([*self._free, (offset, aligned_up(nbytes))])
            joined: list[tuple[int, int]] = []
            for start, length in ranges:
                if joined and sum(joined[-1]) == start:
                    joined[-1] = (joined[-1][0], joined[-1][1] + length)
                else:
                    joined.append((start, length))
            self._free = joined
            self._changed.notify_all()

    def close(self) -> None:
        os.close(self.descriptor)
