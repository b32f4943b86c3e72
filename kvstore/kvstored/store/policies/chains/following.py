"""What happens in a tier, told to what knows its chains: the events of `chain-hazard`.

Owns the book, the guard, the candidates, and the rows that came and were not used yet. Decides no victim.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from kvstored.store.blocks import ResidencyView
from kvstored.store.policies.base import ChainHint, PolicySettings, RequestContext
from kvstored.store.policies.chains.book import NOBODY, NS, UNKNOWN, ChainBook
from kvstored.store.policies.chains.candidates import Candidates
from kvstored.store.policies.chains.guard import LruGuard
from kvstored.store.policies.chains.hazards import Ladder
from kvstored.store.policies.chains.keeping import Keeping
from kvstored.store.policies.chains.prior import shipped
from kvstored.store.policies.chains.upkeep import US_A_BLOCK
from kvstored.store.policies.lru import Lru
from kvstored.store.policies.ordered import OUT, PARKED, QUEUED

# What is known only later, the answer, comes last: until then the step above stands for it.
_BY_SHAPE = ("kind", "new_blocks", "length", "turn", "answer")
_BY_TEXT = ("kind", "text", "length", "answer")
_BY_PACE = ("kind", "pace", "gap", "new_blocks", "answer")
_BY_GAP = ("kind", "gap", "pace", "text", "answer")
COLD_ORDERS: tuple[tuple[str, ...], ...] = (_BY_SHAPE,)
PRIOR_ORDERS = {"chat": (_BY_SHAPE, _BY_TEXT), "agent": (_BY_PACE, _BY_GAP)}
HOUR_S = 3600.0
APART = 1  # so many blocks at the end of a chain leave each for itself: less is known of their return
_FRESH_MAX, _FRESH_SETTLED = 512, 64  # blocks that wait for their first use, as promoted ones may for long


class ChainFollower(Lru):
    """A base of `ChainHazard`. It keeps LRU's order as well, which decides while too little is known."""

    requests_min: ClassVar[int] = (
        8  # before that it is LRU; the shipped tables need no longer proof, the guard looks on
    )
    declining_min: ClassVar[int] = 24  # requests, and
    returns_min: ClassVar[int] = 2  # so many chains have to be continued before a newcomer is declined
    guarded: ClassVar[bool] = True
    forgets: ClassVar[bool] = True  # counts decay

    def __init__(self, residency: ResidencyView, tier: int, settings: PolicySettings | None = None) -> None:
        super().__init__(residency, tier, settings)
        ttl_s = self.settings.ttl_s
        self._ttl_ns = None if ttl_s is None else round(ttl_s * 1e9)
        self._kids = residency.copies[tier].kids
        self._book = ChainBook(residency, self.starting_tables(), forgets=self.forgets)
        self._guard = LruGuard()
        self._candidates: list[Candidates] = []
        self._fresh: list[int] = []  # came, not used yet: as a rule the use follows at once
        self._was_full = False  # somebody has asked for a victim
        self._unknown = 0  # rows that were there before
        self._context: RequestContext | None = None
        self._now_s = 0.0
        self._is_plain = False  # the chains' order is in force, and no time to live
        self._is_sure = False  # enough has been seen to decline a newcomer, once and for all
        self._named_worth = -1.0  # once it has been asked for
        self._named = self._next = -1  # the last victim by that order; who follows it, until something else happens
        self._keeping: Keeping | None = None
        if self.settings.keep_worth:
            self._keeping = Keeping(residency, tier, self._book, self.settings.keep_worth / HOUR_S)
            self._was_full = True  # the guard compares with an LRU of as many blocks as are held

    @classmethod
    def starting_tables(cls) -> list[Ladder]:
        """Those that ship, by workload, and empty ones; what comes decides which are believed."""
        known = [Ladder(prior.order, prior.counts) for prior in shipped()]
        return known + [Ladder(order) for order in COLD_ORDERS]

    @property
    def is_lru(self) -> bool:
        """Whether LRU's order is in force: too little is known, or LRU leads."""
        book = self._book
        return book.requests < self.requests_min or self._guard.is_lru_ahead

    # Events

    def inserted(self, row: int, now_ns: int) -> None:
        fresh, tenant = self._fresh, self.residency.tenant_of(row)
        if len(fresh) > _FRESH_MAX or row >= len(self._where) or tenant >= len(self._queues):
            self.inserted_run((row,), now_ns)
            return
        self._next = self._named = -1
        self._accesses += 1
        self._stamp[row] = self._accesses
        self._where[row] = QUEUED
        self._queues[tenant].push_back(row)
        self._rows += 1
        self._book.met_one(row, tenant)
        fresh.append(row)

    def inserted_run(self, rows: Sequence[int], now_ns: int) -> None:
        if len(self._fresh) > _FRESH_MAX:
            self._settle(_FRESH_SETTLED + len(rows))
        self._next = self._named = -1
        super().inserted_run(rows, now_ns)
        self._book.met(rows, self.residency.tenant_of(rows[0]))
        self._fresh += rows

    def adopt(self, rows: npt.NDArray[np.int64]) -> None:
        self._next = self._named = -1
        super().adopt(rows)
        np.frombuffer(self._book.owner, np.int32)[rows] = UNKNOWN
        self._unknown += len(rows)

    def expect(self, context: RequestContext) -> None:
        self._context = context

    def accessed(self, rows: Sequence[int], now_ns: int) -> None:
        self.requested(rows, (), self.residency.tenant_of(rows[0]), now_ns)

    def requested(self, rows: Sequence[int], missing: Sequence[bytes], tenant: int, now_ns: int) -> None:
        self._next = self._named = -1
        if rows:
            super().accessed(rows, now_ns)
        else:
            self._know_tenant(tenant)
        book, fresh = self._book, self._fresh
        self._now_s = now_s = now_ns * NS
        missed = len(fresh)
        if fresh:
            self._fresh = []
            if rows[-missed:] != fresh:
                taken = set(rows)
                self._fresh = [row for row in fresh if row not in taken]
                missed -= len(self._fresh)
        if rows and missed == len(rows) and book.is_promised(chain := book.owner[rows[0]]):
            filled = book.filled(rows, chain)
            self._look_at(chain, looks=0)
            rows, missed = rows[filled:], missed - filled
            if not rows:
                return
        if self._unknown:
            owner = book.owner
            for row in rows:
                if owner[row] == UNKNOWN:
                    owner[row] = NOBODY
                    self._unknown -= 1
        if self.guarded:
            if self._rows - missed > self._guard.capacity:
                self._guard.resize(self._rows - missed, is_full=self._was_full)
            if self._keeping is not None:
                self._guard.held_by_choice = self._rows - missed
            self._guard.used(tenant, self.residency.rows.keys, rows, missed, missing)
        context, self._context = self._context, None
        chain = book.used(rows, tenant, self._accesses, now_s, context, missing)
        if book.chains.tail[chain] >= 0:
            self._look_at(chain)
        self._keep_up(tenant, len(rows) + len(missing))
        self._is_plain = self._ttl_ns is None and not self.is_lru

    def _keep_up(self, tenant: int, blocks: int) -> None:
        """What is due, as far as a request of so many blocks can bear it."""
        taken_us = self._candidates[tenant].refresh(self._now_s, blocks * US_A_BLOCK)
        self._book.upkeep.requested(blocks, self._now_s, taken_us=taken_us)

    def arriving(self, tenant: int, parent: int, keys: Sequence[bytes], now_ns: int) -> None:
        self._know_tenant(tenant)
        self._next = self._named = -1
        book = self._book
        if book.promised_owner(keys[0], tenant) >= 0:
            return  # the request that missed them has said so
        self._now_s = now_s = now_ns * NS
        if self.guarded:
            self._guard.used(tenant, self.residency.rows.keys, (), 0, keys)
        self._accesses += 1
        chain = book.used((), tenant, self._accesses, now_s, None, keys, parent)
        if book.chains.tail[chain] >= 0:
            self._look_at(chain)
        self._keep_up(tenant, len(keys))
        self._is_plain = self._ttl_ns is None and not self.is_lru

    def answered(self, number: int, output_tokens: int, now_ns: int, hint: ChainHint | None = None) -> None:
        chain = self._book.answered(number, output_tokens, now_ns * NS, hint)
        if hint is not None and chain >= 0 and self._book.chains.tail[chain] >= 0:
            self._look_at(chain)

    def told(self, tenant: int, row: int, key: bytes, hint: ChainHint, now_ns: int) -> None:
        self._know_tenant(tenant)
        book = self._book
        chain = book.owner[row] if 0 <= row < len(book.owner) else -1
        if chain < 0:
            chain = book.owner_of(key, tenant)
        if chain < 0 or not book.chains.live[chain]:
            return
        if hint.next_step or hint.will_continue is not None or hint.answer_tokens:
            book.ended(chain, hint.answer_tokens, now_ns * NS, hint)
        if hint.due_ns is not None:
            book.due(chain, row, hint.due_ns * NS, now_ns * NS)
        self._now_s = now_ns * NS
        if book.chains.tail[chain] >= 0:
            self._look_at(chain)

    def removed(self, row: int) -> None:
        book, where = self._book, self._where
        chain = book.owner[row]
        chains = book.chains
        if chain < 0 or self._fresh or chains.tail[chain] != row or book.shared[row] or where[row] != QUEUED:
            self._removed_any(row, chain)
            return
        befores, afters = self._links.before, self._links.after  # the queue's `unlink`, without a call
        before, after = befores[row], afters[row]
        tenant = chains.tenant[chain]
        if before >= 0:
            afters[before] = after
        else:
            self._queues[tenant].front = after
        if after >= 0:
            befores[after] = before
        else:
            self._queues[tenant].back = before
        where[row] = OUT
        self._rows -= 1
        tail = book.left_last(row, chain, tenant, self._rows)
        depth = self.residency.rows.depth[row]
        if tail < 0:
            self._next = self._named = -1
        elif book.shared[tail] or chains.blocked[chain] or chains.due_s[chain] or chains.length[chain] - depth <= APART:
            self._lost(row, chain, tail, was_last=row)
        else:  # what `_lost` would find, without a call
            self._next, self._named = (tail if row == self._named else -1), -1

    def _removed_any(self, row: int, chain: int) -> None:
        self._next = self._named = -1
        if self._fresh and row in self._fresh:
            self._fresh.remove(row)
        super().removed(row)
        if chain >= 0:
            self._left((row,), chain)
        elif chain == UNKNOWN:
            self._unknown -= 1
            self._book.owner[row] = NOBODY

    def removed_run(self, rows: Sequence[int]) -> None:
        owner = self._book.owner
        chain = owner[rows[0]]
        if self._fresh or chain < 0 or [owner[row] for row in rows] != [chain] * len(rows):
            for row in rows:
                self.removed(row)
        else:
            super().removed_run(rows)
            self._left(rows, chain)

    def _left(self, rows: Sequence[int], chain: int) -> None:
        """`rows`, all of `chain`, have left the tier, the deepest first."""
        book, row = self._book, rows[-1]
        chains = book.chains
        was_tail, had_shared = chains.tail[chain] == rows[0], book.shared[row]
        book.left(rows, chain, chains.tenant[chain], self._rows)
        tail = chains.tail[chain]
        if was_tail and tail >= 0:
            self._lost(row, chain, tail, was_last=rows[0], is_equal=not had_shared)
        else:
            self._next = self._named = -1

    def _lost(self, row: int, chain: int, tail: int, *, was_last: int, is_equal: bool = True) -> None:
        """`row`, and what was below it down to `was_last`, has left; the chain ends with `tail` now."""
        book = self._book
        chains = book.chains
        is_far = chains.length[chain] - self.residency.rows.depth[row] > APART
        is_equal = is_equal and not book.shared[tail] and not chains.due_s[chain]
        if is_far and is_equal and not chains.blocked[chain]:
            self._next, self._named = (tail if was_last == self._named else -1), -1
            return  # the next block is worth just as much: the chain keeps its place
        chains.blocked[chain] = 0
        self._look_at(chain)

    def released(self, row: int) -> None:
        if self._kids[row]:
            return  # what holds it will say so in its turn
        chains, chain, is_parked = self._book.chains, self._book.owner[row], self._where[row] == PARKED
        is_known = chain < 0 or (chains.tail[chain] == row and not chains.blocked[chain])
        if is_known and not is_parked and self._keeping is None:
            return  # whether it may leave or not: as a rule its child has just left, and it is the tail already
        if not self.residency.may_leave(row, self.tier):
            return
        if is_parked:
            super().released(row)
        if chain < 0:
            return
        if self._keeping is not None:
            self._keeping.released(chain)
        if is_known:
            return
        tail = chains.tail[chain]
        if 0 <= tail != row:
            depth = self.residency.rows.depth
            if depth[row] < depth[tail] and self.residency.may_leave(tail, self.tier):
                return
        chains.tail[chain] = row
        chains.blocked[chain] = 0
        self._look_at(chain)

    def _look_at(self, chain: int, looks: int = 1) -> None:
        """The chain's tail, or what it is worth, is another one."""
        self._next = self._named = -1
        self._candidates[self._book.chains.tenant[chain]].look_at(chain, self._now_s, looks)

    def _settle(self, count: int | None = None) -> None:
        """Give chains to rows that came without being used: all, or so many that came first."""
        fresh = self._fresh[:count]
        del self._fresh[:count]
        for row in fresh:
            tenant = self.residency.tenant_of(row)
            chain = self._book.came_unused(row, tenant, self._stamp[row])
            if self._book.chains.tail[chain] >= 0:
                self._look_at(chain)

    # Rows

    def _know_tenant(self, tenant: int) -> None:
        while tenant >= len(self._queues):
            self._add_tenant()

    def _add_tenant(self) -> None:
        super()._add_tenant()
        self._book.add_tenant()
        self._candidates.append(Candidates(self.residency, self.tier, self._book, len(self._queues) - 1))

    def _grow(self, rows: int) -> None:
        super()._grow(rows)
        self._book.grow(rows)
