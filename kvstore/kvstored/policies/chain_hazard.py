"""Session chains by what they bring for the room they take; leaf-first. What `best` stands for.

A follow-up turn needs all of its session's blocks, so the unit of decision is the chain. Hazard tables, learnt from
every chain that passes (evicted ones too, through a ghost of keys), say how likely a chain of some class and age is
used again; a rank made of them says how many uses a block of it is worth for each second it is held; the chain of the
lowest rank loses its last block. A new chain with the lowest rank of all goes at once (bypass). Shared prefixes are
worth what others' touches bring.

Until some requests have been seen it is LRU; it is LRU again while a guard sees that LRU would hit
more. The time to live is that of LFU with TTL: what was idle for longer goes first. With `keep_worth` a chain leaves by
itself, tail first, once it is worth less; while LRU decides, and for blocks of no known chain, that rests.

After: LHD for hits per space-time (Beckmann, Chen, Cidon: NSDI 2018), Gittins for the rank (JRSS B 41, 1979). A bad
choice where chains say nothing: blocks without parents, each used by itself; it is LRU there, at three times the cost.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from kvstored.policies.base import (
    HOT_WORTH,
    WARM_WORTH,
    ChainHint,
    PolicySettings,
    RequestContext,
    ResidencyClass,
)
from kvstored.policies.chains.book import NOBODY, NS, UNKNOWN, ChainBook
from kvstored.policies.chains.candidates import Candidates
from kvstored.policies.chains.gittins import bins_of
from kvstored.policies.chains.guard import LruGuard
from kvstored.policies.chains.hazards import Ladder
from kvstored.policies.chains.keeping import Keeping, worth_of
from kvstored.policies.chains.learning import FAR_FROM_END
from kvstored.policies.chains.prior import shipped
from kvstored.policies.lru import Lru
from kvstored.residency import ResidencyView

# What is known only later, the answer, comes last: until then the step above stands for it.
_BY_SHAPE = ("kind", "new_blocks", "length", "turn", "answer")
_BY_TEXT = ("kind", "text", "length", "answer")
_BY_GAP = ("kind", "gap", "new_blocks", "answer")
COLD_ORDERS: tuple[tuple[str, ...], ...] = (_BY_SHAPE,)
PRIOR_ORDERS = {"chat": (_BY_SHAPE, _BY_TEXT), "agent": (_BY_SHAPE, _BY_GAP)}
_HOUR_S = 3600.0
_HOT_RANK = HOT_WORTH / _HOUR_S  # worth one use a minute of holding it
_WARM_RANK = WARM_WORTH / _HOUR_S
_NOT_OURS = -1.0
_FRESH_MAX, _FRESH_SETTLED = 512, 64  # blocks that wait for their first use, as promoted ones may for long
_SCORES = 5  # a chance to go on, in fifths, is a hint from 1 to 5; those above say what would have to happen


class ChainHazard(Lru):
    """O(1) an access but for the looks at all chains, one in some requests; 21 bytes a row more than LRU, 100 a chain,
    and a key of the ghost costs a dictionary entry.
    """

    name: ClassVar[str] = "chain-hazard"
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
        self._book = ChainBook(residency, self.starting_tables(), forgets=self.forgets)
        self._guard = LruGuard()
        self._candidates: list[Candidates] = []
        self._fresh: list[int] = []  # came, not used yet: as a rule the use follows at once
        self._was_full = False  # somebody has asked for a victim
        self._unknown = 0  # rows that were there before
        self._context: RequestContext | None = None
        self._now_s = 0.0
        self._is_plain = False  # the chains' order is in force, and no time to live
        self._named = self._next = -1  # the last victim by that order; who follows it, until something else happens
        self._keeping: Keeping | None = None
        if self.settings.keep_worth:
            self._keeping = Keeping(residency, tier, self._book, self.settings.keep_worth / _HOUR_S)
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
        self.inserted_run((row,), now_ns)

    def inserted_run(self, rows: Sequence[int], now_ns: int) -> None:
        if len(self._fresh) > _FRESH_MAX:
            self._settle(_FRESH_SETTLED + len(rows))
        self._next = -1
        super().inserted_run(rows, now_ns)
        self._book.met(rows, self.residency.tenant_of(rows[0]))
        self._fresh += rows

    def adopt(self, rows: npt.NDArray[np.int64]) -> None:
        self._next = -1
        super().adopt(rows)
        np.frombuffer(self._book.owner, np.int32)[rows] = UNKNOWN
        self._unknown += len(rows)

    def expect(self, context: RequestContext) -> None:
        self._context = context

    def accessed(self, rows: Sequence[int], now_ns: int) -> None:
        self.requested(rows, (), self.residency.tenant_of(rows[0]), now_ns)

    def requested(self, rows: Sequence[int], missing: Sequence[bytes], tenant: int, now_ns: int) -> None:
        self._next = -1
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
            self._look_at(chain)
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
        book.upkeep.requested(len(rows) + len(missing), now_s)
        if book.chains.tail[chain] >= 0:
            self._look_at(chain)
        self._is_plain = self._ttl_ns is None and not self.is_lru

    def arriving(self, tenant: int, parent: int, keys: Sequence[bytes], now_ns: int) -> None:
        self._know_tenant(tenant)
        self._next = -1
        book = self._book
        if book.is_promised(book.owner_of(keys[0], tenant)):
            return  # the request that missed them has said so
        self._now_s = now_s = now_ns * NS
        if self.guarded:
            self._guard.used(tenant, self.residency.rows.keys, (), 0, keys)
        self._accesses += 1
        chain = book.used((), tenant, self._accesses, now_s, None, keys, parent)
        book.upkeep.requested(len(keys), now_s)
        if book.chains.tail[chain] >= 0:
            self._look_at(chain)
        self._is_plain = self._ttl_ns is None and not self.is_lru

    def answered(self, number: int, output_tokens: int, now_ns: int, hint: int = 0) -> None:
        self._book.answered(number, output_tokens, now_ns * NS, hint)

    def told(self, tenant: int, row: int, key: bytes, hint: ChainHint, now_ns: int) -> None:
        self._know_tenant(tenant)
        book = self._book
        chain = book.owner[row] if 0 <= row < len(book.owner) else -1
        if chain < 0:
            chain = book.owner_of(key, tenant)
        if chain < 0 or not book.chains.live[chain]:
            return
        number = hint.next_step and _SCORES + hint.next_step
        if hint.will_continue is not None:
            number = 1 + min(int(hint.will_continue * _SCORES), _SCORES - 1)
        if number or hint.answer_tokens:
            book.ended(chain, hint.answer_tokens, now_ns * NS, number)
        if hint.due_ns is not None:
            book.chains.due_s[chain] = hint.due_ns * NS
        self._now_s = now_ns * NS
        if book.chains.tail[chain] >= 0:
            self._look_at(chain)

    def awaited(self, row: int, due_ns: int) -> None:
        chains, chain = self._book.chains, self._book.owner[row]
        if chain >= 0 and chains.live[chain]:
            chains.due_s[chain] = due_ns * NS
            if chains.tail[chain] >= 0:
                self._look_at(chain)

    def removed(self, row: int) -> None:
        self._next = -1
        super().removed(row)
        book = self._book
        chain = book.owner[row]
        if self._fresh and row in self._fresh:
            self._fresh.remove(row)
        if chain < 0:
            if chain == UNKNOWN:
                self._unknown -= 1
                book.owner[row] = NOBODY
            return
        tails = book.chains.tail
        chains = book.chains
        was_tail = tails[chain] == row
        tenant = chains.tenant[chain]
        had_shared = book.shared[row]
        book.left(row, tenant, self._rows)
        tail = tails[chain]
        if was_tail and tail >= 0:
            is_far = chains.length[chain] - self.residency.rows.depth[row] > FAR_FROM_END
            if is_far and not (chains.blocked[chain] or had_shared or book.shared[tail]):
                if row == self._named:
                    self._next = tail
                return  # the next block is worth just as much: the chain keeps its place
            chains.blocked[chain] = 0
            self._look_at(chain)

    def released(self, row: int) -> None:
        super().released(row)
        chain = self._book.owner[row]
        if chain < 0:
            return
        if self._keeping is not None:
            self._keeping.released(chain)
        chains = self._book.chains
        tail = chains.tail[chain]
        if tail == row:
            if not chains.blocked[chain]:
                return
        elif tail >= 0:
            depth = self.residency.rows.depth
            if depth[row] < depth[tail] and self.residency.may_leave(tail, self.tier):
                return
        chains.tail[chain] = row
        chains.blocked[chain] = 0
        self._look_at(chain)

    def _look_at(self, chain: int) -> None:
        """The chain's tail, or what it is worth, is another one."""
        self._next = -1
        self._candidates[self._book.chains.tenant[chain]].look_at(chain, self._now_s)

    # Decisions

    def next_victim(self, now_ns: int, *, exclude: Container[int] = (), tenant: int | None = None) -> int:
        row = self._next
        if row >= 0 and not exclude and tenant is None and not self.shares and self.residency.may_leave(row, self.tier):
            self._named = row
            return row
        self._next = self._named = -1
        self._now_s = now_s = now_ns * NS
        self._was_full = True
        if self._fresh:
            self._settle()
        if self._is_plain and not self.shares and not self._unknown and len(self._queues) == 1:
            row = self._candidates[0].first(now_s, exclude)
            if row >= 0:
                self._named = row
                return row
        if self.is_lru and self._ttl_ns is None:
            return super().next_victim(now_ns, exclude=exclude, tenant=tenant)
        if len(self._queues) == 1 and not self.shares:
            return self._first(0, now_ns, exclude)
        return super(Lru, self).next_victim(now_ns, exclude=exclude, tenant=tenant)

    def declines(self, tenant: int, key: bytes, depth: int, victim: int, now_ns: int) -> bool:
        self._know_tenant(tenant)
        book = self._book
        chains, theirs = book.chains, book.owner[victim]
        if self.is_lru or theirs < 0 or chains.tail[theirs] != victim or self._is_expired(victim, now_ns):
            return False
        if book.requests < self.declining_min or book.returns < self.returns_min:
            return False  # what a client asks to be stored is refused on evidence alone
        if self.shares and self.residency.tenant_of(victim) != tenant:
            return False  # what tenants are owed goes before what blocks are worth
        ours = book.owner_of(key, tenant)
        if not book.is_promised(ours):
            return False
        now_s = now_ns * NS
        worth = self._candidates[tenant].worth_of_new(ours, depth)
        return (worth, chains.order[ours]) < (
            self._candidates[chains.tenant[theirs]].worth(theirs, now_s), chains.order[theirs],
        )  # fmt: skip

    def _first(self, tenant: int, now_ns: int, exclude: Container[int]) -> int:
        if self._unknown or self._ttl_ns is not None or self.is_lru:
            row = super()._first(tenant, now_ns, exclude)
            if row < 0 or self.is_lru or self._book.owner[row] == UNKNOWN or self._is_expired(row, now_ns):
                return row
        row = self._candidates[tenant].first(now_ns * NS, exclude)
        return row if row >= 0 else super()._first(tenant, now_ns, exclude)

    def _settle(self, count: int | None = None) -> None:
        """Give chains to rows that came without being used: all, or so many that came first."""
        fresh = self._fresh[:count]
        del self._fresh[:count]
        for row in fresh:
            tenant = self.residency.tenant_of(row)
            chain = self._book.came_unused(row, tenant, self._stamp[row])
            if self._book.chains.tail[chain] >= 0:
                self._look_at(chain)

    def expired(self, now_ns: int, limit: int) -> list[int]:
        found: list[int] = []
        for tenant in range(len(self._queues)):
            while len(found) < limit:
                row = super()._first(tenant, now_ns, found)
                if row < 0 or not self._is_expired(row, now_ns):
                    break
                found.append(row)
        if self._keeping is not None and len(found) < limit and not self.is_lru:
            if self._fresh:
                self._settle()
            found += self._keeping.expired(now_ns * NS, limit - len(found), found)
        return found

    def _is_expired(self, row: int, now_ns: int) -> bool:
        return self._ttl_ns is not None and now_ns - self.residency.rows.last_access_ns[row] >= self._ttl_ns

    def _standing(self, row: int) -> float:
        if self.is_lru:
            return super()._standing(row)
        chain = self._book.owner[row]
        if chain < 0 or self._book.chains.tail[chain] != row:
            return _NOT_OURS
        return self._candidates[self._book.chains.tenant[chain]].worth(chain, self._now_s)

    def worth(self, row: int, now_ns: int) -> float | None:
        chain = self._book.owner[row] if row < len(self._book.owner) else NOBODY
        if self.is_lru or chain < 0:
            return None
        return worth_of(self._book, chain, row, now_ns * NS) * _HOUR_S

    # Classes: from the ranks, once there are any

    def residency_class(self, row: int, now_ns: int) -> ResidencyClass:
        chain = self._book.owner[row]
        if self.is_lru or chain < 0:
            return super().residency_class(row, now_ns)
        rank = self._rank_of(np.array([chain]), now_ns)[0]
        if rank >= _HOT_RANK:
            return ResidencyClass.HOT
        return ResidencyClass.WARM if rank >= _WARM_RANK else ResidencyClass.COLD

    def _rank_of(self, chains: npt.NDArray[np.int64], now_ns: int) -> npt.NDArray[np.float64]:
        table = self._book.chains
        ages = now_ns * NS - table.floats(table.used_s)[chains]
        rank = self._book.tables.ranks(table.ints(table.cell)[chains].astype(np.int64), bins_of(ages))
        return rank * table.flags(table.live)[chains]

    def _class_masks(self, now_ns: int) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
        hot, warm = super()._class_masks(now_ns)
        if self.is_lru:
            return hot, warm
        owner = np.frombuffer(self._book.owner, np.int32)
        owned = np.flatnonzero(owner >= 0)
        chains, place = np.unique(owner[owned], return_inverse=True)
        rank = self._rank_of(chains.astype(np.int64), now_ns)[place]
        hot[owned], warm[owned] = rank >= _HOT_RANK, rank >= _WARM_RANK
        return hot, warm

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
