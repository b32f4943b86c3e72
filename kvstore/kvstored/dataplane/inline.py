"""Blocks that came inside a message, as a put needs them: no shared memory, nobody else can write them.

Owns references to the bytes of one call, for as long as the put may copy from them. Never copies.
"""

from __future__ import annotations

import sys

import numpy as np

from kvstore_tiers.segments import Segment


class InlineBlocks:
    """Implements `Staged`. `offer` a block, then reserve it: the reservation's extent is that block."""

    def __init__(self) -> None:
        self.size_bytes = sys.maxsize  # the message was within its limit already
        self.fd = -1
        self._offered: tuple[bytes, bytes] | None = None
        self._blocks: dict[int, tuple[bytes, bytes]] = {}
        self._next = 0

    def offer(self, tokens: bytes, payload: bytes) -> None:
        """The block (packed token ids, payload) that the next `allocate` takes up."""
        self._offered = (tokens, payload)

    def allocate(self, nbytes: int) -> int | None:
        block, self._offered = self._offered, None
        if block is None:
            return None
        offset = self._next
        self._next += nbytes
        self._blocks[offset] = block
        return offset

    def free(self, offset: int, nbytes: int) -> None:
        del self._blocks[offset]

    def largest_free(self) -> int:
        """Nothing to lend: each extent is a block that came with the message."""
        return 0

    def tokens_at(self, offset: int) -> bytes:
        return self._blocks[offset][0]

    def payload_at(self, offset: int, nbytes: int) -> Segment:
        payload = np.frombuffer(self._blocks[offset][1], np.uint8)
        return Segment(int(payload.ctypes.data), nbytes, owner=payload)

    def forget_fd(self) -> None:
        """There is none."""
