"""What a client offers in a put, and what became of it.

The numbers of the enumerations are those of the wire's enumerations of the same names.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple, Protocol

from kvstore_proto.arena import slot_bytes
from kvstore_tiers.base import Outcome
from kvstore_tiers.image import Slot
from kvstore_tiers.segments import Segment

NOWHERE = -1
Settling = dict[int, asyncio.Future[bool]]
"""By a block's place in its put, what will say whether it is durable; nothing where it is not to be written."""


class StoreStatus(IntEnum):
    """What became of one block of a put."""

    FAILED = 0
    STORED = 1
    PRESENT = 2
    NO_ROOM = 4
    KEY_MISMATCH = 5
    ORPHANED = 6
    WANTED = 7
    AGAIN = 8
    OVER_QUOTA = 9
    DECLINED = 10


class Durability(IntEnum):
    VOLATILE = 0  # may be gone after a crash
    PENDING = 1  # being written
    DURABLE = 2  # survives a crash of process and machine


def durability_of(settled: asyncio.Future[bool]) -> Durability:
    """Of a block, by what says whether it becomes durable."""
    if not settled.done():
        return Durability.PENDING
    return Durability.DURABLE if settled.result() else Durability.VOLATILE


class DurabilityMode(IntEnum):
    """What a put asks for."""

    NONE = 1  # memory only; reaches the durable tier when it is demoted, if that admits it
    BATCH = 2  # written through in the background, what is admitted
    ALWAYS = 3  # written and synced before the answer


class Staged(Protocol):
    """Where the blocks of a put are until they are stored, each named by its offset."""

    def tokens_at(self, offset: int) -> bytes:
        """Packed token ids of the block there; empty for a block whose key says nothing of tokens."""
        ...

    def payload_at(self, offset: int, nbytes: int) -> Segment: ...


class Reserved(Staged, Protocol):
    """Blocks that are in slots of their tier already."""

    def take(self, offset: int) -> Slot:
        """The slot is a block's from now on: the caller attaches it in the same turn of the loop."""
        ...

    def end(self) -> None:
        """Free what no block has taken. Idempotent."""
        ...


@dataclass(slots=True)
class StagedBlock:
    """One block of a put, at `position` in its request: what its client says of it, and where it is: at `offset` in
    `staged`, which is `reserved` too where the block is in its slot already; `nbytes` is its slot's size. Once it has
    begun, `token` names its row; `outcome` is that of its copy."""

    position: int
    key: bytes
    parent: bytes
    extra: bytes
    group: int
    payload_bytes: int
    staged: Staged
    offset: int
    nbytes: int
    reserved: Reserved | None = None
    token: int = -1
    outcome: Outcome | None = None


@dataclass(frozen=True, slots=True)
class Offer:
    """Blocks that a put wants stored, in chain order; each sequence has one entry a block. `offsets` are places in
    `staged`; NOWHERE for a block that the client believes to be stored and has not written."""

    group: int
    packed: bytes  # the keys
    keys: Sequence[bytes]
    parents: Sequence[bytes]
    extras: Sequence[bytes]
    payload_bytes: Sequence[int]
    staged: Staged
    offsets: Sequence[int]
    reserved: Reserved | None = None  # `staged`, where each block is in its slot already

    def block(self, position: int) -> StagedBlock:
        payload_bytes = self.payload_bytes[position]
        return StagedBlock(
            position, self.keys[position], self.parents[position], self.extras[position], self.group, payload_bytes,
            self.staged, self.offsets[position], slot_bytes(payload_bytes), self.reserved,
        )  # fmt: skip


class Stored(NamedTuple):
    """By block of an offer: its StoreStatus and its Durability. `final`: nothing of it is pending."""

    statuses: bytes
    durability: bytes
    final: bool
