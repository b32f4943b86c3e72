"""What a put is to store, and the Store messages that say so."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kvstore_client.errors import invalid
from kvstore_client.keys import Chain
from kvstore_client.payload import Payload, payload_size
from kvstore_proto.fingerprint import Fingerprint, LayerGroup
from kvstore_proto.identity import KEY_BYTES, BlockKeys
from kvstore_proto.v1 import kvstore_pb2 as wire

DURABILITY_MODES: Final = {
    "default": wire.DURABILITY_MODE_DEFAULT,
    "none": wire.DURABILITY_MODE_NONE,
    "batch": wire.DURABILITY_MODE_BATCH,
    "always": wire.DURABILITY_MODE_ALWAYS,
}


@dataclass(frozen=True, slots=True)
class PutOrder:
    """What to store: payloads[i] is block first_block + i of the chain."""

    chain: Chain
    first_block: int
    payloads: Sequence[Payload]
    payload_bytes: int
    group_id: int
    durability: wire.DurabilityMode.ValueType

    def __len__(self) -> int:
        return len(self.payloads)

    def keys(self) -> BlockKeys:
        return self.chain.keys[self.first_block : self.first_block + len(self.payloads)]

    def store(self, blocks: Sequence[int], pages: Sequence[int], *, loan: int = 0, reservation: int = 0) -> wire.Store:
        """A Store of some of the blocks, in order; pages[i] says where blocks[i] is (0: not written, believed present),
        in the staging memory of `loan` or among the slots of `reservation`.
        """
        first, end = self.first_block + blocks[0], self.first_block + blocks[-1] + 1
        keys = self.chain.keys
        if end - first == len(blocks):  # contiguous: the chain has their keys in one piece
            packed = keys.packed[first * KEY_BYTES : end * KEY_BYTES]
            parents = self.chain.parent_of(first) + packed[:-KEY_BYTES]
        else:
            packed = b"".join(keys[self.first_block + block] for block in blocks)
            parents = b"".join(self.chain.parent_of(self.first_block + block) for block in blocks)
        return wire.Store(
            group=self.group_id,
            keys=packed,
            parents=parents,
            payload_bytes=self.payload_bytes,
            pages=pages,
            durability=self.durability,
            loan=loan,
            reservation=reservation,
        )


def payload_bytes_of(
    payloads: Sequence[Payload], fingerprint: Fingerprint, group: LayerGroup, stated: int | None
) -> int:
    """The size that all of these payloads have. Raises KVStoreError(INVALID) when they differ or none is known."""
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
