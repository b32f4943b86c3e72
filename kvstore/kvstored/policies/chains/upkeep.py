"""When the work is done that nobody waits for: learning and collecting, a bounded step at a time.

A request of many blocks can bear a step; small ones only once so many blocks have been asked for. So what a step takes
is little for each block. Owns no data but when the last step was.
"""

from __future__ import annotations

from kvstored.policies.chains.collector import Collector
from kvstored.policies.chains.learning import Learning

_BLOCKS, _LATE = 32, 48


class Upkeep:
    """Tell it of every request."""

    def __init__(self, learning: Learning, collector: Collector) -> None:
        self._learning = learning
        self._collector = collector
        self._waited = 0  # blocks since the last step
        self._is_collectors = False  # the next step, if both have something to do

    def requested(self, blocks: int, now_s: float) -> None:
        self._waited += blocks
        if self._waited < _LATE and blocks < _BLOCKS:
            return
        collector, learning = self._collector, self._learning
        is_learnings = learning.is_due
        if collector.is_due and (self._is_collectors or not is_learnings):
            self._is_collectors = False
            collector.step()
        elif is_learnings:
            self._is_collectors = True
            learning.step(now_s)
        else:
            return
        self._waited = 0
