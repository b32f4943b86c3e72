"""Session chains by their uses for the room they take; leaf-first. `best` stands for this policy.

A follow-up turn needs all of its session's blocks, so the unit of decision is the chain. Hazard tables, learnt from
every chain that passes (evicted ones too, through a ghost of keys), say how likely a chain of some class and age is
used again; a rank made of them says how many uses a block of it is worth for each second it is held; the chain of the
lowest rank loses its last block. A new chain with the lowest rank of all is not stored (bypass). Shared prefixes are
worth the touches of other sessions.

Until some requests have been seen it is LRU; it is LRU again while a guard sees that LRU would hit
more. With `keep_worth` the policy names chains, tail first, that are worth less; while LRU decides, and for blocks of
no known chain, it names none.

After: LHD for hits per space-time (Beckmann, Chen, Cidon: NSDI 2018), Gittins for the rank (JRSS B 41, 1979). A bad
choice if chains say nothing: blocks without parents, each used by itself; it is LRU there, at three times the cost.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from kvstore_predictor.base import Piece, State
from kvstored.store.blocks import ResidencyView
from kvstored.store.blocks.rows import as_array
from kvstored.store.policies.base import (
    HOT_WORTH,
    WARM_WORTH,
    ChainHint,
    EvictionPolicy,
    Learns,
    Listens,
    Origin,
    PolicySettings,
    RequestContext,
    Rows,
    Share,
    Weighs,
)
from kvstored.store.policies.chains.book import NS, UNKNOWN, UNOWNED
from kvstored.store.policies.chains.eviction_order import APART, block_value
from kvstored.store.policies.chains.follower import HOUR_S, ChainFollower, LearningSettings
from kvstored.store.policies.chains.state import ladders as ladders_in
from kvstored.store.policies.chains.state import pieces as state_of
from kvstored.store.policies.chains.state import restore
from kvstored.store.policies.ordered import choose_tenant

_HOT_RANK = HOT_WORTH / HOUR_S  # worth one use a minute of holding it
_WARM_RANK = WARM_WORTH / HOUR_S
_NOT_OURS = -1.0
_DEFAULT = LearningSettings()
_WAITING_MAX = 256  # blocks of events that wait: half as many as may have been stored and not used yet


class WaitingEvents:
    """A queue of a tier's events. `follower` takes them in at the next turn of the event loop, for which no request
    waits, or earlier if a decision needs them. `later` has the meaning of `PolicySettings.later`. An entry of `events`
    has rows, the keys that were missing (None if the rows were stored, not used), tenant, time and context."""

    def __init__(self, follower: ChainFollower, later: Callable[[Callable[[], None]], object] | None) -> None:
        self.follower = follower
        self.context: RequestContext | None = None  # of the next request
        self.events: list[tuple[list[int], Sequence[bytes] | None, int, int, RequestContext | None]] = []
        self._blocks = 0
        self._later = later
        self._is_due = False  # `_catch_up` will be called

    def stored(self, rows: Sequence[int], tenant: int, now_ns: int) -> None:
        """Note that the blocks `rows` of `tenant` are new in the tier."""
        events = self.events
        if len(self.follower.fresh) > _WAITING_MAX:  # it looks at some of these, and when they were used last
            self.take_in()
            self.follower.inserted(rows, now_ns)
        elif events and events[-1][1] is None and events[-1][2] == tenant:
            events[-1][0].extend(rows)
            self._count(len(rows))
        else:
            events.append((list(rows), None, tenant, now_ns, None))
            self._count(len(rows))

    def used(self, rows: Sequence[int], missing: Sequence[bytes], tenant: int, now_ns: int) -> None:
        """Note that a request of `tenant` used the blocks `rows`, and also wanted those with the keys `missing`."""
        self.events.append((list(rows), list(missing), tenant, now_ns, self.context))
        self.context = None
        self._count(len(rows) + len(missing))

    def _count(self, blocks: int) -> None:
        self._blocks += blocks
        if self._blocks > _WAITING_MAX:
            self.take_in()
        self.call_later()

    def call_later(self) -> None:
        """Have the follower take in what waits, and do its background work, when no request waits."""
        if self._is_due:
            return
        if self._later is None:
            self._catch_up()
        else:
            self._is_due = True
            self._later(self._catch_up)

    def _catch_up(self) -> None:
        self._is_due = False
        self.take_in()
        self.follower.keep_up()

    def take_in(self) -> None:
        """Let the follower take in the events that wait."""
        if not self.events:
            return
        follower, events = self.follower, self.events
        self.events, self._blocks = [], 0
        for rows, missing, tenant, now_ns, context in events:
            if missing is None:
                follower.inserted(rows, now_ns)
            else:
                follower.requested(rows, missing, tenant, now_ns, context)


class ChainHazard(EvictionPolicy, Learns, Listens, Weighs):
    """The policy chain-hazard: it evicts the blocks with the fewest expected uses for the room they take, learned from
    chains. Nearly every access takes constant time; memory is 21 bytes for each row more than LRU, 100 for each chain,
    and a dictionary entry for each remembered key.
    """

    def __init__(
        self,
        residency: ResidencyView,
        tier: int,
        settings: PolicySettings | None = None,
        name: str = "",
        *,
        learning: LearningSettings = _DEFAULT,
    ) -> None:
        super().__init__(residency, tier, settings, name)
        self.follower = ChainFollower(residency, tier, self.settings, learning)
        self._waiting = WaitingEvents(self.follower, self.settings.later)
        self._is_sure = False  # enough has been seen to decline a newcomer, once and for all

    @property
    def is_lru(self) -> bool:
        """True while this policy decides as LRU (it evicts the block used longest ago): it knows too little yet, or LRU
        would have more hits."""
        self._waiting.take_in()
        return self.follower.is_lru

    def set_share(self, tenant: int, share: Share) -> None:
        super().set_share(tenant, share)
        self.follower.lru.set_share(tenant, share)

    # Events

    def inserted(self, rows: Sequence[int], now_ns: int) -> None:
        self._waiting.stored(rows, self.residency.tenant_of(rows[0]), now_ns)

    def adopt(self, rows: npt.NDArray[np.int64]) -> None:
        self._waiting.take_in()
        self.follower.adopt(rows)

    def expect(self, context: RequestContext) -> None:
        self._waiting.context = context

    def accessed(self, rows: Sequence[int], now_ns: int) -> None:
        self._waiting.used(rows, (), self.residency.tenant_of(rows[0]), now_ns)

    def requested(self, rows: Sequence[int], missing: Sequence[bytes], tenant: int, now_ns: int) -> None:
        self._waiting.used(rows, missing, tenant, now_ns)

    def arriving(self, tenant: int, parent: int, keys: Sequence[bytes], now_ns: int) -> None:
        self._waiting.take_in()
        self.follower.arriving(tenant, parent, keys, now_ns)
        if self.follower.owed:
            self._waiting.call_later()

    def answered(self, number: int, output_tokens: int, now_ns: int, hint: ChainHint | None = None) -> None:
        self._waiting.take_in()
        self.follower.answered(number, output_tokens, now_ns, hint)

    def on_hint(self, tenant: int, row: int, key: bytes, hint: ChainHint, now_ns: int) -> None:
        self._waiting.take_in()
        self.follower.on_hint(tenant, row, key, hint, now_ns)

    def removed(self, rows: Sequence[int]) -> None:
        if self._waiting.events:
            self._waiting.take_in()
        self.follower.removed(rows)

    def released(self, row: int) -> None:
        if self._waiting.events:
            self._waiting.take_in()
        self.follower.released(row)

    def __len__(self) -> int:
        self._waiting.take_in()
        return self.follower.lru.rows

    # Over a restart

    def export_state(self) -> Iterator[Piece]:
        self._waiting.take_in()
        return state_of(self.follower)

    def import_state(self, state: State, origin: Origin) -> None:
        self._waiting.take_in()
        former = self.follower
        ladders = ladders_in(state, former.book.tables.orders)
        follower = ChainFollower(
            self.residency, self.tier, self.settings, replace(former.learning, tables=lambda: ladders)
        )
        follower.learning = former.learning
        for tenant, share in self.shares.items():
            follower.lru.set_share(tenant, share)
        if len(self):
            rows = np.flatnonzero(former.lru.here())
            follower.adopt(rows[np.argsort(as_array(former.lru.stamp)[rows])])
        try:
            restore(follower, state, origin)
        except (KeyError, IndexError, TypeError) as error:
            raise ValueError(f"its parts do not fit together: {error}") from None
        self.follower = self._waiting.follower = follower

    def forget(self, tenant: int, keys: Sequence[bytes] | None) -> None:
        self._waiting.take_in()
        self.follower.forget(tenant, keys)

    # Decisions

    def next_victim(self, now_ns: int, *, exclude: Container[int] = (), tenant: int | None = None) -> int:
        if self._waiting.events:
            self._waiting.take_in()
        follower = self.follower
        row = follower.next
        is_next = row >= 0 and tenant is None and row not in exclude and not self.shares
        if is_next and self.residency.policy_may_name(row, self.tier):
            follower.named = row
            return row
        follower.next = follower.named = -1
        follower.named_worth = -1.0
        follower.now_s = now_s = now_ns * NS
        follower.was_full = True
        if follower.fresh:
            follower.settle()
        tenants = len(follower.candidates)
        if follower.is_plain and not self.shares and not follower.unknown and tenants == 1:
            candidates = follower.candidates[0]
            row = candidates.first(now_s, exclude)
            if row >= 0:
                follower.named, follower.named_worth = row, candidates.value_of_first
                return row
        if follower.is_lru:
            return follower.lru.next_victim(now_ns, exclude=exclude, tenant=tenant)
        if tenant is not None:
            return self._first(tenant, now_ns, exclude) if tenant < tenants else -1
        if tenants == 1 and not self.shares:
            return self._first(0, now_ns, exclude)
        return choose_tenant(
            self,
            tenants,
            first=lambda number: self._first(number, now_ns, exclude),
            standing=self._standing,
        )

    def next_victims(self, now_ns: int, limit: int) -> list[int]:
        row = self.next_victim(now_ns)
        if row < 0 or limit < 2:
            return [row] if row >= 0 else []
        follower = self.follower
        book = follower.book
        owner, chain, chains = book.owner, book.owner[row], book.chains
        is_by_worth = row == follower.named
        if not is_by_worth:
            is_first_of_lru = follower.is_lru and not self.shares and len(follower.candidates) == 1
            if not is_first_of_lru or chain < 0 or chains.tail[chain] != row or chains.blocked[chain]:
                return [row]
        if chains.due_s[chain]:
            return [row]
        shared = book.shared
        if is_by_worth and shared[row]:
            candidates, now_s = follower.candidates[chains.tenant[chain]], follower.now_s
            above = self.residency.rows.parent[row]
            if above < 0 or candidates.leaving(chain, (row, above), now_s) < 2:  # before all of it is looked at
                return [row]
            run = self.residency.run_above(row, self.tier, limit)
            return run[: candidates.leaving(chain, run, now_s)]
        if is_by_worth and self.residency.rows.depth[row] >= chains.length[chain] - APART:
            return [row]
        run = self.residency.run_above(row, self.tier, limit) if is_by_worth else follower.lru.run_from(row, limit)
        for at in range(1, len(run)):
            row = run[at]
            if owner[row] != chain or shared[row]:
                return run[:at]
        return run

    def declines(self, tenant: int, key: bytes, depth: int, victim: int, now_ns: int) -> bool:
        if self._waiting.events:
            self._waiting.take_in()
        follower = self.follower
        book = follower.book
        chains, theirs = book.chains, book.owner[victim]
        if tenant >= len(follower.candidates):
            follower.know_tenant(tenant)
        if victim != follower.named and not self._is_by_worth(tenant, theirs, victim, now_ns):
            return False
        if not self._is_sure:
            if (
                book.learning.requests < follower.learning.declining_min
                or book.learning.returns < follower.learning.returns_min
            ):
                return False  # what a client asks to be stored is refused on evidence alone
            self._is_sure = True
        ours = book.promised_owner(key, tenant)
        if ours < 0:
            return False
        its_worth = follower.named_worth
        if victim != follower.named or its_worth < 0.0:
            candidates = follower.candidates[chains.tenant[theirs]]
            its_worth = follower.named_worth = candidates.value(theirs, now_ns * NS)
        worth = follower.candidates[tenant].value_of_new(ours, depth)
        if worth > its_worth:
            return False
        return worth < its_worth or (worth == its_worth and chains.order[ours] < chains.order[theirs])

    def _is_by_worth(self, tenant: int, theirs: int, victim: int, now_ns: int) -> bool:
        """Return whether `victim` of chain `theirs` was chosen by the worth of chains."""
        if theirs < 0 or self.follower.book.chains.tail[theirs] != victim:
            return False
        if not self.follower.is_plain and self.follower.is_lru:
            return False
        # What tenants are owed goes before what blocks are worth.
        return not self.shares or self.residency.tenant_of(victim) == tenant

    def _first(self, tenant: int, now_ns: int, exclude: Container[int]) -> int:
        follower = self.follower
        if follower.unknown or follower.is_lru:
            row = follower.lru.first(tenant, now_ns, exclude)
            if row < 0 or follower.is_lru or follower.book.owner[row] == UNKNOWN:
                return row
        row = follower.candidates[tenant].first(now_ns * NS, exclude)
        return row if row >= 0 else follower.lru.first(tenant, now_ns, exclude)

    def below_keep_worth(self, now_ns: int, limit: int) -> list[int]:
        self._waiting.take_in()
        follower = self.follower
        if follower.poor is None or follower.is_lru:
            return []
        if follower.fresh:
            follower.settle()
        return follower.poor.tails(now_ns * NS, limit)

    def _standing(self, row: int) -> float:
        if self.follower.is_lru:
            return self.follower.lru.stamp[row]
        chain = self.follower.book.owner[row]
        if chain < 0 or self.follower.book.chains.tail[chain] != row:
            return _NOT_OURS
        return self.follower.candidates[self.follower.book.chains.tenant[chain]].value(chain, self.follower.now_s)

    def expected_uses_per_hour(self, row: int, now_ns: int) -> float | None:
        self._waiting.take_in()
        chain = self.follower.book.owner[row] if row < len(self.follower.book.owner) else UNOWNED
        if self.follower.is_lru or chain < 0:
            return None
        return block_value(self.follower.book, chain, row, now_ns * NS) * HOUR_S

    def classes(self, rows: Rows, now_ns: int) -> npt.NDArray[np.int64]:
        """Return an array with the class of each of `rows` (0 cold, 1 warm, 2 hot), by the expected uses of the blocks'
        chains. While the policy decides as LRU, the time of the last use decides."""
        self._waiting.take_in()
        found = self.follower.lru.classes(rows, now_ns)
        if self.follower.is_lru:
            return found
        owner, table = np.frombuffer(self.follower.book.owner, np.int32)[rows], self.follower.book.chains
        owned = np.flatnonzero(owner >= 0)
        chains, place = np.unique(owner[owned].astype(np.int64), return_inverse=True)
        ranks = self.follower.book.ranks(chains, now_ns * NS) * table.flags(table.live)[chains]
        found[owned] = np.add(ranks >= _HOT_RANK, ranks >= _WARM_RANK, dtype=np.int64)[place]
        return found
