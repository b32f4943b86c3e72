"""Transfers that have begun and not ended, for a tier that is closed.

Owns how many there are. Never ends one. Invariant: a transfer counts until its completion was delivered.
"""

from __future__ import annotations

import threading

from kvstore_tiers.base import Completion, Outcome
from kvstore_tiers.threads import deliver


class UnderWay:
    """Any thread may begin or end a transfer."""

    def __init__(self) -> None:
        self._transfers = 0
        self._changed = threading.Condition()

    def begin(self, done: Completion) -> Completion:
        """The completion that the transfer calls in place of `done`."""
        with self._changed:
            self._transfers += 1

        def end(outcome: Outcome) -> None:
            deliver(outcome, done)
            with self._changed:
                self._transfers -= 1
                self._changed.notify_all()

        return end

    def wait(self) -> None:
        """Until there are none."""
        with self._changed:
            self._changed.wait_for(lambda: not self._transfers)
