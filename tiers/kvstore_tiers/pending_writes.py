"""Which writes a tier was given and has not ended yet, for an action that has to follow them.

Owns no thread. Invariant: an action runs once, after the completion of each write that was under way when it came.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from kvstore_tiers.base import Completion, Outcome


class PendingWrites:
    """`begin` is called for each write; any thread may end one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last = 0
        self._numbers: set[int] = set()
        self._waiting: list[tuple[set[int], Callable[[], None]]] = []

    def begin(self, done: Completion) -> Completion:
        """What the write calls in the place of `done`."""
        with self._lock:
            self._last += 1
            number = self._last
            self._numbers.add(number)

        def ended(outcome: Outcome) -> None:
            try:
                done(outcome)
            finally:
                self._end(number)

        return ended

    def when_ended(self, action: Callable[[], None]) -> None:
        """Run `action` once the writes that are under way now have ended, in the thread that ends the last of them."""
        with self._lock:
            if self._numbers:
                self._waiting.append((set(self._numbers), action))
                return
        action()

    def _end(self, number: int) -> None:
        with self._lock:
            self._numbers.discard(number)
            for left, _ in self._waiting:
                left.discard(number)
            ready = [action for left, action in self._waiting if not left]
            self._waiting = [waits for waits in self._waiting if waits[0]]
        for action in ready:
            action()
