"""The sources of a put's blocks: a client's staging memory, slots that it had reserved, or a message.

The module owns one memfd for each client, sealed against resizing, so that no client can make the daemon fault on a
vanished page. It never trusts the content: the daemon copies first and checks the copy.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
from collections.abc import Mapping, Sequence

import numpy as np

from kvstore_proto.arena import ALIGNMENT_BYTES, HEADER_BYTES, MAX_TOKENS, TOKEN_COUNT_OFFSET, TOKENS_OFFSET, Bytes
from kvstore_tiers.base import Slot
from kvstore_tiers.host import HostTier
from kvstore_tiers.segments import Segment
from kvstored.store.reservations import Reservations

SMALLEST_SHARE_BYTES = 4 << 20
_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


class StagingMemory:
    """A client's staging memory: `size_bytes` of shared memory. `fd` is handed to the client once and closed here by
    `forget_fd`.
    """

    def __init__(self, size_bytes: int, label: str) -> None:
        self.size_bytes = -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        self.fd = os.memfd_create(f"kvstored-staging-{label}"[:200], os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.fchmod(self.fd, 0o600)
        os.ftruncate(self.fd, self.size_bytes)
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SEALS)
        # The array keeps the mapping alive: a copy in flight survives the session that started it.
        self.view: Bytes = np.frombuffer(mmap.mmap(self.fd, self.size_bytes, prot=mmap.PROT_READ), np.uint8)
        self.address = int(self.view.ctypes.data)

    def tokens_at(self, offset: int) -> bytes:
        """Return token ids as the client wrote them, read once: the client may still be writing."""
        return tokens_in(ctypes.string_at(self.address + offset, HEADER_BYTES))

    def payload_at(self, offset: int, nbytes: int) -> Segment:
        return Segment(self.address + offset + HEADER_BYTES, nbytes, owner=self.view)

    def forget_fd(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def tokens_in(header: bytes) -> bytes:
    """Return the packed token ids of a header that a client wrote; no other field of it is read."""
    count = int.from_bytes(header[TOKEN_COUNT_OFFSET : TOKEN_COUNT_OFFSET + 4], "little")
    return header[TOKENS_OFFSET : TOKENS_OFFSET + min(count, MAX_TOKENS) * 4]


class StagingPool:
    """The part of the DRAM capacity for all clients' staging together. It is set aside at the start of the daemon, so
    that a full tier never keeps a client from writing.
    """

    def __init__(self, size_bytes: int, per_client_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.used_bytes = 0
        self._per_client_bytes = per_client_bytes

    def take(self, wanted_bytes: int) -> int:
        """Return the bytes that a client gets: its wish, up to its own limit and a quarter of what is left, so that
        later clients can write too; 0 if nothing is left.
        """
        left_bytes = self.size_bytes - self.used_bytes
        fair_bytes = max(left_bytes // 4, min(left_bytes, SMALLEST_SHARE_BYTES))
        granted_bytes = min(wanted_bytes, self._per_client_bytes, fair_bytes)
        granted_bytes -= granted_bytes % ALIGNMENT_BYTES
        self.used_bytes += granted_bytes
        return granted_bytes

    def give_back(self, nbytes: int) -> None:
        self.used_bytes -= nbytes


class ReservedBlocks:
    """Blocks in reserved slots, an implementation of `Staged`: the offset of a block is the place of its slot in the
    reservation.
    """

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
        """Return a slot, which belongs to a block from now on: the caller attaches it in this turn of the loop."""
        slot = self._left.pop(offset)
        self._reservations.used(self._tenant, slot)
        return slot

    def end(self) -> None:
        """Free the slots that no block has taken. Idempotent."""
        left, self._left = self._left, {}
        for slot in left.values():
            self._reservations.free(self._tenant, slot)


class InlineBlocks:
    """Blocks in a message, an implementation of `Staged`: the offset of a block is its place in `tokens` and
    `payloads`.
    """

    def __init__(self, tokens: Sequence[bytes], payloads: Sequence[bytes]) -> None:
        self._tokens = tokens
        self._payloads = payloads

    def tokens_at(self, offset: int) -> bytes:
        return self._tokens[offset]

    def payload_at(self, offset: int, nbytes: int) -> Segment:
        payload = np.frombuffer(self._payloads[offset], np.uint8)
        return Segment(int(payload.ctypes.data), nbytes, owner=payload)
