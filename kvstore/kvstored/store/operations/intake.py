"""The blocks of one put on their way: which have begun, in which parts, and which can begin together."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvstore_proto.terms import Terms
from kvstore_tiers.base import Outcome
from kvstore_tiers.host_transfers import ImageRun
from kvstored.store.blocks.keys import TenantIndex
from kvstored.store.operations.client import Client
from kvstored.store.operations.durability import DurabilityMode
from kvstored.store.operations.records import Offer, StagedBlock


@dataclass(slots=True)
class Part:
    """Blocks that are copied together, by the host tier's threads: `images` has one block for each of `copying`,
    `copied` their outcomes.
    """

    begun: list[StagedBlock] = field(default_factory=list)
    copying: list[StagedBlock] = field(default_factory=list)
    images: ImageRun = field(default_factory=ImageRun)
    copied: asyncio.Future[Sequence[Outcome]] | None = None
    kept: int = 0  # what the headers say of how long


@dataclass(slots=True)
class Intake:
    """The blocks of one put that must be stored; the first `begun` of them have begun, in `parts`."""

    client: Client
    mode: DurabilityMode
    statuses: bytearray  # by position in the request
    terms: Terms  # of new blocks
    before: Sequence[bytes]  # keys, see Offer
    blocks: list[StagedBlock] = field(default_factory=list)
    begun: int = 0
    parts: list[Part] = field(default_factory=list)

    def run_from(self, index: TenantIndex, end: int) -> list[StagedBlock]:
        """Return the blocks from the next one to `end` that can begin together: they are of one size, continue one
        another, and have no row in `index`, the tenant's."""
        first = self.blocks[self.begun]
        run, key = [first], first.key
        may_have_row = not index.has_none_of([block.key for block in self.blocks[self.begun + 1 : end]])
        for block in self.blocks[self.begun + 1 : end]:
            # The parent of the first may get a row meanwhile.
            is_next = block.parent == key and block.payload_bytes == first.payload_bytes
            key = block.key
            if not is_next or key == first.parent or (may_have_row and index.row(key) >= 0):
                break
            run.append(block)
        return run


def leading_chain(offer: Offer) -> Sequence[bytes]:
    """Return the keys of the offer's first chain; as a rule it has no other."""
    keys, parents = offer.keys, offer.parents
    return keys[: next((at for at in range(1, len(keys)) if parents[at] != keys[at - 1]), len(keys))]
