"""Blocks as a put takes them, other than from staging memory: from slots that a client had reserved, or from a message.

Of reserved slots: owns the slots of one request until each belongs to its block. Reads only the token ids from a
header, and those once: the client may still be writing. Invariant: each slot is taken or free when the request ends.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence

import numpy as np

from kvstore_proto.arena import HEADER_BYTES
from kvstore_tiers.base import Slot
from kvstore_tiers.host import HostTier
from kvstore_tiers.segments import Segment
from kvstored.clients.staging import tokens_in
from kvstored.store.reservations import Reservations


class ReservedBlocks:
    """Implements `Staged`: the offset of a block is the place of its slot in the reservation."""

    def __init__(self, slots: Mapping[int, Slot], tenant: int, host: HostTier, reservations: Reservations) -> None:
        self._images = {place: host.slot_segment(slot) for place, slot in slots.items()}
        self._left = dict(slots)
        self._tenant = tenant
        self._reservations = reservations

    def tokens_at(self, offset: int) -> bytes:
        return tokens_in(ctypes.string_at(self._images[offset].address, HEADER_BYTES))

    def payload_at(self, offset: int, nbytes: int) -> Segment:
        return self._images[offset].part(HEADER_BYTES, nbytes)

    def take(self, offset: int) -> Slot:
        """The slot is a block's from now on: the caller attaches it in the same turn of the loop."""
        slot = self._left.pop(offset)
        self._reservations.used(self._tenant, slot)
        return slot

    def end(self) -> None:
        """Free what no block has taken. Idempotent."""
        left, self._left = self._left, {}
        for slot in left.values():
            self._reservations.free(self._tenant, slot)


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
