"""Who else has some memory mapped, and what waits until no other has it.

Owns the count and what waits. Never touches the memory. Invariant: what waits is called once, after the last borrower
has let go.
"""

from __future__ import annotations

import threading
from collections.abc import Callable


class Loan:
    """Any thread may call anything here."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._borrowers = 0
        self._waiting: list[Callable[[], None]] = []

    def lend(self, borrowers: int) -> None:
        """So many others have it mapped until each has called `returned`."""
        with self._changed:
            self._borrowers += borrowers

    def returned(self) -> None:
        """A borrower has let go. What waits for the last one runs here, and may take its time."""
        with self._changed:
            self._borrowers -= 1
            waiting: list[Callable[[], None]] = []
            if not self._borrowers:
                waiting, self._waiting = self._waiting, waiting
            self._changed.notify_all()
        for then in waiting:
            then()

    def defers(self, then: Callable[[], None]) -> bool:
        """Whether another has it mapped: then `then` is called when that has ended."""
        with self._changed:
            if self._borrowers:
                self._waiting.append(then)
            return self._borrowers > 0

    def wait(self) -> None:
        """Until no other has it mapped."""
        with self._changed:
            self._changed.wait_for(lambda: not self._borrowers)
