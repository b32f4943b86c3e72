"""The order in which chains lose their last blocks, and the chains that expire by themselves.

The worth of a block is the expected uses for each second that it is held: the rank of its chain, times the chance that
its next request goes as far as this block, plus the touches by others. Rows age all the time, so the order is made anew
now and then: then the chains of least worth are drawn into a heap, and the others wait above its ceiling. In between
only chains that were used, or lost a block, are looked at again. A draw looks at a slice of the chains, the next one at
the next. The module owns the heap and the list of expiring chains. It does not change residency.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from heapq import heapify, heappop, heappush, heapreplace
from typing import NamedTuple

import numpy as np

from kvstore_predictor.learning import CELL_US, MAKING_US
from kvstored.store.blocks import ResidencyView
from kvstored.store.policies.chains.book import ChainBook
from kvstored.store.policies.chains.worths import END_OF_DISTANCE, TWICE_DEPTH, least, worths

APART = 1  # so many blocks at the end of a chain are worth less than those before them: of these less is known
_LEAST, _SHARE = 64, 8  # how many chains are drawn: so many, or an eighth of all
_STALE_LOOKS, _STALE_SHARE = 64, 8  # a draw is stale after so many looks, or as many as an eighth of all chains,
_STALE_S = 1.0  # or after so long: the next request that can bear a draw gets one
_OLD_S, _OLD_SHARE = 4.0, 8  # a victim waits for one after so long, or once such a part of the tier has been replaced
_LOOKS_SOON = 24  # after so many looks more it does not wait for a request that can bear it
_LIGHT = 4.0  # a request that can bear so many times what a draw takes gets one in any case
_DRAW_US, _CHAINS_A_US = 35.0, 40.0  # what a draw takes, about
_MADE_MIN, _MADE_MOST = 4, 16  # ranks that are made anew with it: where there is time; where a victim waits, 0.12 ms
_SLACK = 1024
_SLICE = 8192  # chains, gone or here, that a draw looks at
_NEVER_S = -1e18
_ALL = float("inf")
Entry = tuple[float, int, int, int]  # worth, order, chain, number


class Candidates:
    """The last blocks of one tenant's chains, ordered for eviction: the one with the fewest expected uses a second
    first.
    """

    def __init__(self, residency: ResidencyView, tier: int, book: ChainBook, tenant: int) -> None:
        self._residency = residency
        self._tier = tier
        self._book = book
        self._tenant = tenant
        self._heap: list[Entry] = []
        self._ceiling = -1.0
        self.value_of_first = 0.0  # of the row that `first` has named, as of when its place in the order was found
        self._numbers = tenant << 40  # a slot may become another tenant's: no entry of ours may seem to be its
        self._drawn_s = _NEVER_S
        self._left_by_then = 0  # blocks that had left the tier
        self.looks_left = 0  # after so many more looks the draw is stale
        self._is_wanted = False  # a victim was asked for since the last draw
        self._hand = 0  # the next draw begins with this chain

    def first(self, now_s: float, exclude: Container[int]) -> int:
        """Return the row to evict first, or -1 if no chain's last block may be evicted. Rows in `exclude` are not
        returned.
        """
        book = self._book
        if self._is_due(now_s):
            if book.tables.is_any_asked:
                book.tables.make(_MADE_MOST)
            self._draw(now_s)
        self._is_wanted = True
        chains = book.chains
        heap, entry, tails = self._heap, chains.entry, chains.tail
        skipped: list[Entry] = []
        found = -1
        slices_left = -1
        while True:
            if not heap:
                if slices_left < 0:
                    slices_left = 1 + (chains.slots - 1) // _SLICE
                if self._ceiling == _ALL or skipped or not slices_left:
                    break
                slices_left -= 1
                self._draw(now_s)
                heap = self._heap
                continue
            top = heap[0]
            chain = top[2]
            row = tails[chain]
            if entry[chain] != top[3] or row < 0:
                heappop(heap)
            elif not self._residency.policy_may_name(row, self._tier):
                heappop(heap)
                chains.blocked[chain] = 1
            elif row in exclude:
                skipped.append(heappop(heap))
            else:
                found = row
                self.value_of_first = top[0]
                break
        for each in skipped:
            heappush(heap, each)
        return found

    def refresh(self, now_s: float, budget_us: float) -> float:
        """Sort the chains anew if that will be due soon and takes at most `budget_us` microseconds, or if the next
        victim would wait for it. Return about how many microseconds it took."""
        if not self._is_wanted:
            return 0.0
        took_us = _DRAW_US + min(self._book.chains.slots, _SLICE) / _CHAINS_A_US
        cells = int((budget_us - took_us - MAKING_US) / CELL_US)
        is_soon = now_s >= self._drawn_s + _STALE_S or self.looks_left <= _LOOKS_SOON
        if self._is_due(now_s):
            cells = _MADE_MOST
        elif budget_us < took_us * (1.0 if is_soon else _LIGHT):
            return 0.0
        if cells >= _MADE_MIN and self._book.tables.is_any_asked:
            took_us += MAKING_US + self._book.tables.make(cells) * CELL_US
        self._draw(now_s)
        return took_us

    def value(self, chain: int, now_s: float, row: int = -1) -> float:
        """Return the expected uses a second of the last block of `chain`, or of its block at `row`. They are computed
        from the rank that the chain had when it was last looked at."""
        book = self._book
        chains = book.chains
        if row < 0:
            row = chains.tail[chain]
        depth = book.residency.rows.depth[row]
        distance = max(0, chains.length[chain] - depth - 1)
        base = chains.base[chain]
        if chains.due_s[chain]:
            base = chains.worth(chain, depth, base, now_s)
        worth = base * book.end_reuse[END_OF_DISTANCE[distance] if distance < 4 else 3]
        worth *= 1.0 + depth / TWICE_DEPTH
        return worth + book.touches.rate(row, now_s) if book.shared[row] else worth

    def leaving(self, chain: int, run: Sequence[int], now_s: float) -> int:
        """Return how many of `run`, the last blocks of `chain`, the last one first, leave one after another: none is
        worth more than the first, which `first` has named, and no draw is due before.
        """
        book = self._book
        owner, shared, end = book.owner, book.shared, book.chains.length[chain] - APART
        depth, looks_left = book.residency.rows.depth[run[0]], self.looks_left
        was_shared, most = shared[run[0]], -1
        for at in range(1, len(run)):
            row = run[at]
            if owner[row] != chain:
                return at
            if (is_shared := shared[row]) or was_shared or depth >= end:  # else it keeps its place: it is worth as much
                if most < 0:
                    most = len(run) if now_s < self._drawn_s + _STALE_S else self._leaving_until_due(now_s)
                looks_left -= 1
                if looks_left <= -_LOOKS_SOON or at >= most or self.value(chain, now_s, row) > self.value_of_first:
                    return at
            was_shared = is_shared
            depth -= 1
        return len(run)

    def _leaving_until_due(self, now_s: float) -> int:
        """Return how many blocks may leave before a draw of some age is due."""
        if now_s >= self._drawn_s + _OLD_S:
            return 0
        left = self._book.left_blocks - self._left_by_then
        return max(0, (self._residency.tier_blocks(self._tier) - left * _OLD_SHARE) // (_OLD_SHARE + 1))

    def value_of_new(self, chain: int, depth: int) -> float:
        """Return the expected uses a second of a block of `chain` at `depth` that is not in the tier yet."""
        book = self._book
        chains = book.chains
        distance = chains.length[chain] - depth - 1
        end = 3 if distance >= 4 else END_OF_DISTANCE[max(0, distance)]  # far from the end, as nearly always
        return chains.base[chain] * book.end_reuse[end] * (1.0 + depth / TWICE_DEPTH)

    def look_at(self, chain: int, now_s: float, looks: int = 1, row: int = -1) -> float:
        """Place `chain`, whose last block or rank has changed, in the order of eviction again. `looks` is what the call
        counts towards the next sorting of all chains; a put counts 0, since the number of its parts is chance. Return
        the expected uses a second of its last block, or of its block at `row`, by which it is placed."""
        book = self._book
        worth = self.value(chain, now_s, row)
        self._numbers += 1
        self.looks_left -= looks
        book.chains.entry[chain] = self._numbers
        if worth <= self._ceiling:
            entry = (worth, book.chains.order[chain], chain, self._numbers)
            heap = self._heap
            if heap and heap[0][2] == chain:  # it has just lost its tail
                heapreplace(heap, entry)
            else:
                heappush(heap, entry)
                if len(heap) > 4 * book.chains.in_use + _SLACK:  # no victim was asked for in a long time
                    heap.clear()
                    self._ceiling, self.looks_left = -1.0, 0
        return worth

    def _is_due(self, now_s: float) -> bool:
        """Return whether a victim shall wait for a draw: as long as few blocks are chosen by old ranks, that costs less
        than a draw.
        """
        if self.looks_left <= -_LOOKS_SOON:
            return True
        if now_s < self._drawn_s + _STALE_S:
            return False
        left = self._book.left_blocks - self._left_by_then
        return now_s >= self._drawn_s + _OLD_S or left * _OLD_SHARE >= self._residency.tier_blocks(self._tier)

    def _draw(self, now_s: float) -> None:
        book = self._book
        chains = book.chains
        begin, end = self._hand, min(self._hand + _SLICE, chains.slots)
        self._hand = end if end < chains.slots else 0
        self._is_wanted = False
        # Entries that are 0 now were of this tenant: other tenants have entries of their own.
        slots, worth = worths(book, self._tenant, begin, end, now_s)
        count = len(slots)
        self.looks_left = max(_STALE_LOOKS, count // _STALE_SHARE)
        self._drawn_s, self._left_by_then = now_s, book.left_blocks
        wanted, first = max(_LEAST, count // _SHARE), self._numbers + 1
        slots, worth, orders, self._ceiling = least(chains, slots, worth, wanted, first)
        if self._ceiling == _ALL and end - begin < chains.slots:
            self._ceiling = float(worth.max()) if count else -1.0
        self._numbers += len(slots)
        numbers = range(first, self._numbers + 1)
        self._heap = list(zip(worth.tolist(), orders.tolist(), slots.tolist(), numbers, strict=True))
        heapify(self._heap)


_LOOK_S = 1.0  # between two looks at all chains,
_CHAINS_A_SECOND = 20_000  # and longer for more of them,
_LOOK_MAX_S = 30.0  # up to this
_LISTED = 4096  # chains, the least worth; once they have left, all are looked at again


class _Poor(NamedTuple):
    """An entry of the list, as of the look that made it: `order` of the chain's last use, and its rank as of class
    `cell`.
    """

    chain: int
    order: int
    cell: int
    rank: float


class PoorChains:
    """A list of the chains whose last block in the tier has fewer expected uses a second than `least`. Such blocks
    should leave the tier even if it has room.

    All chains are looked at now and then to make the list. A chain that was used, shared or hinted at since is judged
    again before `tails` returns its last block; once that block is removed, the block before it is the last one."""

    def __init__(self, residency: ResidencyView, tier: int, book: ChainBook, least: float) -> None:
        self._residency = residency
        self._tier = tier
        self._book = book
        self._least = least
        self._poor: list[_Poor] = []  # the least worth last
        self._held: dict[int, _Poor] = {}  # by chain: poor, but its tail may not be evicted
        self._look_s = _NEVER_S  # when to look at all chains again
        self._is_cut = False  # there were more

    def tails(self, now_s: float, limit: int) -> list[int]:
        """Return up to `limit` rows, the last blocks of chains that bring too few uses and may be evicted, the fewest
        first.
        """
        if now_s >= self._look_s:
            self._held.clear()
            self._look(now_s)
        found = self._listed(now_s, limit)
        while limit and self._is_cut and not found and not self._poor:
            self._look(now_s)
            found = self._listed(now_s, limit)
        return found

    def _listed(self, now_s: float, limit: int) -> list[int]:
        tails = self._book.chains.tail
        found: list[int] = []
        still_poor: list[_Poor] = []
        while self._poor and len(found) < limit:
            poor = self._poor.pop()
            if not self._is_poor(poor, now_s):
                continue
            row = tails[poor.chain]
            if not self._residency.policy_may_name(row, self._tier):
                self._held[poor.chain] = poor
                continue
            still_poor.append(poor)
            found.append(row)
        self._poor += reversed(still_poor)
        return found

    def released(self, chain: int) -> None:
        """Look at `chain` again if it was left out because its last block could not be evicted; now the block perhaps
        can be."""
        if self._held and (poor := self._held.pop(chain, None)) is not None:
            self._poor.append(poor)

    def _is_poor(self, poor: _Poor, now_s: float) -> bool:
        chains, chain = self._book.chains, poor.chain
        row = chains.tail[chain]
        if row < 0 or chains.order[chain] != poor.order:
            return False
        if chains.due_s[chain] or chains.cell[chain] != poor.cell:  # there was a hint
            return block_value(self._book, chain, row, now_s) < self._least
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
            exempt[at] = block_value(book, chain, chains.tail[chain], now_s) >= self._least
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


def block_value(book: ChainBook, chain: int, row: int, now_s: float) -> float:
    """Return the expected uses a second that holding the block at `row` of `chain` brings."""
    chains = book.chains
    worth = 0.0
    if chains.live[chain]:
        worth = float(book.ranks(np.array([chain]), now_s)[0])
    if chains.due_s[chain]:
        worth = chains.worth(chain, book.residency.rows.depth[row], worth, now_s)
    return worth + book.touches.rate(row, now_s) if book.shared[row] else worth
