"""Payloads and token ids of blocks, written into slots: of the staging memory, or of an arena.

Every other field of a slot's header is the daemon's to write. Copies run without the GIL (np.copyto), so the engine's
other threads continue. Never chooses a slot, or sends that it is written.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore_client.errors import invalid
from kvstore_client.memory import Bytes
from kvstore_proto.arena import HEADER_BYTES, TOKEN_COUNT_OFFSET, TOKENS_OFFSET

FillSlot = Callable[[Bytes], None]
"""Writes a whole payload into the array it is given: uint8[payload_bytes], writable, in shared memory."""
Payload = bytes | bytearray | memoryview | npt.NDArray[Any] | FillSlot


def payload_size(payload: Payload) -> int | None:
    """Bytes of a payload; None for a function that will write it."""
    if isinstance(payload, np.ndarray):
        return payload.nbytes
    if isinstance(payload, (bytes, bytearray, memoryview)):
        return memoryview(payload).nbytes
    if callable(payload):
        return None
    raise invalid(f"a payload must be bytes-like, an array, or a function(dest); got {type(payload).__name__}")


def write_tokens(slots: Bytes, count: int, tokens: bytes | None) -> None:
    """Token ids, packed for `count` blocks, into as many equal consecutive slots."""
    packed = np.frombuffer(tokens or b"", np.uint8).reshape(count, -1)
    rows = slots.reshape(count, -1)
    rows[:, TOKENS_OFFSET : TOKENS_OFFSET + packed.shape[1]] = packed
    rows[:, TOKEN_COUNT_OFFSET : TOKEN_COUNT_OFFSET + 4] = np.array([packed.shape[1] // 4], "<u4").view(np.uint8)


def write_payload(staging: Bytes, offset: int, payload: Payload, payload_bytes: int) -> None:
    """The payload of the slot at `offset`."""
    destination = staging[offset + HEADER_BYTES : offset + HEADER_BYTES + payload_bytes]
    if isinstance(payload, np.ndarray):
        np.copyto(destination, np.ascontiguousarray(payload).reshape(-1).view(np.uint8))
    elif isinstance(payload, (bytes, bytearray, memoryview)):
        np.copyto(destination, np.frombuffer(payload, np.uint8))
    else:
        payload(destination)
