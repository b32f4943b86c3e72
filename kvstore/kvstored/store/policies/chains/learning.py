"""The work that no request waits for: learning from the uses of chains, and freeing chains, a bounded step at a time.

Owns the chances by distance from a chain's end, and the collector's marks. Never decides what is evicted.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np

from kvstore_predictor.ladders import Ladder
from kvstore_predictor.learning import Learner
from kvstored.store.policies.chains.ghost import SHARDS, ChainGhost, Chains
from kvstored.store.policies.chains.table import ChainTable

FAR_FROM_END = 4  # so many blocks from the end of its chain and more, blocks are used again alike
_ENDS = (0, 1, 2, FAR_FROM_END)  # distances from the end of a chain that share an estimate: 0, 1, 2 to 3, 4 and more


class ChainLearner(Learner):
    """A learner from the chains of a tier. It updates the hazard tables (chances of a next request by age), and learns
    how far down a chain its next request goes: `end_reuse` is the chance that a block is used again, by its distance
    from the end (`_ENDS`)."""

    def __init__(self, chains: ChainTable, ladders: Sequence[Ladder], *, forgets: bool) -> None:
        super().__init__(chains, ladders, forgets=forgets)
        self.end_reuse = [0.05, 0.9, 0.95, 0.97]
        self._end_counts = [[value * 10.0, 10.0] for value in self.end_reuse]

    def numbers(self) -> list[float]:
        return super().numbers() + [value for counts in self._end_counts for value in counts]

    def restore(self, numbers: Sequence[float]) -> None:
        known = len(super().numbers())
        super().restore(numbers[:known])
        ends = numbers[known:]
        self._end_counts = [[seen, of] for seen, of in zip(ends[::2], ends[1::2], strict=True)]
        self.end_reuse[:] = [seen / of for seen, of in self._end_counts]  # in place: others hold it

    def continued(self, chain: int, missing: int, gap_s: float) -> None:
        """Count that a request has continued `chain` after `gap_s` seconds, using all but its last `missing` blocks."""
        self.returned(chain, gap_s)
        for number, counts in enumerate(self._end_counts):
            counts[1] += 1.0
            if _ENDS[number] >= missing:
                counts[0] += 1.0
            self.end_reuse[number] = counts[0] / counts[1]


US_A_BLOCK = 2.0  # what a request may take for it, about
_US_MAX = 500.0
_LATE, _US_LATE = 12, 150.0  # after so many requests without a step one takes so long
_COLLECTING_US = 100.0


class Upkeep:
    """A scheduler of the policy's background steps, which learn from chains and free unused ones. Requests pay for them
    with a little time each; call `requested` for every request.

    The time that a request may spend grows with its blocks: long requests bear most of it. If none is long, one request
    in some dozens runs a step."""

    def __init__(self, learning: ChainLearner, collector: Collector) -> None:
        self._learning = learning
        self._collector = collector
        self._waited = 0  # requests since the last step
        self._is_collectors = False  # the next step, if both have something to do

    def requested(self, blocks: int, now_s: float, *, taken_us: float = 0.0) -> None:
        """Run the background steps that a request of `blocks` blocks has time for. `taken_us` microseconds of this time
        are spent already."""
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


_ROWS, _SLOTS = 1 << 16, 1 << 12  # looked at in a step
_SLACK = 1024  # chains that are not worth a cycle


class Collector:
    """A mark-and-sweep collector that frees chains which no block names, neither in the tier nor among removed blocks.
    Call `step` while `is_due`.

    Chains are marked from the tier's rows first, then from the records of removed blocks. A chain that is used, taken
    or inherited meanwhile is marked, too, and so is one of a key that a record forgets."""

    def __init__(self, chains: ChainTable, owner: array[int], ghosts: Sequence[ChainGhost]) -> None:
        self._chains = chains
        self._owner = owner
        self._ghosts = ghosts
        self._start_at = _SLACK
        self._row = self._shard = self._slot = 0
        self._is_running = False

    @property
    def is_due(self) -> bool:
        return self._is_running or self._chains.in_use >= self._start_at

    def step(self) -> None:
        chains = self._chains
        if not self._is_running:
            self._is_running = True
            self._row = self._shard = self._slot = 0
            chains.marks[:] = bytes(len(chains.marks))
        elif self._row < len(self._owner):
            owners = np.frombuffer(self._owner, np.int32)[self._row : self._row + _ROWS]
            self._mark(owners[owners >= 0])
            self._row += _ROWS
        elif self._shard < SHARDS * len(self._ghosts):
            tenant, shard = divmod(self._shard, SHARDS)
            self._mark(self._ghosts[tenant].chains(shard))
            self._shard += 1
        elif self._slot < chains.slots:
            chains.free_unmarked(self._slot, self._slot + _SLOTS)
            self._slot += _SLOTS
        else:
            self._is_running = False
            self._start_at = 2 * chains.in_use + _SLACK

    def forgotten(self, chains: Chains) -> None:
        """Mark `chains` as still in use, since the record of removed blocks has just forgotten keys of them."""
        if self._is_running and len(chains):
            self._mark(chains)

    def _mark(self, chains: Chains | np.ndarray[tuple[int], np.dtype[np.int32]]) -> None:
        np.frombuffer(self._chains.marks, np.uint8)[chains] = 1
