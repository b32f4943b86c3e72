"""Blocks that came inside a message, as a put needs them: no shared memory, so no other process can write them.

Owns references to the bytes of one call, for as long as the put may copy from them. Never copies.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvstore_tiers.segments import Segment


class InlineBlocks:
    """Implements `Staged`: the offset of a block is its place in `tokens` and `payloads`."""

    def __init__(self, tokens: Sequence[bytes], payloads: Sequence[bytes]) -> None:
        self._tokens = tokens
        self._payloads = payloads

    def tokens_at(self, offset: int) -> bytes:
        return self._tokens[offset]

    def payload_at(self, offset: int, nbytes: int) -> Segment:
        payload = np.frombuffer(self._payloads[offset], np.uint8)
        return Segment(int(payload.ctypes.data), nbytes, owner=payload)
