"""What the chains' uses teach, and when it comes to count: a bounded step at a time.

Chains age all the time, and what each has got through without a return is counted now and then. Once so many requests
more have been seen, a renewal begins: all chains' ages are counted, what was seen is folded into the counts, the ranks
are made anew. Each of these goes slice by slice, so that nobody waits for a whole one.

Owns the tables and the chances by distance from the end. Never knows rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvstored.policies.chains.gittins import bin_of, bins_of
from kvstored.policies.chains.hazards import HazardTables, Ladder
from kvstored.policies.chains.table import ChainTable

FAR_FROM_END = 4  # so many blocks from the end of its chain and more, blocks are used again alike
_ENDS = (0, 1, 2, FAR_FROM_END)  # distances from the end of a chain that share an estimate: 0, 1, 2 to 3, 4 and more
_DECAY = 0.9995  # of the tables' counts, a request
_RENEW_MIN, _RENEW_MAX = 25, 500  # requests
_RENEW_SHARE = 20  # the tables are renewed when a twentieth more requests have been seen
_CHAINS = 2048  # looked at in a slice
_SLICES = 5  # a step
_IDLE, _AGEING, _FOLDING, _MAKING = range(4)


class Learning:
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

    def returned(self, chain: int, missing: int, gap_s: float) -> None:
        """`chain` was continued, all but its last `missing` blocks."""
        chains = self._chains
        cell, reached, now_bin = chains.cell[chain], chains.bin[chain], bin_of(gap_s)
        if reached < now_bin:
            self.tables.passed(cell, reached, now_bin)
        self.tables.returned(cell, max(reached, now_bin))
        self.returns += 1
        for number, counts in enumerate(self._end_counts):
            counts[1] += 1.0
            if _ENDS[number] >= missing:
                counts[0] += 1.0
            self.end_reuse[number] = counts[0] / counts[1]

    def grew_older(self, chain: int, now_s: float) -> None:
        """Count the age bins that `chain` has passed, which is of another class from now on."""
        chains = self._chains
        now_bin, reached = bin_of(now_s - chains.used_s[chain]), chains.bin[chain]
        if reached < now_bin:
            self.tables.passed(chains.cell[chain], reached, now_bin)
            chains.bin[chain] = now_bin

    @property
    def is_due(self) -> bool:
        return self._phase != _IDLE or self.requests >= self._renew_at or self.tables.are_many_asked

    def step(self, now_s: float) -> None:
        """Some slices: a whole renewal, where there are few chains and cells."""
        for _ in range(_SLICES):
            if not self.is_due:
                return
            self._slice(now_s)

    def _slice(self, now_s: float) -> None:
        tables = self.tables
        if tables.are_many_asked or (self._phase == _FOLDING and tables.is_any_asked):
            tables.make()  # what came is held against what is foretold of its own class
        elif self._phase == _IDLE:
            self._phase, self._hand = _AGEING, 0
        elif self._phase == _AGEING:
            self._age(self._hand, min(self._hand + _CHAINS, self._chains.slots), now_s)
            self._hand += _CHAINS
            if self._hand >= self._chains.slots:
                self._phase = _FOLDING
        elif self._phase == _FOLDING:
            if not tables.fold():
                tables.renew(self._decay ** (self.requests - self.renewed))
                self.renewed = self.requests
                self._phase = _MAKING
        elif not tables.make():
            self._renew_at = self.renewed + min(max(_RENEW_MIN, self.requests // _RENEW_SHARE), _RENEW_MAX)
            self._phase = _IDLE

    def _age(self, first: int, last: int, now_s: float) -> None:
        """Count the age bins that live chains have passed since the last time."""
        chains = self._chains
        live = first + np.flatnonzero(chains.flags(chains.live)[first:last])
        reached, cells = chains.ints(chains.bin), chains.ints(chains.cell)
        self.tables.want(cells[live[chains.ints(chains.tail)[live] >= 0]])
        now_bins = bins_of(now_s - chains.floats(chains.used_s)[live])
        while True:
            behind = reached[live] < now_bins
            live, now_bins = live[behind], now_bins[behind]
            if not len(live):
                return
            self.tables.exposed(cells[live].astype(np.int64), reached[live].astype(np.int64))
            reached[live] += 1
