"""Plain records of a put and a get: the clients' requests and the answers.

An enumeration has the numbers of the wire's enumeration of its name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple, Protocol

from kvstore_proto.arena import slot_bytes
from kvstore_proto.identity import KEY_BYTES, NO_EXTRA, NO_PARENT, chain
from kvstore_proto.terms import NO_TERMS, Terms
from kvstore_tiers.base import Outcome
from kvstore_tiers.image import Slot
from kvstore_tiers.segments import Segment
from kvstored.lifecycle import Cause
from kvstored.store.operations.client import Client
from kvstored.store.policies import RequestContext
from kvstored.tier_set import NO_TIERS, TierSet

NO_EXTRA_FIELD = bytes(KEY_BYTES)  # in the place of an extra of 16 bytes
NOWHERE = -1


class StoreStatus(IntEnum):
    """The result of one block of a put."""

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
    """The place of the blocks of a put until they are stored; each is named by its offset."""

    def tokens_at(self, offset: int) -> bytes:
        """Return the packed token ids of the block there; none for a block whose key does not come from tokens."""
        ...

    def payload_at(self, offset: int, nbytes: int) -> Segment: ...


class Reserved(StagedBlocks, Protocol):
    """Blocks that are in slots of their tier already."""

    def take(self, offset: int) -> Slot:
        """Return the slot, which belongs to a block from now on: the caller attaches it in this turn of the loop."""
        ...

    def end(self) -> None:
        """Free the slots that no block has taken. Idempotent."""
        ...


@dataclass(slots=True)
class StagedBlock:
    """One block of a put, at `position` in its request: the client's description of it, and its place: at `offset` in
    `staged`, which is `reserved` too if the block is in its slot already; `nbytes` is its slot's size. Once it has
    begun, `token` names its row; `outcome` is the end of its copy.
    """

    position: int
    key: bytes
    parent: bytes
    extra: bytes
    group: int
    payload_bytes: int
    staged: StagedBlocks
    offset: int
    nbytes: int
    reserved: Reserved | None = None
    token: int = -1
    outcome: Outcome | None = None

    def is_made_of(self, tokens: bytes, client: Client) -> bool:
        """Return whether `tokens`, continuing the block's parent, make its key for `client`. Blocks without tokens (put
        by their keys) have nothing to check.
        """
        if not tokens:
            return True
        fingerprint = client.fingerprint
        if len(tokens) != fingerprint.block_tokens * 4:
            return False
        key = chain(
            client.roots[self.group] if self.parent == NO_PARENT else self.parent, tokens,
            engine_block_tokens=fingerprint.engine_block_tokens, hash_name=fingerprint.key_hash,
            extra=NO_EXTRA if self.extra == NO_EXTRA_FIELD else self.extra,
        )  # fmt: skip
        return key == self.key


@dataclass(frozen=True, slots=True)
class Offer:
    """The blocks that a put wants stored, in chain order; each sequence has one entry a block. `offsets` are places in
    `staged`; NOWHERE for a block that the client believes to be stored and has not written.
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

    def block(self, position: int) -> StagedBlock:
        """Return the block at `position`."""
        payload_bytes = self.payload_bytes[position]
        return StagedBlock(
            position, self.keys[position], self.parents[position], self.extras[position], self.group, payload_bytes,
            self.staged, self.offsets[position], slot_bytes(payload_bytes), self.reserved,
        )  # fmt: skip


class PutAnswer(NamedTuple):
    """The answer to a put, by block of its offer: its StoreStatus and its Durability. `final`: no block is pending."""

    statuses: bytes
    durability: bytes
    final: bool


@dataclass(frozen=True, slots=True)
class GetRequest:
    """A get of a chain. `keys` are packed, in chain order. `max_wait_ms` and `deadline_ms` bound the wait for
    promotions, 0: the daemon's own bound alone. `context`: the engine's description of the request, for policies.
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

    def wait_ms(self, most_ms: int) -> int:
        """Return how long to wait in milliseconds, if `most_ms` bounds every wait."""
        return min(self.max_wait_ms or most_ms, self.deadline_ms or most_ms)

    def device_tiers_of(self, client: Client) -> TierSet:
        """Return the tiers on the client's device that the lease may name."""
        return NO_TIERS if self.host_only else client.device_tiers


@dataclass(frozen=True, slots=True)
class GrantedRun:
    """Blocks `first`, `first + 1`, … of a chain, readable now: one lease on their slots in the mapped tier. `promoted`:
    the number read for this get, by tier. `expires_in_ms` counts from the start of a get in order, otherwise from
    now.
    """

    first: int
    lease_id: int
    expires_in_ms: int
    rows: Sequence[int]
    slots: Sequence[Slot]
    promoted: Counter[int] = field(default_factory=Counter)
    promoted_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Acquired:
    """The end of a get: `blocks` leading blocks are leased, in `run` unless they came in parts. `cause` says why the
    block after them is missing; None if none is. If only mapped blocks were wanted, `resident_blocks` is the number
    of stored ones in all, and `load_us` the time for loading them.
    """

    blocks: int
    cause: Cause | None
    run: GrantedRun | None = None
    resident_blocks: int = 0
    load_us: int = 0


@dataclass(frozen=True, slots=True)
class Outlook:
    """The expected time of each resident block: the fastest tier that has it, and the microseconds until it is
    readable.
    """

    tiers: list[int]
    ready_us: list[int]

    def add(self, tiers: Sequence[int], ready_us: Sequence[int]) -> None:
        """Add blocks that follow, and are loaded beside the known ones."""
        last_us = max(self.ready_us, default=0)
        self.tiers.extend(tiers)
        self.ready_us.extend(max(last_us, each) for each in ready_us)
