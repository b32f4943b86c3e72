"""Parts of a memory that several threads share for a while: which caller has which.

The module never touches the memory. Invariants: two parts in use never overlap; callers get their parts in the order in
which they asked, so that small ones do not pass large ones for ever.
"""

from __future__ import annotations

import threading
from collections import deque

PART_ALIGNMENT = 4096


class RangeAllocator:
    """The parts of the bytes `begin` to `end`: a caller gets the first that fits, and waits for its turn and for
    one.
    """

    def __init__(self, begin: int, end: int) -> None:
        self.largest_bytes = end - begin
        self._free = [(begin, end)]  # sorted, no two adjacent
        self._changed = threading.Condition()
        self._waiting: deque[object] = deque()  # one for each caller, in their order
        self._closed = False

    @property
    def waiting(self) -> int:
        """The number of callers that have no part yet."""
        return len(self._waiting)

    def take(self, nbytes: int) -> tuple[int, int]:
        """Return offset and bytes of a part of at least `nbytes`, at most `largest_bytes`. Raises OSError once
        closed.
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
        """Return a part as `take` does, if that need not wait; otherwise None."""
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
        """Give parts back together, so that a caller who waits for several may have them all."""
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
