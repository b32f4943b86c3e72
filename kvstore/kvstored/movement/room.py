"""Making room in a tier: allocate, and while that fails, evict what the policy names.

Owns the loop from "there is no slot" to a slot. A victim whose slot can serve goes alone; where slots of another size
or owner are in the way, a container is emptied for it (`evacuation`).
Invariants: never evicts a pinned copy, never leaves a hole in a chain, never frees a slot that has readers (limbo
does); evicts for one block at most a container's worth and the block's own size.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from enum import Enum
from typing import Final

from kvstore_tiers.base import Slot, Tier, TierState
from kvstored.lifecycle import Cause
from kvstored.movement.evacuation import Allowance, Evacuation
from kvstored.movement.eviction import Eviction
from kvstored.movement.victims import Victims
from kvstored.policies import Policy
from kvstored.residency import Residency

SLICE_EVICTIONS = 16  # between two looks at the loop: about 0.3 ms
MAX_ATTEMPTS = 4096  # for one allocation


class Bypass(Enum):
    """Instead of a slot: the policy would rather keep what would have to go for it."""

    BYPASSED = "bypassed"


BYPASSED: Final = Bypass.BYPASSED


class Room:
    """Room in `tier`. `eviction` says at which position it is in `residency`."""

    def __init__(
        self, tier: Tier, residency: Residency, victims: Victims, eviction: Eviction, evacuation: Evacuation
    ) -> None:
        self._tier = tier
        self._residency = residency
        self._victims = victims
        self._eviction = eviction
        self._evacuation = evacuation
        self._position = eviction.position

    def follow(self, policy: Policy) -> None:
        """From now on this policy names what leaves."""
        self._victims.follow(policy)

    def allocate_now(self, nbytes: int, tenant: int) -> Slot | None:
        """A slot if one is free and the tenant is below its maximum; evicts nothing."""
        if self._victims.is_over_maximum(tenant, nbytes):
            return None
        return self._tier.allocate(nbytes, self._owner(tenant))

    def announce(self, tenant: int, parent: int, keys: Sequence[bytes]) -> None:
        """Blocks `keys`, which continue row `parent`, are about to ask for room."""
        self._victims.announce(tenant, parent, keys)

    async def allocate(self, nbytes: int, tenant: int) -> Slot | None:
        """A slot, evicting for it what the policy names; None when nothing (more) may go."""
        slot = await self.allocate_for(None, nbytes, tenant)
        return None if slot is BYPASSED else slot

    async def allocate_for(
        self, newcomer: tuple[bytes, int] | None, nbytes: int, tenant: int, *, parent: int = -1
    ) -> Slot | Bypass | None:
        """As `allocate`, for the block of this key and depth: BYPASSED when the policy would rather keep its victim.

        Row `parent`, which the block continues, is not given up for it: the block could not be reached without it, and
        its client has just learned that it is there.
        """
        if self._tier.statistics().state not in (TierState.OK, TierState.FULL):
            return None  # it takes nothing, however much is evicted
        allowance = Allowance(self._tier.info.container_bytes + nbytes)
        stuck = self._not_for(parent)
        for attempt in range(MAX_ATTEMPTS):
            slot = self.allocate_now(nbytes, tenant)
            if slot is not None:
                return slot
            confined = tenant if self._victims.is_over_maximum(tenant, nbytes) else None
            row = self._victims.next(stuck, confined)
            if row >= 0 and newcomer is not None and self._victims.keeps(row, tenant, newcomer):
                return BYPASSED
            is_stuck = row < 0
            if row >= 0 and (confined is not None or self._serves(row, nbytes, tenant)):
                if allowance.left_bytes <= 0:
                    return None
                await self._evict(row, confined, allowance, stuck)
            elif row >= 0:
                is_stuck = not await self._evacuation.convert(row, nbytes, self._owner(tenant), allowance, stuck)
            if is_stuck:
                if not await self._eviction.demoter.progress():
                    return None
                # A write behind has ended: its block may leave now, and its container be emptied.
                stuck = self._not_for(parent)
            if attempt % SLICE_EVICTIONS == SLICE_EVICTIONS - 1:
                await asyncio.sleep(0)
        return None

    async def vacate(self, container: int) -> bool:
        """Empty an arena or slab, to give it back; False when that cannot be done now."""
        return await self._evacuation.vacate(container)

    def expire(self, row: int) -> None:
        """Let a block whose time to live is over go, if it may."""
        self._eviction.expire(row)

    def take(self, row: int, cause: Cause) -> None:
        """Take a copy that may leave: by itself where another tier has one, else the block goes with it."""
        self._eviction.take(row, cause)

    async def _evict(self, row: int, confined: int | None, allowance: Allowance, stuck: set[int]) -> None:
        nbytes = self._residency.slot(row, self._position).nbytes
        if await self._eviction.evict(row, Cause.EVICTED if confined is None else Cause.QUOTA):
            allowance.spend(nbytes)
        else:
            stuck.add(row)

    def _not_for(self, parent: int) -> set[int]:
        """Rows that room must not be made of: `parent`, unless it has a copy further down, or will be given one."""
        only_here = parent >= 0 and self._residency.tier_mask(parent) == 1 << self._position
        return {parent} if only_here and not self._eviction.demoter.wants(parent) else set()

    def _serves(self, row: int, nbytes: int, tenant: int) -> bool:
        """Whether the victim's slot could serve this allocation."""
        return self._tier.makes_room(self._residency.slot(row, self._position), nbytes, self._owner(tenant))

    def _owner(self, tenant: int) -> str:
        return self._residency.tenants[tenant].name
