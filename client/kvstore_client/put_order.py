"""What a put is to store, whichever way the daemon takes it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kvstore_client.keys import Chain
from kvstore_client.staging import Payload
from kvstore_proto.v1 import kvstore_pb2 as wire

MIN_RETRY_S = 0.001
THROTTLED_RETRY_S = 0.01
PENDING_PATIENCE_S = 0.25  # for a block that another client is writing just now
REASON_PENDING: Final = "another client is storing the same block"
REASON_NO_ROOM: Final = "no room in staging or quota before the deadline"
REASON_TOO_LARGE: Final = "the daemon refused the block: too large"

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
