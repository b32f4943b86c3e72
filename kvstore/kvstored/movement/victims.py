"""Which block leaves a tier next: orphans first, then what the policy names.

Owns the order between the two, a tenant's confinement to its own blocks, and the search within some containers. Never
takes a block away.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from collections.abc import Set as AbstractSet

from kvstored.clock import Clock
from kvstored.movement.cut_off import CutOff
from kvstored.policies import Policy
from kvstored.residency import Residency
from kvstored.residency.copies import TierCopies

MAX_LOOKS = 65_536  # at rows in other containers, for one container: about 20 ms in all


class Victims:
    """Of the tier of `policy`."""

    def __init__(self, policy: Policy, residency: Residency, orphans: CutOff, clock: Clock) -> None:
        self._policy = policy
        self._residency = residency
        self._orphans = orphans
        self._clock = clock

    def follow(self, policy: Policy) -> None:
        """From now on this policy of the same tier decides."""
        self._policy = policy

    def next(self, exclude: Container[int], tenant: int | None = None) -> int:
        """The row to evict next, or -1. With `tenant`, one of its own."""
        row = self._orphans.next(self._policy, exclude, tenant)
        if row < 0:
            row = self._policy.next_victim(self._clock.monotonic_ns(), exclude=exclude, tenant=tenant)
        return row

    def keeps(self, victim: int, tenant: int, newcomer: tuple[bytes, int]) -> bool:
        """Whether the policy would rather keep `victim`, which `next` has just named, than store the block of this key
        and depth."""
        return self._policy.declines(tenant, *newcomer, victim, self._clock.monotonic_ns())

    def announce(self, tenant: int, parent: int, keys: Sequence[bytes]) -> None:
        """Blocks `keys`, which continue row `parent`, are about to ask for room."""
        self._policy.arriving(tenant, parent, keys, self._clock.monotonic_ns())

    def is_over_maximum(self, tenant: int, nbytes: int) -> bool:
        """Whether `nbytes` more would take the tenant over its maximum: it has to make room from its own blocks."""
        share = self._policy.shares.get(tenant)
        if share is None or share.max_bytes is None:
            return False
        return self._residency.tenant_bytes(tenant, self._policy.tier) + nbytes > share.max_bytes

    def spares_minimum(self, row: int) -> bool:
        """Whether the block's tenant still has its minimum without it."""
        return self._policy.spares_minimum(row)

    def within(self, containers: AbstractSet[int]) -> VictimsWithin:
        """The same question, for blocks in these containers alone."""
        return VictimsWithin(self, self._residency.copies[self._policy.tier], containers)


class VictimsWithin:
    """Victims in some containers of a tier, in the order of eviction, until `MAX_LOOKS` rows elsewhere were passed."""

    def __init__(self, victims: Victims, copies: TierCopies, wanted: AbstractSet[int]) -> None:
        self._victims = victims
        self._elsewhere = _Elsewhere(copies, wanted)

    def next(self, exclude: AbstractSet[int]) -> int:
        """The row to evict next, or -1: there is none, or it would take too long to find."""
        self._elsewhere.exclude = exclude
        row = self._victims.next(self._elsewhere)
        return -1 if self._elsewhere.is_exhausted else row


class _Elsewhere(Container[int]):
    """What a policy is to pass over: rows in other containers. It gives up, and passes over nothing, after so many."""

    def __init__(self, copies: TierCopies, wanted: AbstractSet[int]) -> None:
        self._copies = copies
        self._wanted = wanted
        self._looks_left = MAX_LOOKS
        self.exclude: AbstractSet[int] = frozenset()

    @property
    def is_exhausted(self) -> bool:
        return self._looks_left <= 0

    def __contains__(self, row: object) -> bool:
        if self._looks_left <= 0:
            return False
        if row in self.exclude:
            return True
        if self._copies.container[row] in self._wanted:  # type: ignore[call-overload]  # policies ask for rows
            return False
        self._looks_left -= 1
        return self._looks_left > 0
