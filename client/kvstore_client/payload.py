"""Payloads and token ids of blocks, written into slots: of the staging memory, or of an arena.

The daemon writes every other field of a slot's header. Copies run without the GIL, so the engine's other threads
continue. The module does not choose a slot, or send a message about it. Invariant: no slot is sent or given
back while a function that was given it may still write there.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore_client.errors import invalid
from kvstore_client.memory import Bytes
from kvstore_cuda.host_copies import copy_array
from kvstore_proto.arena import HEADER_BYTES, TOKEN_COUNT_OFFSET, TOKENS_OFFSET

Finish = Callable[[], None]
FillSlot = Callable[[Bytes], Finish | None]
"""Writes a whole payload into the array it is given: uint8[payload_bytes], writable, in shared memory. Or begins to,
and returns a function that waits until it is there; several are begun before the first of these is called."""
Payload = bytes | bytearray | memoryview | npt.NDArray[Any] | FillSlot


def payload_list(payloads: Sequence[Payload]) -> Sequence[Payload]:
    """Return the payloads of a put as a list with one payload for each block. An array of several dimensions is cut
    into its rows. Raises KVStoreError(INVALID) if `payloads` is no such sequence.
    """
    if isinstance(payloads, (list, tuple)) or (isinstance(payloads, np.ndarray) and payloads.ndim > 1):
        return list(payloads)
    is_sequence = hasattr(payloads, "__len__") and hasattr(payloads, "__getitem__")
    if not is_sequence or isinstance(payloads, (str, bytes, bytearray, memoryview, np.ndarray, Mapping)):
        what = "None" if payloads is None else f"one {type(payloads).__name__}"
        raise invalid(f"payloads is {what}: give one payload a block, of bytes, an array or a function(dest)")
    try:
        return [payloads[block] for block in range(len(payloads))]
    except Exception as error:  # of a sequence of another library
        raise invalid(f"payloads is a {type(payloads).__name__} that cannot be read: {error}") from None


def payload_size(payload: Payload) -> int | None:
    """Return the size of `payload` in bytes, or None if it is a function that will write the payload. Raises
    KVStoreError(INVALID) for a value that is no payload.
    """
    if type(payload) is np.ndarray and not payload.dtype.hasobject:
        return payload.nbytes
    if callable(payload):
        return None
    if isinstance(payload, np.ma.MaskedArray) and np.ma.is_masked(payload):
        raise invalid("a payload is a masked array: say what is under the mask, by filled()")
    try:
        view = memoryview(payload)  # type: ignore[arg-type]  # an array is a buffer
        nbytes, holds_objects = view.nbytes, "O" in view.format
    except (BufferError, TypeError, ValueError):
        if not isinstance(payload, np.ndarray):
            raise invalid(
                f"a payload must be bytes-like, an array, or a function(dest); got {type(payload).__name__}"
            ) from None
        nbytes, holds_objects = payload.nbytes, payload.dtype.hasobject  # of a type that no buffer has, as datetime64
    if holds_objects:
        raise invalid("a payload is an array of objects: give one of numbers")
    return nbytes


def write_tokens(slots: Bytes, count: int, tokens: bytes | None) -> None:
    """Write token ids into the headers of `count` consecutive slots of equal size in `slots`. `tokens` has the ids of
    all blocks, packed as int32. If `tokens` is None, the headers get no ids.
    """
    packed = np.frombuffer(tokens or b"", np.uint8).reshape(count, -1)
    rows = slots.reshape(count, -1)
    rows[:, TOKENS_OFFSET : TOKENS_OFFSET + packed.shape[1]] = packed
    rows[:, TOKEN_COUNT_OFFSET : TOKEN_COUNT_OFFSET + 4] = np.array([packed.shape[1] // 4], "<u4").view(np.uint8)


class PayloadWriter:
    """A writer of payloads of `payload_bytes` bytes into slots. A payload function may finish later; leaving the
    context manager waits for all of them.
    """

    def __init__(self, payload_bytes: int) -> None:
        self._payload_bytes = payload_bytes
        self._unfinished = contextlib.ExitStack()

    def write(self, memory: Bytes, offset: int, payload: Payload) -> None:
        """Write `payload` into the slot at `offset` of `memory`. It is complete only after `settle`. Raises the errors
        of a payload function.
        """
        finish = write_payload(memory, offset, payload, self._payload_bytes)
        if finish is not None:
            self._unfinished.callback(finish)

    def settle(self) -> None:
        """Wait until every payload is complete in its slot. Raises the errors of a payload function."""
        self._unfinished.pop_all().close()

    def __enter__(self) -> PayloadWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.settle()


def write_payload(staging: Bytes, offset: int, payload: Payload, payload_bytes: int) -> Finish | None:
    """Write `payload`, of `payload_bytes` bytes, into the slot at `offset` of `staging`. Return None if it is complete,
    or a function that waits until it is.
    """
    destination = staging[offset + HEADER_BYTES : offset + HEADER_BYTES + payload_bytes]
    if callable(payload):
        if (finish := payload(destination)) is None:
            return None
        if inspect.isawaitable(finish):
            if inspect.iscoroutine(finish):
                finish.close()
            raise invalid("a payload function must write before it returns: it is none to await")
        return finish if callable(finish) else None
    if isinstance(payload, (bytes, bytearray)):
        copy_array(destination, np.frombuffer(payload, np.uint8))
    else:
        copy_array(destination, np.ascontiguousarray(payload).reshape(-1).view(np.uint8))
    return None
