"""Reads that wait for a store: those that wait together go to it in one call.

A thread takes the first ones that wait, at most `BATCH`; the next thread begins as soon as it has taken them, so that
one batch is verified and copied while the store delivers another. Never knows what a read does.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from kvstore_tiers.threads import ResidentThreads

BATCH = 8  # the last batch is verified while the store has nothing to do
Read = TypeVar("Read")


class WaitingReads(Generic[Read]):
    """`serve(reads)`, on one of so many threads, ends the leading ones, one at least, and returns how many; it must not
    raise. The others wait on, before those that came later."""

    def __init__(self, name: str, threads: int, serve: Callable[[Sequence[Read]], int]) -> None:
        self._threads = ResidentThreads(name, threads)
        self._serve = serve
        self._lock = threading.Lock()
        self._waiting: deque[Read] = deque()
        self._is_called = False  # a thread is on its way

    def put(self, read: Read) -> None:
        with self._lock:
            self._waiting.append(read)
            self._call()

    def close(self) -> None:
        """Ends the threads. Nothing may wait."""
        self._threads.close()

    def _call(self) -> None:
        if self._waiting and not self._is_called:
            self._is_called = self._threads.post(self._run)

    def _run(self) -> None:
        with self._lock:
            reads = [self._waiting.popleft() for _ in range(min(BATCH, len(self._waiting)))]
            self._is_called = False
            self._call()
        left = reads[self._serve(reads) :]
        with self._lock:
            self._waiting.extendleft(reversed(left))
            self._call()
