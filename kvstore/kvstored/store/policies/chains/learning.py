"""The work that no request waits for: learning from the uses of chains, and freeing chains, a bounded step at a time.

Chains age all the time, and what each has got through without a return is counted now and then. After a number of
requests that grows with those seen, a renewal begins: all chains' ages are counted, what was seen is folded into the
counts, the ranks are made anew. Each of these goes slice by slice, so that no request waits for a whole one.

Owns the tables, the chances by distance from the end, and the collector's marks. Never decides what is evicted.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvstore_predictor.gittins import BINS, Ints, passed, passed_by
from kvstore_predictor.hazards import HazardTables, Ladder
from kvstored.store.policies.chains.ghost import SHARDS, ChainGhost, Chains
from kvstored.store.policies.chains.table import ChainTable

FAR_FROM_END = 4  # so many blocks from the end of its chain and more, blocks are used again alike
_ENDS = (0, 1, 2, FAR_FROM_END)  # distances from the end of a chain that share an estimate: 0, 1, 2 to 3, 4 and more
_DECAY = 0.9995  # of the tables' counts, a request
_RENEW_MIN, _RENEW_MAX = 25, 500  # requests
_RENEW_SHARE = 6  # the tables are renewed when a sixth more requests have been seen
MAKING_US, CELL_US = 40.0, 5.0  # what making ranks takes, about: once, and for each cell
_CALL_US, _LITTLE_US, _CHAINS_A_US = 20.0, 5.0, 40.0  # ageing and folding
_FEWEST = 4  # cells
_IDLE, _AGEING, _FOLDING, _MAKING = range(4)
_Column = npt.NDArray[np.int32]


class Learner:
    """Counts what chains do; `step` it while `is_due`."""

    def __init__(self, chains: ChainTable, ladders: Sequence[Ladder], *, forgets: bool) -> None:
        self._chains = chains
        self.tables = HazardTables(ladders)
        self.requests = 0
        self.returns = 0
        self.end_reuse = [0.05, 0.9, 0.95, 0.97]
        self._end_counts = [[value * 10.0, 10.0] for value in self.end_reuse]
        self._decay = _DECAY if forgets else 1.0
        self._phase = _IDLE
        self._hand = 0  # chains below it have been aged
        self.renewed, self._renew_at = 0, _RENEW_MIN  # at which request

    def numbers(self) -> list[float]:
        """What is known beside the tables. A renewal under way begins anew in the policy that continues from it."""
        renew_at = self._renew_at if self._phase == _IDLE else self.requests
        ends = [value for counts in self._end_counts for value in counts]
        return [self.requests, self.returns, self.renewed, renew_at, *ends]

    def restore(self, numbers: Sequence[float]) -> None:
        """Go on from what `numbers` gave. Raises ValueError for so many that they cannot be."""
        requests, returns, renewed, renew_at, *ends = numbers
        self.requests, self.returns = int(requests), int(returns)
        self.renewed, self._renew_at = int(renewed), int(renew_at)
        self._end_counts = [[seen, of] for seen, of in zip(ends[::2], ends[1::2], strict=True)]
        self.end_reuse[:] = [seen / of for seen, of in self._end_counts]  # in place: others hold it

    def returned(self, chain: int, missing: int, gap_s: float) -> None:
        """`chain` was continued, all but its last `missing` blocks."""
        chains = self._chains
        _count_return(self.tables, chains.cell[chain], chains.bin[chain], gap_s)
        self.returns += 1
        for number, counts in enumerate(self._end_counts):
            counts[1] += 1.0
            if _ENDS[number] >= missing:
                counts[0] += 1.0
            self.end_reuse[number] = counts[0] / counts[1]

    def grew_older(self, chain: int, now_s: float) -> None:
        """Count the age bins that `chain` has passed, which is of another class from now on."""
        chains = self._chains
        age_s = now_s - chains.used_s[chain]
        chains.bin[chain] = _count_age(self.tables, chains.cell[chain], chains.bin[chain], age_s)

    @property
    def is_due(self) -> bool:
        return self._phase != _IDLE or self.requests >= self._renew_at or self.tables.are_many_asked

    def step(self, now_s: float, budget_us: float) -> bool:
        """Slices that take about so long together: a whole renewal, where there are few chains and cells. Whether there
        was time for any.
        """
        left_us = budget_us
        while self.is_due and (took_us := self._slice(now_s, left_us)):
            left_us -= took_us
        return left_us < budget_us

    def _slice(self, now_s: float, budget_us: float) -> float:
        """One piece of work; about how long it took, 0 when there is no time for it."""
        tables = self.tables
        if tables.are_many_asked or (self._phase == _FOLDING and tables.is_any_asked):
            return self._make(budget_us)  # what came is held against what is predicted of its own class
        if self._phase == _MAKING and tables.is_any_wanted:
            return self._make(budget_us)
        if budget_us < _CALL_US:
            return 0.0
        if self._phase == _IDLE:
            self._phase, self._hand = _AGEING, 0
            return _LITTLE_US
        if self._phase == _AGEING:
            last = min(self._hand + int(budget_us * _CHAINS_A_US), self._chains.slots)
            took_us = _CALL_US + (last - self._hand) / _CHAINS_A_US
            self._age(self._hand, last, now_s)
            self._hand = last
            if last == self._chains.slots:
                self._phase = _FOLDING
            return took_us
        if self._phase == _FOLDING:
            folded = tables.fold(max(_FEWEST, int(budget_us - _CALL_US)))
            if folded:
                return _CALL_US + folded
            tables.renew(self._decay ** (self.requests - self.renewed))
            self.renewed = self.requests
            self._phase = _MAKING
            return _LITTLE_US
        self._renew_at = self.renewed + min(max(_RENEW_MIN, self.requests // _RENEW_SHARE), _RENEW_MAX)
        self._phase = _IDLE
        return _LITTLE_US

    def _make(self, budget_us: float) -> float:
        cells = int((budget_us - MAKING_US) / CELL_US)
        return MAKING_US + self.tables.make(cells) * CELL_US if cells >= _FEWEST else 0.0

    def _age(self, first: int, last: int, now_s: float) -> None:
        """Count the age bins that live chains have passed since the last time."""
        chains = self._chains
        live = first + np.flatnonzero(chains.flags(chains.live)[first:last])
        reached, cells = chains.ints(chains.bin), chains.ints(chains.cell)
        self.tables.in_use(cells[live])
        self.tables.want(cells[live[chains.ints(chains.tail)[live] >= 0]])
        _count_ages(self.tables, cells, reached, live, passed_by(now_s - chains.floats(chains.used_s)[live]))


def _count_age(tables: HazardTables, cell: int, reached: int, age_s: float) -> int:
    """One chain of `cell` is so old and has not returned; the bin that is reached now."""
    now_bin = max(reached, passed(age_s))
    if reached < now_bin:
        tables.passed(cell, reached, now_bin)
    return now_bin


def _count_return(tables: HazardTables, cell: int, reached: int, age_s: float) -> None:
    """One chain of `cell` has returned at this age. Beyond the last bin it counts as one that did not."""
    now_bin = _count_age(tables, cell, reached, age_s)
    if now_bin < BINS:
        tables.returned(cell, now_bin)


def _count_ages(tables: HazardTables, cells: _Column, reached: _Column, live: Ints, now_bins: Ints) -> None:
    """Chains `live`, which have not returned, are past `now_bins`; `reached` is brought up to date."""
    while True:
        behind = reached[live] < now_bins
        live, now_bins = live[behind], now_bins[behind]
        if not len(live):
            return
        tables.exposed(cells[live].astype(np.int64), reached[live].astype(np.int64))
        reached[live] += 1


US_A_BLOCK = 2.0  # what a request may take for it, about
_US_MAX = 500.0
_LATE, _US_LATE = 12, 150.0  # after so many requests without a step one takes so long
_COLLECTING_US = 100.0


class Upkeep:
    """Decides when the steps are done; call `requested` for every request.

    What a request may take for it grows with its blocks, so that it is little for each of them: long requests bear most
    of it. Where none is long, one request in some dozens bears a step.
    """

    def __init__(self, learning: Learner, collector: Collector) -> None:
        self._learning = learning
        self._collector = collector
        self._waited = 0  # requests since the last step
        self._is_collectors = False  # the next step, if both have something to do

    def requested(self, blocks: int, now_s: float, *, taken_us: float = 0.0) -> None:
        """Do the steps that a request of `blocks` blocks can bear, of whose share `taken_us` is spent."""
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
    """Frees the chains that no block names, here or in a ghost, by mark and sweep; `step` it while `is_due`.

    Marks are set from the rows first, then from the ghosts' shards. In between, a chain's name moves from a row to a
    ghost (the block is evicted), where it is found later, or from a ghost to a row (it is stored again), while the
    ghost keeps it; what a ghost forgets meanwhile is marked as it goes, and so is every chain that is used, taken or
    inherited.
    """

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
        """Mark `chains`, of which a ghost forgets keys."""
        if self._is_running and len(chains):
            self._mark(chains)

    def _mark(self, chains: Chains | np.ndarray[tuple[int], np.dtype[np.int32]]) -> None:
        np.frombuffer(self._chains.marks, np.uint8)[chains] = 1
