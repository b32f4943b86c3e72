"""Many transfers that end together, run by several threads.

Owns when the batch is over. Never decides what a transfer does, nor on which thread.
Invariant: the outcomes are handed over once, in the order of the transfers, when the last part has ended.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence

from kvstore_tiers.base import Outcome, OutcomeKind
from kvstore_tiers.threads import Transfer, deliver, run_transfer


class TransferBatch:
    """Transfers that up to `parts` threads take one by one, so that a thread that starts late, or loses its core,
    delays one transfer and not its share of all. The thread that ends the last part delivers all outcomes."""

    def __init__(self, transfers: Sequence[Transfer], parts: int, done: Callable[[Sequence[Outcome]], None]) -> None:
        self._transfers = transfers
        self._done = done
        self._outcomes = [Outcome(OutcomeKind.CANCELLED, message="the tier is closed")] * len(transfers)
        self._left = deque(range(len(transfers)))
        self._parts_left = parts
        self._ending = threading.Lock()

    def run(self) -> None:
        left = self._left
        while left:
            try:
                position = left.popleft()
            except IndexError:  # another thread took the last one just now
                break
            self._outcomes[position] = run_transfer(self._transfers[position])
        self.end_part()

    def end_part(self) -> None:
        """One part is over, with the outcomes it has; without a run, it was cancelled."""
        with self._ending:
            self._parts_left -= 1
            is_last = not self._parts_left
        if is_last:
            deliver(self._outcomes, self._done)
