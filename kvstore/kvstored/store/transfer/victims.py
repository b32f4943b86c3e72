"""Which block is evicted from a tier next (orphans first, then what the policy names), and whether a tenant has reached
its quota: the most of the tier that it may take.

Owns the order between the two, a tenant's confinement to its own blocks, and what is passed over on the way. Never
evicts a block.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from collections.abc import Set as AbstractSet

from kvstored.clock import Clock
from kvstored.store.blocks import Residency
from kvstored.store.blocks.copies import TierCopies
from kvstored.store.policies import Learns, Policy, Weighs
from kvstored.store.transfer.orphan_queue import OrphanQueue

MAX_LOOKS = 256  # at rows in containers that are passed over, for one question


class Victims:
    """Of the tier of `policy`."""

    def __init__(self, policy: Policy, residency: Residency, orphans: OrphanQueue, clock: Clock) -> None:
        self._policy = policy
        self._residency = residency
        self._orphans = orphans
        self._clock = clock
        self._named = -1  # by the policy, the last time

    def follow(self, policy: Policy) -> None:
        """From now on this policy of the same tier decides."""
        self._policy = policy

    def next(self, exclude: Container[int], tenant: int | None = None) -> int:
        """The row to evict next, or -1. With `tenant`, one of its own."""
        self._named = -1
        row = self._orphans.next(self._policy, exclude, tenant)
        if row < 0:
            row = self._named = self._policy.next_victim(self._clock.monotonic_ns(), exclude=exclude, tenant=tenant)
        return row

    def keeps(self, victim: int, tenant: int, newcomer: tuple[bytes, int]) -> bool:
        """Whether the policy would rather keep `victim`, which `next` has just named, than store the block of this key
        and depth. An orphan is evicted in any case."""
        policy = self._policy
        if victim != self._named or not isinstance(policy, Weighs):
            return False
        return policy.declines(tenant, *newcomer, victim, self._clock.monotonic_ns())

    def announce(self, tenant: int, parent: int, keys: Sequence[bytes]) -> None:
        """Blocks `keys`, which continue row `parent`, are about to ask for room."""
        if isinstance(self._policy, Learns):
            self._policy.arriving(tenant, parent, keys, self._clock.monotonic_ns())

    def is_over_quota(self, tenant: int, nbytes: int) -> bool:
        """Whether `nbytes` more would take the tenant over its quota: it has to make room from its own blocks."""
        share = self._policy.shares.get(tenant)
        if share is None or share.max_bytes is None:
            return False
        residency, tier = self._residency, self._policy.tier
        held_bytes = residency.tenant_bytes(tenant, tier) + residency.reserved_bytes(tenant, tier)
        return held_bytes + nbytes > share.max_bytes

    def spares_minimum(self, row: int) -> bool:
        """Whether the block's tenant still has its minimum without it."""
        return self._policy.spares_minimum(row)

    @property
    def tier(self) -> int:
        return self._policy.tier


class SkippedRows(Container[int]):
    """Rows that are not to be named: some by number, and all in some containers. After `MAX_LOOKS` of the latter, since
    `begin`, it skips no more rows, so that the policy ends its search; the caller must discard the row that it then
    names.

    A policy asks about one row after the other in its own order, and some restart their search at every row that they
    skip, so that the cost grows with the square of the looks.
    """

    def __init__(self, copies: TierCopies, rows: Iterable[int] = ()) -> None:
        self._copies = copies
        self._looks_left = MAX_LOOKS
        self.rows = set(rows)
        self.containers: set[int] = set()

    def begin(self) -> None:
        """Another question begins."""
        self._looks_left = MAX_LOOKS

    @property
    def is_exhausted(self) -> bool:
        return self._looks_left <= 0

    @property
    def shortest(self) -> Container[int]:
        """The same in the form that takes the least time to ask."""
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
    """The other way round: all containers but `wanted` are passed over."""

    def __init__(self, copies: TierCopies, wanted: AbstractSet[int], rows: Iterable[int] = ()) -> None:
        super().__init__(copies, rows)
        self._wanted = wanted

    def wants(self, container: int) -> bool:
        return container in self._wanted
