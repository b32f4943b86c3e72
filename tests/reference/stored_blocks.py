"""Blocks stored in a tier that has room for them, and found in it again: what many tests of a tier begin with."""

from __future__ import annotations

from collections.abc import Iterable

from kvstore_proto.arena import BlockHeader
from kvstore_tiers.base import Slot, Tier
from kvstore_tiers.nvme import NvmeTier
from kvstore_tiers.segments import Bytes
from kvstore_tiers.testing.transfers import block, put


def stored_slot(tier: Tier, header: BlockHeader, payload: Bytes, owner: str = "") -> Slot:
    """Store a block; its slot."""
    slot = put(tier, header, payload, owner)
    assert slot is not None, "no room"
    return slot


def store_numbers(tier: Tier, numbers: Iterable[int], payload_bytes: int = 5000) -> None:
    """Store a block of each number."""
    for number in numbers:
        stored_slot(tier, *block(number, payload_bytes))


def recovered_numbers(tier: NvmeTier) -> set[int]:
    """The numbers of the blocks that a start found."""
    columns = tier.recover_columns()
    return {int.from_bytes(columns.key[at].tobytes(), "big") for at in range(len(columns))}
