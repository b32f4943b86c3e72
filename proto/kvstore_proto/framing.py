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
        self._received: bytes | bytearray = b""
        self._taken = 0  # of these

    def __len__(self) -> int:
        """Return the bytes received and not yet taken."""
        return len(self._received) - self._taken

    def feed(self, data: bytes) -> None:
        """Add `data`, the next bytes of the received stream. It may end in the middle of a message."""
        if self._taken == len(self._received):  # as a rule; then nothing is copied twice
            self._received, self._taken = data, 0
            return
        if not isinstance(self._received, bytearray):
            self._received = bytearray(self._received)  # grows in place: a peer that sends byte by byte costs no more
        del self._received[: self._taken]
        self._taken = 0
        self._received += data

    def take(self) -> bytes | None:
        """Remove and return the next message, or return None if only a part of it was received yet. Raises
        FrameTooLarge.
        """
        received, first = self._received, self._taken + _LENGTH.size
        if len(received) < first:
            return None
        (length,) = _LENGTH.unpack_from(received, self._taken)
        if length > self._limit_bytes:
            raise FrameTooLarge(f"a message of {length} bytes, more than {self._limit_bytes}")
        end = first + length
        if len(received) < end:
            return None
        self._taken = end
        return bytes(received[first:end])
