"""Learning from the uses of chains, in bounded steps, and the time at which observations begin to count.

Chains age all the time, and the time that each has passed without a return is counted now and then. After a number of
requests that grows with the number seen, a renewal begins: all chains' ages are counted, observations are added to the
counts, hazards and ranks are recomputed. Each of these goes slice by slice, so that no request waits for a whole one.

The module owns the tables. It knows no blocks.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from kvstore_cuda.host_copies import address_of
from kvstore_predictor.ages import BINS, ENDS_S, Ints, passed, passed_by
from kvstore_predictor.estimates import native
from kvstore_predictor.hazards import HazardTables
from kvstore_predictor.ladders import Ladder

_DECAY = 0.9995  # of the tables' counts, a request
# Requests from one renewal to the next: at least, at most, and one part in so many of those seen.
_RANKED, _UNRANKED = (25, 500, 6), (50, 2000, 4)
MAKING_US, CELL_US = 40.0, 5.0  # what making ranks takes, about: once, and for each cell;
_HAZARDS_US = 1.25  # for hazards alone
_CALL_US, _LITTLE_US, _CHAINS_A_US = 20.0, 5.0, 40.0  # ageing and folding
_FEWEST = 4  # cells
_ENDS_AT = address_of(ENDS_S)
_IDLE, _AGEING, _FOLDING, _MAKING = range(4)


class Aging(Protocol):
    """The chains that a learner observes, one in each of `slots` slots. Each slot has the chain's class `cell`, the
    number `bin` of the age bin up to which its age has been counted, the time `used_s` of its last use, and `live`,
    which is True while the chain's next use is awaited.
    """

    cell: array[int]
    bin: array[int]
    used_s: array[float]
    live: bytearray
    slots: int

    def wanted(self, live: Ints) -> Ints:
        """Return the slots among `live` for which ranks will be needed."""


class Learner:
    """A learner of how likely chains are used again. In small steps it counts in its hazard tables what happens to
    `chains`. Call `step` while `is_due`. With `forgets` old counts fade. Set `ranked` if ranks are read from the
    tables, because ranks must follow events more closely.
    """

    def __init__(self, chains: Aging, ladders: Sequence[Ladder], *, forgets: bool = True, ranked: bool = True) -> None:
        self._chains = chains
        self.tables = HazardTables(ladders, ranked=ranked)
        self.requests = 0
        self.returns = 0
        self._decay = _DECAY if forgets else 1.0
        self._phase = _IDLE
        self._hand = 0  # chains below it have been aged
        self._least, self._most, self._share = _RANKED if ranked else _UNRANKED
        self._cell_us = CELL_US if ranked else _HAZARDS_US
        self.renewed, self._renew_at = 0, self._least  # at which request

    def numbers(self) -> list[float]:
        """Return the learner's counters, without the tables. A renewal under way begins again after they are
        restored.
        """
        renew_at = self._renew_at if self._phase == _IDLE else self.requests
        return [self.requests, self.returns, self.renewed, renew_at]

    def restore(self, numbers: Sequence[float]) -> None:
        """Continue from the `numbers` of another learner. Raises ValueError if their count is wrong."""
        self.requests, self.returns, self.renewed, self._renew_at = map(int, numbers)

    def returned(self, chain: int, gap_s: float) -> None:
        """Count that the chain in slot `chain` was used again, `gap_s` seconds after its last use. A return after the
        last age bin does not count as a return.
        """
        chains, tables = self._chains, self.tables
        cell, reached, now_bin = chains.cell[chain], chains.bin[chain], passed(gap_s)
        if reached < now_bin:
            tables.passed(cell, reached, now_bin)
        else:
            now_bin = reached
        if now_bin < BINS:
            tables.returned(cell, now_bin)
        self.returns += 1

    def grew_older(self, chain: int, now_s: float) -> None:
        """Count the age bins that the chain in slot `chain` has passed without a use by the time `now_s`. Call it
        before the chain's class changes.
        """
        chains = self._chains
        reached, now_bin = chains.bin[chain], passed(now_s - chains.used_s[chain])
        if reached < now_bin:
            self.tables.passed(chains.cell[chain], reached, now_bin)
            chains.bin[chain] = now_bin

    @property
    def is_due(self) -> bool:
        return self._phase != _IDLE or self.requests >= self._renew_at or self.tables.are_many_asked

    def step(self, now_s: float, budget_us: float) -> bool:
        """Do some of the counting and fading of counts that is due, for about `budget_us` microseconds. Return False if
        the time did not suffice for any of it.
        """
        left_us = budget_us
        while self.is_due and (took_us := self._slice(now_s, left_us)):
            left_us -= took_us
        return left_us < budget_us

    def _slice(self, now_s: float, budget_us: float) -> float:
        """Do one piece of work; return about how long it took, in microseconds, 0 if there is no time for it."""
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
        self._renew_at = self.renewed + min(max(self._least, self.requests // self._share), self._most)
        self._phase = _IDLE
        return _LITTLE_US

    def _make(self, budget_us: float) -> float:
        cells = int((budget_us - MAKING_US) / self._cell_us)
        return MAKING_US + self.tables.make(cells) * self._cell_us if cells >= _FEWEST else 0.0

    def _age(self, first: int, last: int, now_s: float) -> None:
        """Count the age bins that live chains in the slots from `first` to `last` have passed since the last time."""
        chains, tables, library = self._chains, self.tables, native.get()
        if library is not None:
            found = np.empty(last - first, np.int64)
            count = library.kv_age(
                first, last, now_s, address_of(np.frombuffer(chains.live, np.uint8)), chains.cell.buffer_info()[0],
                chains.bin.buffer_info()[0], chains.used_s.buffer_info()[0], _ENDS_AT, tables.epoch, *tables.written_at,
                address_of(found),
            )  # fmt: skip
            if count:
                tables.want(np.frombuffer(chains.cell, np.int32)[chains.wanted(found[:count])])
            return
        live = first + np.flatnonzero(np.frombuffer(chains.live, np.bool_)[first:last])
        reached, cells = np.frombuffer(chains.bin, np.int32), np.frombuffer(chains.cell, np.int32)
        tables.in_use(cells[live])
        tables.want(cells[chains.wanted(live)])
        now_bins = passed_by(now_s - np.frombuffer(chains.used_s)[live])
        while True:
            behind = reached[live] < now_bins
            live, now_bins = live[behind], now_bins[behind]
            if not len(live):
                return
            tables.seen.exposed(cells[live].astype(np.int64), reached[live].astype(np.int64))
            reached[live] += 1
