"""What is learned from the uses of chains, and when it begins to count: a bounded step at a time.

Chains age all the time, and what each has got through without a return is counted now and then. Once so many requests
more have been seen, a renewal begins: all chains' ages are counted, what was seen is folded into the counts, the ranks
are made anew. Each of these goes slice by slice, so that no request waits for a whole one.

Owns the tables and the chances by distance from the end. Never knows rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvstore_predictor.gittins import BINS, Ints, passed, passed_by
from kvstore_predictor.hazards import HazardTables, Ladder
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
    """`step` it while `is_due`."""

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
