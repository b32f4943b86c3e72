"""Time to live by worth: which chains bring less than their place costs, whether or not the place is needed.

A chain's worth is its rank (uses to be had for each second it is held, the best over all horizons), or what a queued
request makes of it, and what others' touches bring to a shared block. A look at all chains now and then lists those
that have fallen below; what has been used, shared or hinted at since is judged again before it is named.

Owns the list. Never changes residency. A chain is named by its tail: when that was removed, the block above is its
tail.
"""

from __future__ import annotations

from collections.abc import Container
from typing import NamedTuple

import numpy as np

from kvstored.store.blocks import ResidencyView
from kvstored.store.policies.chains.book import ChainBook

_LOOK_S = 1.0  # between two looks at all chains,
_CHAINS_A_SECOND = 20_000  # and longer for more of them,
_LOOK_MAX_S = 30.0  # up to this
_NEVER_S = -1e18
_LISTED = 4096  # chains, the least worth; once they have left, all are looked at again


class _Poor(NamedTuple):
    """As of the look that listed it: `order` of the chain's last use, and its rank as of class `cell`."""

    chain: int
    order: int
    cell: int
    rank: float


class WorthExpiry:
    """`least`: what holding a block has to bring, in uses a second."""

    def __init__(self, residency: ResidencyView, tier: int, book: ChainBook, least: float) -> None:
        self._residency = residency
        self._tier = tier
        self._book = book
        self._least = least
        self._poor: list[_Poor] = []  # the least worth last
        self._held: dict[int, _Poor] = {}  # by chain: poor, but its tail may not be evicted
        self._look_s = _NEVER_S  # when to look at all chains again
        self._is_cut = False  # there were more

    def expired(self, now_s: float, limit: int, taken: Container[int] = ()) -> list[int]:
        """Up to `limit` tails that may be evicted and are not `taken`, of chains that are worth too little."""
        if now_s >= self._look_s:
            self._held.clear()
            self._look(now_s)
        found = self._listed(now_s, limit, taken)
        while limit and self._is_cut and not found and not self._poor:
            self._look(now_s)
            found = self._listed(now_s, limit, taken)
        return found

    def _listed(self, now_s: float, limit: int, taken: Container[int]) -> list[int]:
        tails = self._book.chains.tail
        found: list[int] = []
        still_poor: list[_Poor] = []
        while self._poor and len(found) < limit:
            poor = self._poor.pop()
            if not self._is_poor(poor, now_s):
                continue
            row = tails[poor.chain]
            if not self._residency.is_evictable(row, self._tier):
                self._held[poor.chain] = poor
                continue
            still_poor.append(poor)
            if row not in taken:
                found.append(row)
        self._poor += reversed(still_poor)
        return found

    def released(self, chain: int) -> None:
        """A block of the chain's may perhaps be evicted now."""
        if self._held and (poor := self._held.pop(chain, None)) is not None:
            self._poor.append(poor)

    def _is_poor(self, poor: _Poor, now_s: float) -> bool:
        chains, chain = self._book.chains, poor.chain
        row = chains.tail[chain]
        if row < 0 or chains.order[chain] != poor.order:
            return False
        if chains.due_s[chain] or chains.cell[chain] != poor.cell:  # there was a hint
            return worth_of(self._book, chain, row, now_s) < self._least
        return not self._book.shared[row] or poor.rank + self._book.touches.rate(row, now_s) < self._least

    def _look(self, now_s: float) -> None:
        book, chains = self._book, self._book.chains
        slots = np.flatnonzero(chains.ints(chains.tail) >= 0)
        self._look_s = now_s + min(max(_LOOK_S, len(slots) / _CHAINS_A_SECOND), _LOOK_MAX_S)
        ranks = book.ranks(slots, now_s)
        ranks *= chains.flags(chains.live)[slots]
        poor = np.flatnonzero(ranks < self._least)
        slots, ranks = slots[poor], ranks[poor]
        touched = np.frombuffer(book.shared, np.float64)[chains.ints(chains.tail)[slots]] > 0
        exempt = touched | (chains.floats(chains.due_s)[slots] > 0)
        for at in np.flatnonzero(exempt).tolist():  # few
            chain = int(slots[at])
            exempt[at] = worth_of(book, chain, chains.tail[chain], now_s) >= self._least
        if self._held:
            exempt |= np.isin(slots, list(self._held))
        poor = np.flatnonzero(~exempt)
        self._is_cut = len(poor) > _LISTED
        if self._is_cut:
            poor = poor[np.argpartition(ranks[poor], _LISTED)[:_LISTED]]
        slots, ranks = slots[poor], ranks[poor]
        cells, orders = chains.ints(chains.cell)[slots], chains.longs(chains.order)[slots]
        last_first = np.lexsort((orders, ranks))[::-1]
        self._poor = list(map(_Poor, *(column[last_first].tolist() for column in (slots, orders, cells, ranks))))


def worth_of(book: ChainBook, chain: int, row: int, now_s: float) -> float:
    """What holding block `row` of the chain's brings, in uses a second."""
    chains = book.chains
    worth = 0.0
    if chains.live[chain]:
        worth = float(book.ranks(np.array([chain]), now_s)[0])
    if chains.due_s[chain]:
        worth = max(worth, book.chains.due_rank(chain, book.residency.rows.depth[row], now_s))
    return worth + book.touches.rate(row, now_s) if book.shared[row] else worth
