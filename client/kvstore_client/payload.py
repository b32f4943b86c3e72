"""Payloads and token ids of blocks, written into slots: of the staging memory, or of an arena.

Every other field of a slot's header is the daemon's to write. Copies run without the GIL (np.copyto), so the engine's
other threads continue. Never chooses a slot, or sends that it is written.
Invariant: no slot is sent or given back while a function that was given it may still write there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore_client.errors import invalid
from kvstore_client.memory import Bytes
from kvstore_proto.arena import HEADER_BYTES, TOKEN_COUNT_OFFSET, TOKENS_OFFSET

Finish = Callable[[], None]
FillSlot = Callable[[Bytes], Finish | None]
"""Writes a whole payload into the array it is given: uint8[payload_bytes], writable, in shared memory. Or begins to,
and returns a function that waits until it is there; several are begun before the first of these is called."""
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


class PayloadWriter:
    """Writes payloads of `payload_bytes` into slots. As a context manager it settles, however it is left."""

    def __init__(self, payload_bytes: int) -> None:
        self._payload_bytes = payload_bytes
        self._unfinished = contextlib.ExitStack()

    def write(self, memory: Bytes, offset: int, payload: Payload) -> None:
        """Into the slot at `offset`, by the end of `settle`. Raises what a payload function raises."""
        finish = write_payload(memory, offset, payload, self._payload_bytes)
        if finish is not None:
            self._unfinished.callback(finish)

    def settle(self) -> None:
        """Wait until all of it is in its slots. Raises what a payload function raises."""
        self._unfinished.pop_all().close()

    def __enter__(self) -> PayloadWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.settle()


def write_payload(staging: Bytes, offset: int, payload: Payload, payload_bytes: int) -> Finish | None:
    """The payload of the slot at `offset`; what has to be called before it is there, if anything has."""
    destination = staging[offset + HEADER_BYTES : offset + HEADER_BYTES + payload_bytes]
    if isinstance(payload, np.ndarray):
        np.copyto(destination, np.ascontiguousarray(payload).reshape(-1).view(np.uint8))
    elif isinstance(payload, (bytes, bytearray, memoryview)):
        np.copyto(destination, np.frombuffer(payload, np.uint8))
    else:
        finish = payload(destination)
        return finish if callable(finish) else None
    return None
