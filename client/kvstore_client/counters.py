"""Counts that several threads add to. Read by `Session.statistics`; decides nothing."""

from __future__ import annotations

import threading
from collections import Counter


class Counters:
    """Named integers; `add` and `read` are atomic as a whole."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: Counter[str] = Counter()

    def add(self, **amounts: int) -> None:
        with self._lock:
            for name, amount in amounts.items():
                self._values[name] += amount

    def read(self) -> dict[str, int]:
        with self._lock:
            return dict(self._values)
