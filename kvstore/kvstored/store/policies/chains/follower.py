"""Follows a tier's chains: the events of `chain-hazard`.

Owns LRU's order, which decides while too little is known, the book, the guard, the candidates, and the rows that were
stored and not used yet. Decides no victim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter, or_

import numpy as np
import numpy.typing as npt

from kvstore_predictor.ladders import Ladder
from kvstore_predictor.prior import shipped
from kvstored.store.blocks import ResidencyView
from kvstored.store.policies.base import ChainHint, PolicySettings, RequestContext
from kvstored.store.policies.chains.book import NS, UNKNOWN, UNOWNED, ChainBook
from kvstored.store.policies.chains.eviction_order import APART, Candidates, PoorChains
from kvstored.store.policies.chains.guard import LruGuard
from kvstored.store.policies.chains.learning import US_A_BLOCK
from kvstored.store.policies.lru import Lru
from kvstored.store.policies.ordered import OUT, PARKED, QUEUED

# What is known only later, the answer, comes last: until then the step above stands for it.
BY_SHAPE = ("kind", "new_blocks", "length", "turn", "answer")
UNTRAINED_ORDERS: tuple[tuple[str, ...], ...] = (BY_SHAPE, ())  # the last knows ages alone
HOUR_S = 3600.0
_FRESH_MAX, _FRESH_SETTLED = 512, 64  # blocks that wait for their first use, as promoted ones may for long


def starting_tables() -> list[Ladder]:
    """Return the hazard tables to start from: the shipped ones, one for each workload, and empty ones. Later events
    decide which are believed.
    """
    known = [Ladder(prior.order, prior.counts) for prior in shipped()]
    return known + [Ladder(order) for order in UNTRAINED_ORDERS]


@dataclass(frozen=True, slots=True)
class LearningSettings:
    """The settings of learning in the policy chain-hazard.

    `tables` makes the hazard tables (chances of a next request by age) to start from. With `is_guarded`, LRU decides
    while it would have more hits. With `forgets`, the tables' counts decay. Before `requests_min` requests the policy
    decides as LRU. A new block is declined only after `declining_min` requests and `returns_min` continued chains."""

    tables: Callable[[], list[Ladder]] = starting_tables
    is_guarded: bool = True
    forgets: bool = True
    requests_min: int = 8
    declining_min: int = 24
    returns_min: int = 2


class ChainFollower:
    """The part of the policy chain-hazard that follows the tier's events and keeps its chains up to date. `named` is
    the row of the last victim chosen by the order of chains, and `next` the row to evict after it; both are -1 once
    something else has happened. `is_plain` is True while the order of chains decides."""

    def __init__(
        self, residency: ResidencyView, tier: int, settings: PolicySettings, learning: LearningSettings
    ) -> None:
        self.residency = residency
        self.tier = tier
        self.learning = learning
        self.lru = Lru(residency, tier)
        self.book = ChainBook(residency, learning.tables(), forgets=learning.forgets)
        self.guard = LruGuard()
        self.candidates: list[Candidates] = []  # by tenant
        self.fresh: list[int] = []  # stored, not used yet: as a rule the use follows at once
        self.was_full = False  # a victim has been asked for
        self.unknown = 0  # rows that were there before
        self.now_s = 0.0
        self.is_plain = False
        self.named_worth = -1.0  # once it has been asked for
        self.named = self.next = -1
        self.poor: PoorChains | None = None
        self.owed: list[tuple[int, int]] = []  # upkeep: tenant and blocks of requests
        self._copies = residency.copies[tier]
        if settings.keep_worth:
            self.poor = PoorChains(residency, tier, self.book, settings.keep_worth / HOUR_S)
            self.was_full = True  # the guard compares with an LRU of as many blocks as are held

    @property
    def is_lru(self) -> bool:
        """True while the policy decides as LRU (it evicts the block used longest ago): it knows too little yet, or LRU
        would have more hits."""
        return self.book.learning.requests < self.learning.requests_min or self.guard.is_lru_ahead

    # Events

    def inserted(self, rows: Sequence[int], now_ns: int) -> None:
        fresh, row, tenant = self.fresh, rows[0], self.residency.tenant_of(rows[0])
        is_new = len(fresh) > _FRESH_MAX or row >= len(self.lru.where) or tenant >= len(self.lru.queues.of)
        if is_new or len(rows) > 1:
            self._inserted_run(rows, now_ns)
            return
        self.next = self.named = -1
        self.lru.expect_accesses(1)
        self.lru.accesses += 1
        self.lru.stamp[row] = self.lru.accesses
        self.lru.where[row] = QUEUED
        self.lru.queues.of[tenant].push_back(row)
        self.lru.rows += 1
        self.book.met(rows, tenant)
        fresh.append(row)

    def _inserted_run(self, rows: Sequence[int], now_ns: int) -> None:
        if len(self.fresh) > _FRESH_MAX:
            self.settle(_FRESH_SETTLED + len(rows))
        self.next = self.named = -1
        self.lru.inserted(rows, now_ns)
        self._make_room()
        self.book.met(rows, self.residency.tenant_of(rows[0]))
        self.fresh += rows

    def adopt(self, rows: npt.NDArray[np.int64]) -> None:
        self.next = self.named = -1
        self.lru.adopt(rows)
        self._make_room()
        np.frombuffer(self.book.owner, np.int32)[rows] = UNKNOWN
        self.unknown += len(rows)

    def requested(
        self,
        rows: Sequence[int],
        missing: Sequence[bytes],
        tenant: int,
        now_ns: int,
        context: RequestContext | None = None,
    ) -> None:
        self.next = self.named = -1
        if rows:
            self.lru.accessed(rows, now_ns)
        else:
            self.know_tenant(tenant)
        book, fresh = self.book, self.fresh
        self.now_s = now_s = now_ns * NS
        missed = len(fresh)
        if fresh:
            self.fresh = []
            if rows[-missed:] != fresh:
                taken = set(rows)
                self.fresh = [row for row in fresh if row not in taken]
                missed -= len(self.fresh)
        if rows and not missing and missed == len(rows) and book.is_promised(chain := book.owner[rows[0]]):
            filled = book.filled(rows, chain)
            self._look_at(chain, looks=0)
            rows, missed = rows[filled:], missed - filled
            if not rows:
                return
        if self.unknown:
            owner = book.owner
            for row in rows:
                if owner[row] == UNKNOWN:
                    owner[row] = UNOWNED
                    self.unknown -= 1
        if self.learning.is_guarded:
            if self.lru.rows - missed > self.guard.capacity:
                self.guard.resize(self.lru.rows - missed, is_full=self.was_full)
            if self.poor is not None:
                self.guard.held_by_choice = self.lru.rows - missed
            self.guard.used(tenant, self.residency.rows.keys, rows, missed, missing)
        chain = book.used(rows, tenant, self.lru.accesses, now_s, context, missing)
        if book.chains.tail[chain] >= 0:
            self._look_at(chain)
        self.owed.append((tenant, len(rows) + len(missing)))
        self.is_plain = not self.is_lru

    def keep_up(self) -> None:
        """Run at most one step of background work for each request that was taken in since the last call. A request may
        spend 2 µs for each of its blocks, less the time that refreshing the candidates took.
        """
        owed, self.owed = self.owed, []
        for tenant, blocks in owed:
            taken_us = self.candidates[tenant].refresh(self.now_s, blocks * US_A_BLOCK)
            self.book.upkeep.requested(blocks, self.now_s, taken_us=taken_us)

    def arriving(self, tenant: int, parent: int, keys: Sequence[bytes], now_ns: int) -> None:
        self.know_tenant(tenant)
        self.next = self.named = -1
        book = self.book
        if book.promised_owner(keys[0], tenant) >= 0:
            return  # the request that missed them has said so
        self.now_s = now_s = now_ns * NS
        if self.learning.is_guarded:
            self.guard.used(tenant, self.residency.rows.keys, (), 0, keys)
        self.lru.accesses += 1
        chain = book.used((), tenant, self.lru.accesses, now_s, None, keys, parent)
        if book.chains.tail[chain] >= 0:
            self._look_at(chain)
        self.owed.append((tenant, len(keys)))
        self.is_plain = not self.is_lru

    def answered(self, number: int, output_tokens: int, now_ns: int, hint: ChainHint | None = None) -> None:
        chain = self.book.answered(number, output_tokens, now_ns * NS, hint)
        if hint is not None and chain >= 0 and self.book.chains.tail[chain] >= 0:
            self._look_at(chain)

    def on_hint(self, tenant: int, row: int, key: bytes, hint: ChainHint, now_ns: int) -> None:
        self.know_tenant(tenant)
        book = self.book
        chain = book.owner[row] if 0 <= row < len(book.owner) else -1
        if chain < 0:
            chain = book.ghosts[tenant].owner_of(key)
        if chain < 0 or not book.chains.live[chain]:
            return
        if hint.next_step or hint.will_continue is not None or hint.answer_tokens:
            book.ended(chain, hint.answer_tokens, now_ns * NS, hint)
        if hint.due_ns is not None:
            book.due(chain, row, hint.due_ns * NS, now_ns * NS)
        self.now_s = now_ns * NS
        if book.chains.tail[chain] >= 0:
            self._look_at(chain)

    def removed(self, rows: Sequence[int]) -> None:
        if len(rows) > 1:
            self._removed_run(rows)
            return
        book, where, row = self.book, self.lru.where, rows[0]
        chain = book.owner[row]
        chains = book.chains
        if chain < 0 or self.fresh or chains.tail[chain] != row or book.shared[row] or where[row] != QUEUED:
            self._removed_any(row, chain)
            return
        queues = self.lru.queues
        befores, afters = queues.links.before, queues.links.after  # the queue's `unlink`, without a call
        before, after = befores[row], afters[row]
        tenant = chains.tenant[chain]
        if before >= 0:
            afters[before] = after
        else:
            queues.of[tenant].front = after
        if after >= 0:
            befores[after] = before
        else:
            queues.of[tenant].back = before
        where[row] = OUT
        self.lru.rows -= 1
        tail = book.left_last(row, chain, tenant, self.lru.rows)
        depth = self.residency.rows.depth[row]
        if tail < 0:
            self.next = self.named = -1
        elif book.shared[tail] or chains.blocked[chain] or chains.due_s[chain] or chains.length[chain] - depth <= APART:
            self._lost(row, chain, tail, was_last=row)
        else:  # what `_lost` would find, without a call
            self.next, self.named = (tail if row == self.named else -1), -1

    def _removed_any(self, row: int, chain: int) -> None:
        self.next = self.named = -1
        if self.fresh and row in self.fresh:
            self.fresh.remove(row)
        self.lru.removed((row,))
        if chain >= 0:
            self._left((row,), chain)
        elif chain == UNKNOWN:
            self.unknown -= 1
            self.book.owner[row] = UNOWNED

    def _removed_run(self, rows: Sequence[int]) -> None:
        owner = self.book.owner
        chain = owner[rows[0]]
        if self.fresh or chain < 0 or itemgetter(*rows)(owner).count(chain) < len(rows):
            for row in rows:
                self.removed((row,))
        else:
            self.lru.removed(rows)
            self._left(rows, chain)

    def _left(self, rows: Sequence[int], chain: int) -> None:
        """Note that `rows`, all of `chain`, have left the tier, the deepest first."""
        book, row = self.book, rows[-1]
        chains = book.chains
        was_tail, had_shared = chains.tail[chain] == rows[0], book.shared[row]
        looks, looked = self._looks_between(rows, chain) if len(rows) > 1 else (0, -1)
        book.left(rows, chain, chains.tenant[chain], self.lru.rows)
        tail = chains.tail[chain]
        if was_tail and tail >= 0:
            self._lost(row, chain, tail, was_last=rows[0], is_equal=not had_shared, looks=looks, looked=looked)
        else:
            self.candidates[chains.tenant[chain]].looks_left -= looks if was_tail else 0
            self.next = self.named = -1

    def _looks_between(self, rows: Sequence[int], chain: int) -> tuple[int, int]:
        """Return how often `chain` would be looked at if its last blocks `rows` left one by one, before the last of
        them did, and the row that was its last when it was looked at last.
        """
        shared = self.book.shared
        is_end = self.book.chains.length[chain] - self.residency.rows.depth[rows[0]] <= APART
        touches = itemgetter(*rows)(shared)
        if not any(touches):
            return int(is_end), rows[1]
        touched = list(map(bool, touches))
        looks = list(map(or_, [is_end or touched[0], *touched[1:-1]], touched[1:]))
        return looks.count(True), rows[max((at for at, is_look in enumerate(looks, 1) if is_look), default=0)]

    def _lost(
        self, row: int, chain: int, tail: int, *, was_last: int, is_equal: bool = True, looks: int = 0, looked: int = -1
    ) -> None:
        """Note that `row`, and the rows below it down to `was_last`, have left; the chain ends with `tail` now. On the
        way the chain should have been looked at `looks` times, when `looked` was its last row at last."""
        book = self.book
        chains = book.chains
        is_far = chains.length[chain] - self.residency.rows.depth[row] > APART
        is_equal = is_equal and not book.shared[tail] and not chains.due_s[chain]
        if is_far and is_equal and not chains.blocked[chain]:  # the next block is worth just as much:
            self.next, self.named = (tail if was_last == self.named else -1), -1
            if looks:
                candidates = self.candidates[chains.tenant[chain]]
                self.named_worth = candidates.look_at(chain, self.now_s, looks, looked)
            return  # the chain keeps its place
        chains.blocked[chain] = 0
        self._look_at(chain, looks + 1)

    def forget(self, tenant: int, keys: Sequence[bytes] | None) -> None:
        """Drop everything that names the blocks `keys` of `tenant`, or all of its blocks that are not in the tier
        (None).
        """
        if tenant >= len(self.candidates):
            return
        ghost = self.book.ghosts[tenant]
        if keys is None:
            ghost.clear()
            self.guard.forget_all(tenant)
            return
        for key in keys:
            ghost.forget(key)
            self.guard.forget(tenant, key)

    def released(self, row: int) -> None:
        if self._copies.kids[row]:  # what holds it will say so in its turn
            if self.lru.where[row] == PARKED and self.residency.policy_may_name(row, self.tier):
                self.lru.released(row)  # a block that its children do not need
            return
        chains, chain, is_parked = self.book.chains, self.book.owner[row], self.lru.where[row] == PARKED
        is_known = chain < 0 or (chains.tail[chain] == row and not chains.blocked[chain])
        if is_known and not is_parked and self.poor is None:
            return  # whether it may be evicted or not: as a rule its child was just evicted, and it is the tail already
        if not self.residency.policy_may_name(row, self.tier):
            return
        if is_parked:
            self.lru.released(row)
        if chain < 0:
            return
        if self.poor is not None:
            self.poor.released(chain)
        if is_known:
            return
        tail = chains.tail[chain]
        if 0 <= tail != row:
            depth = self.residency.rows.depth
            if depth[row] < depth[tail] and self.residency.policy_may_name(tail, self.tier):
                return
        chains.tail[chain] = row
        chains.blocked[chain] = 0
        self._look_at(chain)

    def _look_at(self, chain: int, looks: int = 1) -> None:
        """Look at a chain again, whose tail or worth has changed."""
        self.next = self.named = -1
        self.candidates[self.book.chains.tenant[chain]].look_at(chain, self.now_s, looks)

    def settle(self, count: int | None = None) -> None:
        """Assign chains to the rows that came to the tier without a use: to all of them, or to the `count` that came
        first."""
        fresh = self.fresh[:count]
        del self.fresh[:count]
        for row in fresh:
            tenant = self.residency.tenant_of(row)
            chain = self.book.came_unused(row, tenant, self.lru.stamp[row])
            if self.book.chains.tail[chain] >= 0:
                self._look_at(chain)

    # Rows

    def know_tenant(self, tenant: int) -> None:
        if tenant >= len(self.candidates):
            while tenant >= len(self.lru.queues.of):
                self.lru.add_tenant()
            self._make_room()

    def _make_room(self) -> None:
        """Make room for the tenants and rows that LRU's order has room for."""
        while len(self.candidates) < len(self.lru.queues.of):
            self.book.add_tenant()
            self.candidates.append(Candidates(self.residency, self.tier, self.book, len(self.candidates)))
        if len(self.book.owner) < len(self.lru.where):
            self.book.grow(len(self.lru.where))
