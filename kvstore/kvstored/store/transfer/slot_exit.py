"""What becomes of the slot of a block that is removed from its tier: free at once, or once its last reader is done."""

from __future__ import annotations

from typing import Protocol

from kvstore_tiers.base import Slot, Tier
from kvstore_tiers.keyed import KeyedTier


class SlotExit(Protocol):
    """`LeaseTable` is the one of a tier that clients map."""

    def has_readers(self, slot: Slot) -> bool:
        """Whether a client may still read the slot, under a lease or after one."""
        ...

    def may_retire(self, slot: Slot, tenant: int) -> bool:
        """Whether a block of `tenant` may be evicted from this slot."""
        ...

    def retire(self, slot: Slot, tenant: int) -> None:
        """A block of `tenant` was removed from this slot."""
        ...


class UnmappedExit:
    """Of a tier that no client maps: a slot has no readers, and is free at once."""

    def __init__(self, tier: Tier) -> None:
        self._tier = tier

    def has_readers(self, slot: Slot) -> bool:
        return False

    def may_retire(self, slot: Slot, tenant: int) -> bool:
        return True

    def retire(self, slot: Slot, tenant: int) -> None:
        self._tier.free(slot)


def discard(tier: KeyedTier, slot: Slot, _tenant: int) -> None:
    """As `retire`, for a block that is removed by order: the store must not keep it for others."""
    tier.discard(slot)
