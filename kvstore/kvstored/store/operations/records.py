"""Plain records of a put and a get: the clients' requests and the answers.

An enumeration has the numbers of the wire's enumeration of its name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple, Protocol

from kvstore_proto.identity import KEY_BYTES, NO_PARENT
from kvstore_proto.terms import NO_TERMS, Terms
from kvstore_tiers.image import Slot
from kvstored.lifecycle import Cause
from kvstored.store.blocks.runs import RowRun, SlotRun
from kvstored.store.operations.client import Client
from kvstored.store.policies import RequestContext
from kvstored.tier_set import NO_TIERS, TierSet

NO_EXTRA_FIELD = bytes(KEY_BYTES)  # in the place of an extra of 16 bytes
NOWHERE = -1


class StoreStatus(IntEnum):
    """The result of a put for one block: stored, or why not."""

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


class StagedBlocks(Protocol):
    """A memory that holds the blocks of a put until they are stored. A block is named by its offset in this memory."""

    def tokens_of(self, offsets: Sequence[int]) -> list[bytes]:
        """Return the packed token ids of each block at one of `offsets`; empty for a block whose key does not come from
        tokens.
        """
        ...

    def payloads_at(self, offsets: Sequence[int]) -> tuple[list[int], object]:
        """Return the address of the payload of each block at one of `offsets`, and an object that keeps that memory
        alive.
        """
        ...


class Reserved(StagedBlocks, Protocol):
    """The blocks of a put that the client wrote directly into slots it had reserved in the mapped tier."""

    def take(self, offset: int) -> Slot:
        """Return the slot of the block at `offset`. From now on it belongs to that block: attach it to the block's row
        before the event loop's next turn.
        """
        ...

    def end(self) -> None:
        """Free the reserved slots that were not taken for a block. A second call does nothing."""
        ...


@dataclass(frozen=True, slots=True)
class Offer:
    """The blocks that a put wants stored, in chain order. Each sequence has one entry for each block. `offsets` are
    places in `staged`, or NOWHERE for a block that the client believes to be stored and has not written. `before` has
    keys of blocks right before the first parent, in chain order.
    """

    group: int
    packed: bytes  # the keys
    keys: Sequence[bytes]
    parents: Sequence[bytes]
    extras: Sequence[bytes]
    payload_bytes: Sequence[int]
    staged: StagedBlocks
    offsets: Sequence[int]
    reserved: Reserved | None = None  # `staged`, where each block is in its slot already
    terms: Terms = NO_TERMS  # how long to keep the blocks
    before: Sequence[bytes] = ()


class PutAnswer(NamedTuple):
    """An answer to a put. Byte i of `statuses` is the StoreStatus of block i of the offer, and byte i of `durability`
    its Durability. `final` is True when no block's durability is pending.
    """

    statuses: bytes
    durability: bytes
    final: bool


class GetRequest(NamedTuple):
    """A client's request to lease a chain. `keys` are packed, 16 bytes each, in chain order. `max_wait_ms` and
    `deadline_ms` bound the wait for promotions; 0 is no bound. `context` is the engine's description of its request,
    for policies.
    """

    keys: bytes
    max_wait_ms: int = 0
    deadline_ms: int = 0
    mapped_only: bool = False
    group: int = 0  # layer group
    from_back: bool = False
    context: RequestContext | None = None
    host_only: bool = False  # also of a client on a device
    parent: bytes = NO_PARENT  # key of the block before the first

    @property
    def blocks(self) -> int:
        """The number of requested blocks."""
        return len(self.keys) // KEY_BYTES

    def wait_ms(self, default_ms: int) -> int:
        """Return for how many milliseconds this request may wait: the smaller of the bounds that it gives, or
        `default_ms` if it gives none."""
        return min(filter(None, (self.max_wait_ms, self.deadline_ms)), default=default_ms)

    def device_tiers_of(self, client: Client) -> TierSet:
        """Return the tiers on the device of `client` whose copies a lease may contain; none if `host_only` is set."""
        return NO_TIERS if self.host_only else client.device_tiers


@dataclass(frozen=True, slots=True)
class GrantedRun:
    """A lease on consecutive blocks of a chain, all readable now. `first` is the position of the first one. `blocks`
    and `slots` have one entry for each block. `promoted` counts the blocks that were read for this get, by the tier
    they came from. `expires_in_ms` counts from the start of a get that is served in parts, otherwise from now."""

    first: int
    lease_id: int
    expires_in_ms: int
    blocks: RowRun
    slots: SlotRun
    promoted: Counter[int]
    promoted_bytes: int

    @property
    def rows(self) -> list[int]:
        """The row of each block."""
        return self.blocks.rows


@dataclass(frozen=True, slots=True)
class Acquired:
    """The end of a get. `blocks` leading blocks are leased; `run` is their lease, None when they came in parts. `cause`
    says why the next block is missing, None when none is. When only mapped blocks were wanted, `resident_blocks` counts
    all stored blocks, and `load_us` is the expected time for loading them in microseconds.
    """

    blocks: int
    cause: Cause | None
    run: GrantedRun | None = None
    resident_blocks: int = 0
    load_us: int = 0


@dataclass(frozen=True, slots=True)
class Outlook:
    """The expected loading times of a get. For each stored block, `tiers` has the fastest tier that holds it, and
    `ready_us` the microseconds until it is readable."""

    tiers: list[int]
    ready_us: list[int]

    def add(self, tiers: Sequence[int], ready_us: Sequence[int]) -> None:
        """Append blocks that follow the present ones in the chain and are loaded at the same time; `tiers` and
        `ready_us` have an entry for each. None of them is expected before the present ones."""
        last_us = max(self.ready_us, default=0)
        self.tiers.extend(tiers)
        self.ready_us.extend(max(last_us, each) for each in ready_us)
