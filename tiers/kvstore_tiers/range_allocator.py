"""Parts of a memory that several threads share for a while: which caller has which.

The module never touches the memory. Invariants: two parts in use never overlap; callers get their parts in the order in
which they asked, so that small ones do not pass large ones for ever.
"""

from __future__ import annotations

import threading
from collections import deque

PART_ALIGNMENT = 4096


class RangeAllocator:
    """An allocator of ranges of a memory whose offsets go from `begin` to `end`, in bytes. Several threads may use it.
    A thread waits for a range until all threads that came before it have theirs and enough is free.
    """

    def __init__(self, begin: int, end: int) -> None:
        self.largest_bytes = end - begin
        self._free = [(begin, end)]  # sorted, no two adjacent
        self._changed = threading.Condition()
        self._waiting: deque[object] = deque()  # one for each caller, in their order
        self._closed = False

    @property
    def waiting(self) -> int:
        """The number of threads that wait for a range."""
        return len(self._waiting)

    def take(self, nbytes: int) -> tuple[int, int]:
        """Return the offset and the size in bytes of a free range of at least `nbytes` bytes, which may not exceed
        `largest_bytes`. The call waits until there is one. Raises OSError once the allocator is closed.
        """
        turn = object()
        with self._changed:
            self._waiting.append(turn)
            try:
                while True:
                    if self._closed:
                        raise OSError("the tier is closed")
                    part = self._first_fit(nbytes) if self._waiting[0] is turn else None
                    if part is not None:
                        return part
                    self._changed.wait()
            finally:
                self._waiting.remove(turn)
                self._changed.notify_all()

    def take_now(self, nbytes: int) -> tuple[int, int] | None:
        """Return the offset and the size in bytes of a free range of at least `nbytes` bytes, or None if the caller
        would have to wait for one.
        """
        with self._changed:
            is_free = not self._waiting and not self._closed
            return self._first_fit(nbytes) if is_free else None

    def _first_fit(self, nbytes: int) -> tuple[int, int] | None:
        nbytes = -(-nbytes // PART_ALIGNMENT) * PART_ALIGNMENT
        for at, (begin, end) in enumerate(self._free):
            if end - begin >= nbytes:
                self._free[at : at + 1] = [(begin + nbytes, end)] if end - begin > nbytes else []
                return begin, nbytes
        return None

    def give_back(self, *parts: tuple[int, int]) -> None:
        """Free the ranges `parts`, each an offset and a size in bytes as `take` returned them. They become free
        together, so that a waiting thread may get a range that covers several of them.
        """
        with self._changed:
            merged: list[tuple[int, int]] = []
            for begin, end in sorted([*self._free, *((begin, begin + nbytes) for begin, nbytes in parts)]):
                if merged and merged[-1][1] == begin:
                    merged[-1] = (merged[-1][0], end)
                else:
                    merged.append((begin, end))
            self._free = merged
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
