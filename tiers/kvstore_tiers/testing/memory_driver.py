"""A driver of a store that is a dictionary in this process. It shows the contract of drivers in a hundred lines.

For tests alone: no URL opens it. Drivers that share a `MemoryStore` are clients of one store.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from kvstore_tiers.remote.driver import Driver, Placed, WriteResult


class MemoryStore:
    """A remote store for tests that keeps up to `capacity_bytes` bytes of values in this process. A full store refuses
    new values or, with `evicts`, drops the oldest ones.
    """

    def __init__(self, capacity_bytes: int = 1 << 30, *, evicts: bool = False) -> None:
        self.capacity_bytes = capacity_bytes
        self.evicts = evicts
        self.values: dict[str, bytes] = {}  # oldest first; a test may change it at will
        self.is_reachable = True
        self.lock = threading.Lock()

    @property
    def used_bytes(self) -> int:
        return sum(map(len, self.values.values()))

    def add(self, name: str, value: bytes) -> WriteResult:
        with self.lock:
            if name in self.values:
                return WriteResult.EXISTS
            if len(value) > self.capacity_bytes:
                return WriteResult.NO_ROOM
            while self.used_bytes + len(value) > self.capacity_bytes:
                if not self.evicts:
                    return WriteResult.NO_ROOM
                del self.values[next(iter(self.values))]
            self.values[name] = value
            return WriteResult.STORED


class MemoryDriver(Driver):
    """A driver of the test store `store`. Its calls raise ConnectionError while the store's `is_reachable` is False."""

    def __init__(self, store: MemoryStore, largest_value_bytes: int = 64 << 20) -> None:
        self.largest_value_bytes = largest_value_bytes
        self.evicts = store.evicts
        self._store = store

    def sizes(self, names: Sequence[str]) -> list[int]:
        self.probe()
        with self._store.lock:
            return [len(self._store.values.get(name, b"")) for name in names]

    def read(self, wanted: Sequence[Placed]) -> list[int]:
        self.probe()
        with self._store.lock:
            values = [self._store.values.get(placed.name, b"") for placed in wanted]
        for placed, value in zip(wanted, values, strict=True):
            if len(value) <= len(placed.memory):
                placed.memory[: len(value)] = value
        return [len(value) for value in values]

    def write(self, values: Sequence[Placed]) -> list[WriteResult]:
        self.probe()
        return [self._store.add(placed.name, bytes(placed.memory)) for placed in values]

    def remove(self, names: Sequence[str]) -> None:
        self.probe()
        with self._store.lock:
            for name in names:
                self._store.values.pop(name, None)

    def probe(self) -> None:
        if not self._store.is_reachable:
            raise ConnectionError("the store of this test is not reachable")

    def close(self) -> None:
        pass
