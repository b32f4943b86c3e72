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
from kvstored.store.reservations import Reservations

SMALLEST_SHARE_BYTES = 4 << 20
_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


class StagingMemory:
    """A shared memory of `size_bytes`, rounded up to the alignment of blocks, which one client writes and the daemon
    reads. `fd` is its descriptor, which is sent to the client once and then closed here by `forget_fd`."""

    def __init__(self, size_bytes: int, label: str) -> None:
        self.size_bytes = -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        self.fd = os.memfd_create(f"kvstored-staging-{label}"[:200], os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.fchmod(self.fd, 0o600)
        os.ftruncate(self.fd, self.size_bytes)
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SEALS)
        # The array keeps the mapping alive: a copy in flight survives the session that started it.
        self._mapping = mmap.mmap(self.fd, self.size_bytes, prot=mmap.PROT_READ)
        self.view: Bytes = np.frombuffer(self._mapping, np.uint8)
        self._pages = self.view.reshape(-1, ALIGNMENT_BYTES)
        self.address = int(self.view.ctypes.data)

    def tokens_of(self, offsets: Sequence[int]) -> list[bytes]:
        """Return the packed token ids that the client has written into each block at one of `offsets`. They are copied
        once, since the client may still be writing there."""
        pages = np.array(offsets) // ALIGNMENT_BYTES
        counts = self._pages[pages, TOKEN_COUNT_OFFSET : TOKEN_COUNT_OFFSET + 4].view("<u4")[:, 0]
        sizes = (np.minimum(counts, MAX_TOKENS) * 4).tolist()
        ids, width = self._pages[pages, TOKENS_OFFSET : TOKENS_OFFSET + max(sizes)].tobytes(), max(sizes)
        return [ids[at * width : at * width + nbytes] for at, nbytes in enumerate(sizes)]

    def payloads_at(self, offsets: Sequence[int]) -> tuple[list[int], object]:
        first = self.address + HEADER_BYTES
        return [first + offset for offset in offsets], self.view

    def forget_fd(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def tokens_in(header: int) -> bytes:
    """Return the packed token ids in the block header at the address `header`, which a client wrote and may still be
    writing. No other field of the header is read."""
    count = int.from_bytes(ctypes.string_at(header + TOKEN_COUNT_OFFSET, 4), "little")
    return ctypes.string_at(header + TOKENS_OFFSET, min(count, MAX_TOKENS) * 4)


class StagingPool:
    """A budget of bytes for the staging memory of all clients together. It is set aside from the DRAM capacity at the
    start, so that a full tier never keeps a client from writing.
    """

    def __init__(self, size_bytes: int, per_client_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.used_bytes = 0
        self._per_client_bytes = per_client_bytes

    def take(self, wanted_bytes: int) -> int:
        """Take staging memory for one client out of the budget, and return its size in bytes: `wanted_bytes`, but at
        most the limit for one client and a quarter of the budget that is left. Return 0 if nothing is left."""
        left_bytes = self.size_bytes - self.used_bytes
        fair_bytes = max(left_bytes // 4, min(left_bytes, SMALLEST_SHARE_BYTES))
        granted_bytes = min(wanted_bytes, self._per_client_bytes, fair_bytes)
        granted_bytes -= granted_bytes % ALIGNMENT_BYTES
        self.used_bytes += granted_bytes
        return granted_bytes

    def give_back(self, nbytes: int) -> None:
        self.used_bytes -= nbytes


class ReservedBlocks:
    """The blocks of a put that the client wrote directly into reserved slots. A block's offset is the number of its
    slot in the reservation, from 0."""

    def __init__(self, slots: Mapping[int, Slot], tenant: int, host: HostTier, reservations: Reservations) -> None:
        one_of = {slot.container: slot for slot in slots.values()}  # the slots of an arena are in one piece of memory
        self._arenas = {number: host.slot_segment(slot) for number, slot in one_of.items()}  # keep it mapped
        begins = {number: segment.address - one_of[number].offset for number, segment in self._arenas.items()}
        self._addresses = {place: begins[slot.container] + slot.offset for place, slot in slots.items()}
        self._left = dict(slots)
        self._tenant = tenant
        self._reservations = reservations

    def tokens_of(self, offsets: Sequence[int]) -> list[bytes]:
        return [tokens_in(self._addresses[offset]) for offset in offsets]

    def payloads_at(self, offsets: Sequence[int]) -> tuple[list[int], object]:
        return [self._addresses[offset] + HEADER_BYTES for offset in offsets], self._arenas

    def take(self, offset: int) -> Slot:
        """Return the slot at `offset`, which belongs to a block from now on. The caller must attach it to the block's
        row before the event loop's next turn."""
        slot = self._left.pop(offset)
        self._reservations.used(self._tenant, slot)
        return slot

    def end(self) -> None:
        """Free the reserved slots that were not taken for a block. A second call does nothing."""
        left, self._left = self._left, {}
        for slot in left.values():
            self._reservations.free(self._tenant, slot)


class InlineBlocks:
    """The blocks of a put whose bytes came in the request message. A block's offset is its index in `tokens` and
    `payloads`."""

    def __init__(self, tokens: Sequence[bytes], payloads: Sequence[bytes]) -> None:
        self._tokens = tokens
        self._payloads = payloads

    def tokens_of(self, offsets: Sequence[int]) -> list[bytes]:
        return [self._tokens[offset] for offset in offsets]

    def payloads_at(self, offsets: Sequence[int]) -> tuple[list[int], object]:
        payloads = [np.frombuffer(self._payloads[offset], np.uint8) for offset in offsets]
        return [int(payload.ctypes.data) for payload in payloads], payloads
