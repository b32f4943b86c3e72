"""When the work is done that no request waits for: learning and collecting, a bounded step at a time.

What a request may take for it grows with its blocks, so that it is little for each of them: long requests bear most of
it. Where none is long, one request in some dozens bears a step. Owns no data but when the last step was.
"""

from __future__ import annotations

from kvstored.store.policies.chains.collector import Collector
from kvstored.store.policies.chains.learner import Learner

US_A_BLOCK = 2.0  # what a request may take for it, about
_US_MAX = 500.0
_LATE, _US_LATE = 12, 150.0  # after so many requests without a step one takes so long
_COLLECTING_US = 100.0


class Upkeep:
    """Call `requested` for every request."""

    def __init__(self, learning: Learner, collector: Collector) -> None:
        self._learning = learning
        self._collector = collector
        self._waited = 0  # requests since the last step
        self._is_collectors = False  # the next step, if both have something to do

    def requested(self, blocks: int, now_s: float, *, taken_us: float = 0.0) -> None:
        """A request of so many blocks, which has had such a share of it already."""
        self._waited += 1
        collector, learning = self._collector, self._learning
        if not (learning.is_due or collector.is_due):
            return
        budget_us = min(blocks * US_A_BLOCK, _US_MAX) - taken_us
        if self._waited >= _LATE:
            budget_us = max(budget_us, _US_LATE)
        if collector.is_due and budget_us >= _COLLECTING_US and (self._is_collectors or not learning.is_due):
            self._is_collectors = False
            collector.step()
            self._waited = 0
        elif learning.is_due and learning.step(now_s, budget_us):
            self._is_collectors = True
            self._waited = 0
