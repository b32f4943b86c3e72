"""What a put is to store."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kvstore_client.errors import invalid
from kvstore_client.keys import Chain
from kvstore_client.staging import Payload, payload_size
from kvstore_proto.fingerprint import Fingerprint, LayerGroup
from kvstore_proto.v1 import kvstore_pb2 as wire

MIN_RETRY_S = 0.001
THROTTLED_RETRY_S = 0.01
PENDING_PATIENCE_S = 0.25  # for a block that another client is writing just now
REASON_PENDING: Final = "another client is storing the same block"
REASON_NO_ROOM: Final = "no room in staging or quota before the deadline"
REASON_TOO_LARGE: Final = "too large: a block has to fit into the staging memory of this session"

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


def payload_bytes_of(
    payloads: Sequence[Payload], fingerprint: Fingerprint, group: LayerGroup, stated: int | None
) -> int:
    """The one size that all of these payloads have. Raises KVStoreError(INVALID) when that cannot be."""
    if payloads is None:
        raise invalid("payloads is None: give one payload a block, of bytes, an array or a function(dest)")
    fixed = fingerprint.payload_bytes(group.group_id)
    sizes = {size for size in map(payload_size, payloads) if size is not None}
    expected = fixed or stated or (min(sizes) if sizes else 0)
    if stated is not None and stated != expected:
        raise invalid(f"payload_bytes={stated}, but the fingerprint fixes {expected} bytes for a block")
    if payloads and not expected:
        raise invalid("the fingerprint leaves the payload size open: give payload_bytes=")
    wrong = sorted(sizes - {expected})
    if wrong:
        raise invalid(f"a payload has {wrong[0]} bytes, but a block of group {group.group_id} has {expected}")
    return expected
