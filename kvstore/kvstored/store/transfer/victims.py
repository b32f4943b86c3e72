"""Victims: the blocks that are evicted from a tier next, in this order: orphans, blocks of a priority below 0, blocks
that the policy names, blocks of a priority above 0. A tenant over its maximum is found first and, where tenants have
weights, then the one that holds the most for its weight; the order is among its blocks: no priority takes from another
tenant's share.

Owns the order between these, a tenant's confinement to its own blocks, and what is passed over on the way. Never evicts
a block.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from functools import partial

import numpy as np

from kvstore_tiers.base import ContainerReport
from kvstored.clock import Clock
from kvstored.store.blocks import Residency
from kvstored.store.blocks.listing import rows_in
from kvstored.store.blocks.orphans import Tokens
from kvstored.store.blocks.rows import TierCopies
from kvstored.store.policies import EvictionPolicy, Learns, Weighs
from kvstored.store.policies.ranked import Priorities

MAX_LOOKS = 256  # at rows in containers that are passed over, for one question
MAX_ORPHANS_SEEN = 64  # that may not be evicted, for one question


class _Round:
    """The list of one tier, gone through again and again. Entries that no longer exist are dropped on the way, the
    others move up to `_kept`. A list may be as long as the index, so it stays an array: an entry becomes a Python
    number only when it is looked at.
    """

    __slots__ = ("_at", "_kept", "_tokens")

    def __init__(self, tokens: Tokens) -> None:
        self._tokens = tokens
        self._at = self._kept = 0

    def __len__(self) -> int:
        return len(self._tokens) - self._at + self._kept

    def look(self) -> int:
        if self._at == len(self._tokens):
            self._tokens = self._tokens[: self._kept]
            self._at = self._kept = 0
        return int(self._tokens[self._at])

    def drop(self) -> None:
        self._at += 1

    def keep(self) -> None:
        self._tokens[self._kept] = self._tokens[self._at]
        self._kept += 1
        self._at += 1


class OrphanQueue:
    """A queue of orphans: stored blocks that no client can reach, because a block before them in their chain is gone.
    They are evicted first.

    The queue has the orphans of the last search (blocks/orphans.py), the deepest first, so that a chain is never left
    with a hole. An orphan is not evicted while it is leased, a block that follows it is kept, or its tenant is at its
    guaranteed minimum. A block that became reachable again stays in the queue until the next search and may be
    evicted."""

    def __init__(self, residency: Residency) -> None:
        self._residency = residency
        self._rounds = [_Round(np.empty(0, np.uint64)) for _ in residency.tiers]

    def replace(self, by_tier: Sequence[Tokens]) -> None:
        """Replace the queue by the orphans that a new search has found. `by_tier` has, for each tier, an array of
        tokens that name its orphans, the deepest first; the queue changes these arrays."""
        self._rounds = [_Round(tokens) for tokens in by_tier]

    def has_any(self, tier: int) -> bool:
        """Return whether the queue has an entry for the tier at position `tier`."""
        return len(self._rounds[tier]) > 0

    def next(self, policy: EvictionPolicy, exclude: Container[int], tenant: int | None) -> int:
        """Return the row of an orphan whose copy in the tier of `policy` may be evicted now, or -1. Rows in `exclude`
        are not returned; with `tenant`, only an orphan of that tenant is.
        """
        residency, orphans = self._residency, self._rounds[policy.tier]
        for _ in range(min(len(orphans), MAX_ORPHANS_SEEN)):
            row = residency.current(orphans.look())
            if row < 0 or not residency.has(row, policy.tier):
                orphans.drop()
            else:
                # A tenant may be asked for room where it is the one that needs it, or stays above its minimum.
                fits = residency.tenant_of(row) == tenant if tenant is not None else policy.spares_minimum(row)
                if fits and row not in exclude and residency.is_evictable(row, policy.tier):
                    return row
                orphans.keep()
        return -1


class Victims:
    """A chooser of the next block to evict from the tier of `policy`: orphans (blocks that no client can reach) first,
    then by priority and by the policy's order."""

    def __init__(
        self, policy: EvictionPolicy, residency: Residency, orphans: OrphanQueue, priorities: Priorities, clock: Clock
    ) -> None:
        self.policy = policy
        self._residency = residency
        self._orphans = orphans
        self._ranked = priorities.in_tier
        self._clock = clock
        self._named = -1  # by the policy, the last time

    def next(self, exclude: Container[int], tenant: int | None = None) -> int:
        """Return the row of the block to evict next, or -1 when none may be evicted. Rows in `exclude` are not
        returned; with `tenant`, only a block of that tenant is.
        """
        self._named = -1
        row = self._orphans.next(self.policy, exclude, tenant)
        if row >= 0:
            return row
        for each in self.policy.first_to_lose() if tenant is None else ():
            row = self._of_tenants(exclude, each)
            if row >= 0 and self.policy.spares_minimum(row):
                return row
        return self._of_tenants(exclude, tenant)

    def next_run(self, limit: int) -> list[int]:
        """Return up to `limit` rows that `next` would return one after another, if each were evicted, while nothing is
        excluded: consecutive blocks of a chain, the last one first. The list is empty where the order among tenants,
        priorities or orphans has to be asked for each block."""
        self._named = -1
        ranked = self._ranked.get(self.tier)
        if self.policy.shares or self._orphans.has_any(self.tier) or (ranked is not None and ranked.rows):
            return []
        run = self.policy.next_victims(self._clock.monotonic_ns(), limit)
        self._named = run[0] if run else -1
        return run

    def _of_tenants(self, exclude: Container[int], tenant: int | None) -> int:
        """Return the next block of `tenant`, or of all for None, by priority and by the policy's order."""
        row, now_ns, ranked = -1, self._clock.monotonic_ns(), self._ranked.get(self.tier)
        if ranked is not None and ranked.rows:
            row = ranked.next_victim(now_ns, exclude=exclude, tenant=tenant)
            if row >= 0 and self._residency.priority(row) < 0:
                return row
        self._named = self.policy.next_victim(now_ns, exclude=exclude, tenant=tenant)
        return row if self._named < 0 else self._named

    def keeps(self, victim: int, tenant: int, newcomer: tuple[bytes, int]) -> bool:
        """Return whether the policy prefers to keep the block at row `victim`, which `next` has just returned, rather
        than store a new block of `tenant`. `newcomer` is the new block's key and depth. It is False for an orphan."""
        if victim != self._named or not isinstance(self.policy, Weighs):
            return False
        return self.policy.declines(tenant, *newcomer, victim, self._clock.monotonic_ns())

    def announce(self, tenant: int, parent: int, keys: Sequence[bytes]) -> None:
        """Announce to the policy that `tenant` is about to store the blocks `keys`, which continue the block at row
        `parent` of the block index."""
        if isinstance(self.policy, Learns):
            self.policy.arriving(tenant, parent, keys, self._clock.monotonic_ns())

    @property
    def tier(self) -> int:
        return self.policy.tier


class SkippedRows(Container[int]):
    """A set of rows that must not be evicted: those in `rows`, and all rows whose copy is in one of `containers`
    (arenas or slabs).

    After `MAX_LOOKS` rows in such containers since `begin`, the set says that it contains no more rows, so that the
    policy ends its search; the caller must discard the row that the policy then returns. Some policies restart their
    search at every skipped row, so that the cost would grow with the square of the looks."""

    def __init__(self, copies: TierCopies, rows: Iterable[int] = ()) -> None:
        self._copies = copies
        self._looks_left = MAX_LOOKS
        self.rows = set(rows)
        self.containers: set[int] = set()

    def begin(self) -> None:
        """Begin a new search: the number of looks counts from 0 again."""
        self._looks_left = MAX_LOOKS

    @property
    def is_exhausted(self) -> bool:
        return self._looks_left <= 0

    @property
    def shortest(self) -> Container[int]:
        """This set of rows in the form that takes the least time to test: a plain set when no container's rows are
        skipped."""
        return self if self.containers else self.rows

    def __contains__(self, row: object) -> bool:
        if row in self.rows:
            return True
        if self._looks_left <= 0 or self.wants(self._copies.container[row]):  # type: ignore[call-overload]  # a row
            return False
        self._looks_left -= 1
        return self._looks_left > 0

    def wants(self, container: int) -> bool:
        return container not in self.containers


class AllBut(SkippedRows):
    """A set of rows that must not be evicted: those in `rows`, and all rows whose copy is outside the containers
    (arenas or slabs) `wanted`."""

    def __init__(self, copies: TierCopies, wanted: AbstractSet[int], rows: Iterable[int] = ()) -> None:
        super().__init__(copies, rows)
        self._wanted = wanted

    def wants(self, container: int) -> bool:
        return container in self._wanted


class Coldest:
    """An iteration over the blocks to evict while a container (arena or slab) is emptied, one row at a time.

    The order is the policy's, over all containers of the kind `kind`. If the policy takes too long to answer, it is the
    order of the last use of the container's own blocks, the oldest first. Rows in `stuck`, to which the caller adds,
    are never returned. After `go_on_with` the blocks may be of any kind, and `is_of_any_kind` is True."""

    def __init__(
        self,
        residency: Residency,
        victims: Victims,
        kind: AbstractSet[int],
        report: ContainerReport,
        stuck: set[int],
    ) -> None:
        self._residency = residency
        self._position = victims.tier
        self._victims = victims
        self._container = report.container
        self._others = AllBut(residency.copies[victims.tier], kind)
        self._others.rows = stuck
        self._oldest: Iterator[int] | None = None
        self.is_of_any_kind = False

    def next(self) -> int:
        """Return the row of the next block to evict, or -1 when there is no more."""
        if self._oldest is None:
            self._others.begin()
            row = self._victims.next(self._others)
            if row >= 0 and not self._others.is_exhausted:
                return row
            self._oldest = self._by_last_use()
        rows, may_go = self._others.rows, partial(self._residency.is_evictable, tier=self._position)
        spares = self._victims.policy.spares_minimum
        return next((row for row in self._oldest if row not in rows and may_go(row) and spares(row)), -1)

    def go_on_with(self, tokens: Sequence[int]) -> None:
        """Have `next` return the blocks that `tokens` name, children before parents: the container's and all that
        continue their chains in the tier; or none where one of these is held, since what is above it stays."""
        self.is_of_any_kind = True
        rows = list(self._still_here(tokens))
        self._oldest = iter(()) if any(map(self._residency.is_held, rows)) else self._still_here(tokens)

    def _by_last_use(self) -> Iterator[int]:
        """Yield children before their parents: a run of blocks is used at once, and a parent whenever its child is."""
        residency = self._residency
        rows = rows_in(residency, self._position, self._container)
        rows.sort(key=lambda row: (residency.last_access_ns(row), -residency.depth(row)))
        yield from self._still_here([residency.token(row) for row in rows])

    def _still_here(self, tokens: Sequence[int]) -> Iterator[int]:
        for token in tokens:
            row = self._residency.current(token)
            if row >= 0 and self._residency.has(row, self._position):
                yield row
