"""A clock that waiting moves, for a `LinkBudget`: a test runs in no time and always alike."""

from __future__ import annotations

import threading
from collections.abc import Callable


class SteppedTime:
    """`while_waiting`: what happens before the time of a wait has passed; it may move the clock itself."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.while_waiting: Callable[[], object] = lambda: None

    def clock(self) -> float:
        return self.now_s

    def wait(self, changed: threading.Condition, timeout_s: float) -> None:
        assert timeout_s > 0
        until_s = self.now_s + timeout_s
        changed.release()
        try:
            self.while_waiting()
        finally:
            changed.acquire()
        self.now_s = max(self.now_s, until_s)
