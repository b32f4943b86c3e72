"""Messages on a byte stream: each behind its length, 4 bytes, little-endian.

What a direct stream carries in both directions. Never looks into a message. Invariant: messages come out whole, in the
order and with the bounds they went in with, however the stream was cut.
"""

from __future__ import annotations

import struct
from typing import Final

_LENGTH: Final = struct.Struct("<I")


class FrameTooLarge(ValueError):
    """The next message is longer than this side takes; what follows cannot be found any more."""


def frame(message: bytes) -> bytes:
    """`message` as it is sent."""
    return _LENGTH.pack(len(message)) + message


class Frames:
    """Cuts a received stream into messages. Not thread-safe. `limit_bytes` bounds one message."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._buffer = bytearray()  # grows and shrinks in place: a peer that sends byte by byte costs no more

    def __len__(self) -> int:
        """Bytes received and not yet taken."""
        return len(self._buffer)

    def feed(self, data: bytes) -> None:
        """The next bytes of the stream, of any length."""
        self._buffer += data

    def take(self) -> bytes | None:
        """The next message; None until all of it was received. Raises FrameTooLarge."""
        if len(self._buffer) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._buffer)
        if length > self._limit_bytes:
            raise FrameTooLarge(f"a message of {length} bytes, more than {self._limit_bytes}")
        end = _LENGTH.size + length
        if len(self._buffer) < end:
            return None
        message = bytes(memoryview(self._buffer)[_LENGTH.size : end])
        del self._buffer[:end]
        return message
