"""Writes that were begun and have not ended, for an action that has to follow them.

Owns no thread. Invariant: an action runs once, after the completion of each write that was pending when it was given.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from kvstore_tiers.base import Completion, Outcome
from kvstore_tiers.threads import deliver

Action = Callable[[bool], None]


@dataclass(slots=True)
class _Wait:
    numbers: set[int]
    action: Action
    all_well: bool = True


class PendingWrites:
    """`begin` is called for each write; any thread may end one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last = 0
        self._numbers: set[int] = set()
        self._waiting: list[_Wait] = []

    def begin(self, done: Completion, *, must_succeed: bool = False) -> Completion:
        """The completion that the write calls in place of `done`. `must_succeed`: where it fails, actions that waited
        for it get False."""
        with self._lock:
            self._last += 1
            number = self._last
            self._numbers.add(number)

        def ended(outcome: Outcome) -> None:
            try:
                done(outcome)
            finally:
                self._end(number, all_well=outcome.ok or not must_succeed)

        return ended

    def when_ended(self, action: Action) -> None:
        """Call `action` when the writes that are pending now have ended, in the thread that ends the last of them. It
        gets whether those that had to succeed did."""
        with self._lock:
            if self._numbers:
                self._waiting.append(_Wait(set(self._numbers), action))
                return
        action(True)

    def _end(self, number: int, *, all_well: bool) -> None:
        with self._lock:
            self._numbers.discard(number)
            for wait in self._waiting:
                if number in wait.numbers:
                    wait.numbers.discard(number)
                    wait.all_well &= all_well
            ready = [wait for wait in self._waiting if not wait.numbers]
            self._waiting = [wait for wait in self._waiting if wait.numbers]
        for wait in ready:
            deliver(wait.all_well, wait.action)
