"""The transfers of a link that have not ended.

Owns their numbers, and what is to be called at their ends. Never sends, and never knows what they transfer.
Invariant: each ends once; what begins while it may is there for the next `fail`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from kvstore_tiers.gpu import wire

Done = Callable[[wire.End], None]


@dataclass
class Transfer:
    """`waits`: for the next worker, where there is none now."""

    ended: Done
    since_s: float
    patience_s: float
    waits: bool
    is_sent: bool = False


class Pending:
    """May be used from any thread; ends are called on that of the caller."""

    def __init__(self) -> None:
        self._transfers: dict[int, Transfer] = {}
        self._last = 0
        self._lock = threading.Lock()

    def begin(self, ended: Done, patience_s: float, *, waits: bool, may: Callable[[], bool]) -> int | None:
        """The number of a new transfer; None unless it `may` begin, which is asked in the same step."""
        with self._lock:
            if not may():
                return None
            self._last += 1
            self._transfers[self._last] = Transfer(ended, time.monotonic(), patience_s, waits)
            return self._last

    def send(self, number: int) -> bool:
        """A worker is to see it, and owes its end from now on; False where it has failed meanwhile."""
        with self._lock:
            transfer = self._transfers.get(number)
            if transfer is not None:
                transfer.is_sent, transfer.since_s = True, time.monotonic()
            return transfer is not None

    def take_back(self, number: int) -> None:
        """It could not be sent."""
        with self._lock:
            transfer = self._transfers.get(number)
            if transfer is not None:
                transfer.is_sent = False

    def end(self, number: int, end: wire.End) -> None:
        """Of one that has ended already it means nothing."""
        with self._lock:
            transfer = self._transfers.pop(number, None)
        if transfer is not None:
            transfer.ended(end)

    def fail(self, concerns: Callable[[Transfer], bool], end_of: Callable[[Transfer], wire.End]) -> int:
        """End those that it concerns; how many."""
        with self._lock:
            numbers = [number for number, each in self._transfers.items() if concerns(each)]
            failed = [self._transfers.pop(number) for number in numbers]
        for each in failed:
            each.ended(end_of(each))
        return len(failed)

    def is_overdue(self, now_s: float, ready_s: float) -> bool:
        """Whether a worker that is ready since `ready_s` has owed the end of one for too long."""
        with self._lock:
            sent = [each for each in self._transfers.values() if each.is_sent]
        return any(now_s - max(each.since_s, ready_s) > each.patience_s for each in sent)
