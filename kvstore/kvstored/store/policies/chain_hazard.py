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

from collections.abc import Container
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from kvstored.store.policies.base import HOT_WORTH, WARM_WORTH, ResidencyClass
from kvstored.store.policies.chains.book import NOBODY, NS, UNKNOWN
from kvstored.store.policies.chains.following import APART, HOUR_S, ChainFollower
from kvstored.store.policies.chains.keeping import worth_of
from kvstored.store.policies.lru import Lru

_HOT_RANK = HOT_WORTH / HOUR_S  # worth one use a minute of holding it
_WARM_RANK = WARM_WORTH / HOUR_S
_NOT_OURS = -1.0


class ChainHazard(ChainFollower):
    """O(1) an access but for the looks at all chains, one in some requests; 21 bytes a row more than LRU, 100 a chain,
    and a key of the ghost costs a dictionary entry.
    """

    name: ClassVar[str] = "chain-hazard"

    # Decisions

    def next_victim(self, now_ns: int, *, exclude: Container[int] = (), tenant: int | None = None) -> int:
        row = self._next
        is_next = row >= 0 and tenant is None and row not in exclude and not self.shares
        if is_next and self.residency.may_leave(row, self.tier):
            self._named = row
            return row
        self._next = self._named = -1
        self._named_worth = -1.0
        self._now_s = now_s = now_ns * NS
        self._was_full = True
        if self._fresh:
            self._settle()
        if self._is_plain and not self.shares and not self._unknown and len(self._queues) == 1:
            candidates = self._candidates[0]
            row = candidates.first(now_s, exclude)
            if row >= 0:
                self._named, self._named_worth = row, candidates.worth_of_first
                return row
        if self.is_lru and self._ttl_ns is None:
            return super().next_victim(now_ns, exclude=exclude, tenant=tenant)
        if len(self._queues) == 1 and not self.shares:
            return self._first(0, now_ns, exclude)
        return super(Lru, self).next_victim(now_ns, exclude=exclude, tenant=tenant)

    def next_victims(self, now_ns: int, limit: int) -> list[int]:
        row = self.next_victim(now_ns)
        if row < 0 or row != self._named:
            return [row] if row >= 0 else []
        book = self._book
        owner, shared, chain = book.owner, book.shared, book.owner[row]
        # All but the last block of a chain go together.
        far = book.chains.length[chain] - APART
        depth = self.residency.rows.depth[row]
        if depth >= far or shared[row] or book.chains.due_s[chain]:
            return [row]
        run = self.residency.run_above(row, self.tier, limit)
        for at in range(1, len(run)):
            row = run[at]
            if owner[row] != chain or shared[row]:
                return run[:at]
        return run

    def declines(self, tenant: int, key: bytes, depth: int, victim: int, now_ns: int) -> bool:
        book = self._book
        chains, theirs = book.chains, book.owner[victim]
        if tenant >= len(self._queues):
            self._know_tenant(tenant)
        if victim != self._named and not self._is_by_worth(tenant, theirs, victim, now_ns):
            return False
        if not self._is_sure:
            learning = book.learning
            if learning.requests < self.declining_min or learning.returns < self.returns_min:
                return False  # what a client asks to be stored is refused on evidence alone
            self._is_sure = True
        ours = book.promised_owner(key, tenant)
        if ours < 0:
            return False
        its_worth = self._named_worth
        if victim != self._named or its_worth < 0.0:
            its_worth = self._named_worth = self._candidates[chains.tenant[theirs]].worth(theirs, now_ns * NS)
        worth = self._candidates[tenant].worth_of_new(ours, depth)
        if worth > its_worth:
            return False
        return worth < its_worth or (worth == its_worth and chains.order[ours] < chains.order[theirs])

    def _is_by_worth(self, tenant: int, theirs: int, victim: int, now_ns: int) -> bool:
        """Whether `victim` of chain `theirs` was chosen by what chains are worth."""
        if theirs < 0 or self._book.chains.tail[theirs] != victim:
            return False
        if not self._is_plain and (self.is_lru or self._is_expired(victim, now_ns)):
            return False
        # What tenants are owed goes before what blocks are worth.
        return not self.shares or self.residency.tenant_of(victim) == tenant

    def _first(self, tenant: int, now_ns: int, exclude: Container[int]) -> int:
        if self._unknown or self._ttl_ns is not None or self.is_lru:
            row = super()._first(tenant, now_ns, exclude)
            if row < 0 or self.is_lru or self._book.owner[row] == UNKNOWN or self._is_expired(row, now_ns):
                return row
        row = self._candidates[tenant].first(now_ns * NS, exclude)
        return row if row >= 0 else super()._first(tenant, now_ns, exclude)

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
        return worth_of(self._book, chain, row, now_ns * NS) * HOUR_S

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
        return self._book.ranks(chains, now_ns * NS) * table.flags(table.live)[chains]

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
