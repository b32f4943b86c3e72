"""Messages on a byte stream, each behind its length: 4 bytes, little-endian.

A direct stream carries them in both directions. The module does not look into a message. Invariant: messages come out
whole and in order, however the stream was cut.
"""

from __future__ import annotations

import struct
from typing import Final

_LENGTH: Final = struct.Struct("<I")


class FrameTooLarge(ValueError):
    """The error of a received message that is longer than the limit. The stream cannot be read any further."""


def frame(message: bytes) -> bytes:
    """Return `message` with its length in front, 4 bytes little-endian, as it is sent on a stream."""
    return _LENGTH.pack(len(message)) + message


class Frames:
    """A buffer that cuts a received byte stream into messages. Each message follows its length, and has at most
    `limit_bytes` bytes. It is not safe for several threads.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._buffer = bytearray()  # grows and shrinks in place: a peer that sends byte by byte costs no more

    def __len__(self) -> int:
        """Return the bytes received and not yet taken."""
        return len(self._buffer)

    def feed(self, data: bytes) -> None:
        """Add `data`, the next bytes of the received stream. It may end in the middle of a message."""
        self._buffer += data

    def take(self) -> bytes | None:
        """Remove and return the next message, or return None if only a part of it was received yet. Raises
        FrameTooLarge.
        """
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
