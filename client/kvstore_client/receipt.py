"""The order of a put, with its Store messages, and the outcome of each block.

The module owns the statuses and, for blocks that are not yet on stable storage, the wait for their final answer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from kvstore_client.arguments import UINT64_MAX, count, seconds
from kvstore_client.call import Call
from kvstore_client.errors import invalid
from kvstore_client.keys import Chain
from kvstore_client.payload import Payload, payload_size
from kvstore_proto.fingerprint import Fingerprint, LayerGroup
from kvstore_proto.identity import KEY_BYTES, BlockKeys
from kvstore_proto.terms import NO_TERMS, Terms
from kvstore_proto.v1 import kvstore_pb2 as wire

STORED, PRESENT, THROTTLED, FAILED = "stored", "present", "throttled", "failed"
NO_ROOM, OVER_QUOTA, DECLINED = "no_room", "over_quota", "declined"
VOLATILE, PENDING, DURABLE = "volatile", "pending", "durable"

_STATUSES: Final[dict[int, str]] = {
    wire.STORE_STATUS_STORED: STORED,
    wire.STORE_STATUS_PRESENT: PRESENT,
    wire.STORE_STATUS_NO_ROOM: NO_ROOM,
    wire.STORE_STATUS_OVER_QUOTA: OVER_QUOTA,
    wire.STORE_STATUS_DECLINED: DECLINED,
    wire.STORE_STATUS_ORPHANED: THROTTLED,
    wire.STORE_STATUS_AGAIN: THROTTLED,
}
REFUSED: Final = {  # by the daemon, which had its bytes: what it means, and what to do
    NO_ROOM: "DRAM is full, and nothing in it may be evicted: give the host tier more capacity, or hold fewer leases",
    OVER_QUOTA: "the tenant is at its maximum, and none of its own blocks may be evicted: raise its host_max, or hold "
    "fewer leases",
    DECLINED: "the policy would rather keep what it would have to evict: nothing to do",
}
_REASONS: Final[dict[int, str]] = {
    wire.STORE_STATUS_ORPHANED: "the block that it continues is not stored: put the prefix from that one on",
    wire.STORE_STATUS_KEY_MISMATCH: "the token ids in its header do not hash to its key",
    wire.STORE_STATUS_FAILED: "the daemon refused it: its key is zero or twice in this put, or its log says why",
}
_DURABILITIES: Final[dict[int, str]] = {wire.DURABILITY_PENDING: PENDING, wire.DURABILITY_DURABLE: DURABLE}
BEFORE_BLOCKS: Final = 128  # named with a put in a group whose chains may have gaps
DURABILITY_MODES: Final = {
    "default": wire.DURABILITY_MODE_DEFAULT,
    "none": wire.DURABILITY_MODE_NONE,
    "batch": wire.DURABILITY_MODE_BATCH,
    "always": wire.DURABILITY_MODE_ALWAYS,
}


class PutReceipt:
    """The outcome of a put. `statuses[i]` and `durability[i]` belong to block `first_block` + i of the put.

    statuses: "stored", "present" (was there already), "no_room" (DRAM is full), "over_quota" (its tenant is at its
    maximum), "declined" (the policy thinks it worth less than the blocks already there); a block also gets one of these
    three if it is true of the block before it, without which it could not be reached. "throttled" (no decision: the
    deadline came first, another client is storing it, or the block before it is gone), "failed". durability: the
    daemon's promise: "durable", "volatile", "pending" (not yet said), also for blocks that were there already;
    "volatile" if it said nothing. `reason` says in words why blocks were not stored, and what to do.
    """

    def __init__(self, blocks: int, reason: str = "", *, clock: Callable[[], float] = time.monotonic) -> None:
        self.statuses = [FAILED] * blocks
        self.durability = [VOLATILE] * blocks
        self.reason = reason
        self._clock = clock
        self._unsettled: list[tuple[Call, Sequence[int]]] = []

    def __len__(self) -> int:
        return len(self.statuses)

    @property
    def stored_blocks(self) -> int:
        return self.statuses.count(STORED)

    @property
    def visible_blocks(self) -> int:
        """The number of the put's blocks that another client finds now, stored by this put or earlier."""
        return self.statuses.count(STORED) + self.statuses.count(PRESENT)

    @property
    def is_settled(self) -> bool:
        return not self._unsettled

    def settle(self, timeout_s: float) -> bool:
        """Wait until the durability of every block is final, which is "durable" or "volatile". Return False if it is
        still "pending" for some block after `timeout_s` seconds.
        """
        deadline = self._clock() + seconds("timeout_s", timeout_s)
        while self._unsettled:
            call, blocks = self._unsettled[0]
            response = call.wait(deadline - self._clock())
            if response is None:
                return False
            del self._unsettled[0]
            self._take(response, blocks)
        return True

    def record(self, call: Call, response: wire.Response, blocks: Sequence[int]) -> None:
        """Enter the daemon's first answer, `response`, to the request `call`. `blocks` are the indices in this receipt
        that its statuses belong to; -1 stands for a block that another request decides.
        """
        self._take(response, blocks)
        if any(block >= 0 and self.durability[block] == PENDING for block in blocks):
            self._unsettled.append((call, blocks))

    def _take(self, response: wire.Response, blocks: Sequence[int]) -> None:
        if not response.HasField("store"):
            self.reason = response.error.message
            for block in blocks:
                if block >= 0 and self.durability[block] == PENDING:
                    self.durability[block] = VOLATILE  # never confirmed: promise nothing
            return
        reply = response.store
        for block, status, durability in zip(blocks, reply.statuses, reply.durability, strict=False):
            if block >= 0:
                self._enter(block, status)
                self.durability[block] = _DURABILITIES.get(durability, VOLATILE)

    def _enter(self, block: int, status: int) -> None:
        name = _STATUSES.get(status, FAILED)
        if status == wire.STORE_STATUS_ORPHANED and block and self.statuses[block - 1] in REFUSED:
            name = self.statuses[block - 1]  # which it continues, and which an earlier message had offered
        self.statuses[block] = name
        self.reason = REFUSED.get(name) or self.reason or _REASONS.get(status, "")

    def __repr__(self) -> str:
        counts = ", ".join(f"{self.statuses.count(name)} {name}" for name in dict.fromkeys(self.statuses))
        return f"PutReceipt({counts}{'; ' + self.reason if self.reason else ''})"


@dataclass(frozen=True, slots=True)
class PutOrder:
    """A checked request to store blocks of a chain: `payloads[i]` is the payload of block `first_block` + i. Each has
    `payload_bytes` bytes and belongs to the layer group `group_id`. With `may_have_gaps`, blocks of the chain may be
    missing.
    """

    chain: Chain
    first_block: int
    payloads: Sequence[Payload]
    payload_bytes: int
    group_id: int
    durability: wire.DurabilityMode.ValueType
    terms: Terms = NO_TERMS
    may_have_gaps: bool = False

    def __post_init__(self) -> None:
        """Raise KVStoreError(INVALID) for blocks beyond the end of the chain."""
        if self.first_block + len(self) > len(self.chain):
            raise invalid(
                f"blocks {self.first_block}..{self.first_block + len(self)} were given, but the prefix has "
                f"{len(self.chain)} full blocks of {self.chain.block_tokens} tokens"
            )

    def __len__(self) -> int:
        return len(self.payloads)

    def keys(self) -> BlockKeys:
        return self.chain.keys[self.first_block : self.first_block + len(self.payloads)]

    def store(self, blocks: Sequence[int], pages: Sequence[int], *, loan: int = 0, reservation: int = 0) -> wire.Store:
        """Return the message that asks the daemon to store some of the blocks. `blocks` are their indices, in order,
        and `pages[i]` is the place of `blocks[i]` in the staging memory lent as `loan`, or among the slots of
        `reservation`. Page 0 means that the block was not written, because it seems to be stored.
        """
        first, end = self.first_block + blocks[0], self.first_block + blocks[-1] + 1
        keys = self.chain.keys
        if end - first == len(blocks):  # contiguous: the chain has their keys in one piece
            packed = keys.packed[first * KEY_BYTES : end * KEY_BYTES]
            parents = self.chain.parents_of(first, len(blocks))
        else:
            packed = b"".join(keys[self.first_block + block] for block in blocks)
            parents = b"".join(self.chain.parent_of(self.first_block + block) for block in blocks)
        near = max(first - 1 - BEFORE_BLOCKS, 0) if self.may_have_gaps else first
        return wire.Store(
            group=self.group_id,
            keys=packed,
            parents=parents,
            payload_bytes=self.payload_bytes,
            pages=pages,
            durability=self.durability,
            loan=loan,
            reservation=reservation,
            terms=None if self.terms == NO_TERMS else wire.Terms(**self.terms._asdict()),
            before=keys.packed[near * KEY_BYTES : max(first - 1, 0) * KEY_BYTES],
        )


def payload_bytes_of(
    payloads: Sequence[Payload], fingerprint: Fingerprint, group: LayerGroup, stated: int | None
) -> int:
    """Return the size in bytes that all of `payloads` have. The fingerprint may fix it for the layer group, and
    `stated` is what the caller said. Raises KVStoreError(INVALID) if sizes differ or none is known.
    """
    if stated is not None:
        stated = count("payload_bytes", stated, most=UINT64_MAX)
    fixed = fingerprint.payload_bytes(group.group_id)
    sizes = {size for size in map(payload_size, payloads) if size is not None}
    expected = fixed or stated or (min(sizes) if sizes else 0)
    if stated is not None and stated != expected:
        raise invalid(f"payload_bytes={stated}, but the fingerprint fixes {expected} bytes for a block")
    if len(payloads) and not expected:
        raise invalid("the fingerprint leaves the payload size open: give payload_bytes=")
    wrong = sorted(sizes - {expected})
    if wrong:
        raise invalid(f"a payload has {wrong[0]} bytes, but a block of group {group.group_id} has {expected}")
    return expected
