"""Frames on the socket between the HTTP process and the scheduler's: a JSON header and raw bytes.

Owns the framing: two lengths, then the header, then the blob, which carries token ids (int32, little endian). Nothing
is evaluated or unpickled.
"""

from __future__ import annotations

import json
import socket
import struct
from typing import Any

import numpy as np
import numpy.typing as npt

Header = dict[str, Any]
Int32Array = npt.NDArray[np.int32]
MAX_FRAME_BYTES = 64 << 20
LENGTHS = struct.Struct("<II")
_CHUNK_BYTES = 1 << 18
_compact = json.JSONEncoder(separators=(",", ":")).encode  # kept: json.dumps makes one a call


class BrokenFrame(RuntimeError):
    """The other end does not speak this protocol."""


def encode(header: Header, blob: bytes = b"") -> bytes:
    text = _compact(header).encode()
    return LENGTHS.pack(len(text), len(blob)) + text + blob


def pack_tokens(tokens: Int32Array) -> bytes:
    return tokens.astype("<i4").tobytes()


def unpack_tokens(blob: bytes) -> Int32Array:
    return np.frombuffer(blob, "<i4").astype(np.int32)


def lengths(raw: bytes) -> tuple[int, int]:
    """Header's and blob's; BrokenFrame if they are absurd."""
    header, blob = LENGTHS.unpack(raw)
    if header + blob > MAX_FRAME_BYTES:
        raise BrokenFrame(f"a frame of {header + blob} bytes")
    return header, blob


class FrameReader:
    """Puts frames together from what a socket has, without waiting for a whole one."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._buffer = bytearray()

    def receive(self) -> list[tuple[Header, bytes]]:
        """The frames that are complete after one read, which waits if the socket is empty. EOFError at its end."""
        chunk = self._socket.recv(_CHUNK_BYTES)
        if not chunk:
            raise EOFError
        self._buffer += chunk
        frames = []
        while (frame := self._next()) is not None:
            frames.append(frame)
        return frames

    def _next(self) -> tuple[Header, bytes] | None:
        if len(self._buffer) < LENGTHS.size:
            return None
        header, blob = lengths(bytes(self._buffer[: LENGTHS.size]))
        end = LENGTHS.size + header + blob
        if len(self._buffer) < end:
            return None
        text, rest = self._buffer[LENGTHS.size : LENGTHS.size + header], self._buffer[LENGTHS.size + header : end]
        frame = json.loads(text), bytes(rest)
        del self._buffer[:end]
        return frame
