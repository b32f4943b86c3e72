"""A client's staging memory: bytes that a client can write and the daemon reads.

Owns one memfd, sealed against resizing, so that no client can make the daemon fault on a vanished page. Never trusts
its content: the daemon copies first and checks the copy.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os

import numpy as np

from kvstore_proto.arena import ALIGNMENT_BYTES, HEADER_BYTES, MAX_TOKENS, TOKEN_COUNT_OFFSET, TOKENS_OFFSET, Bytes
from kvstore_tiers.segments import Segment

SMALLEST_SHARE_BYTES = 4 << 20
_F_ADD_SEALS = 1033
_SEAL_SEAL, _SEAL_SHRINK, _SEAL_GROW = 1, 2, 4


class Staging:
    """`size_bytes` of shared memory; `fd` is handed to the client once and closed here by `forget_fd`."""

    def __init__(self, size_bytes: int, label: str) -> None:
        self.size_bytes = -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        self.fd = os.memfd_create(f"kvstored-staging-{label}"[:200], os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.fchmod(self.fd, 0o600)
        os.ftruncate(self.fd, self.size_bytes)
        fcntl.fcntl(self.fd, _F_ADD_SEALS, _SEAL_SEAL | _SEAL_SHRINK | _SEAL_GROW)
        # The array keeps the mapping alive: a copy in flight survives the session that started it.
        self.view: Bytes = np.frombuffer(mmap.mmap(self.fd, self.size_bytes, prot=mmap.PROT_READ), np.uint8)
        self.address = int(self.view.ctypes.data)

    def tokens_at(self, offset: int) -> bytes:
        """As the client wrote them, taken once: it may still be writing."""
        return tokens_in(ctypes.string_at(self.address + offset, HEADER_BYTES))

    def payload_at(self, offset: int, nbytes: int) -> Segment:
        return Segment(self.address + offset + HEADER_BYTES, nbytes, owner=self.view)

    def forget_fd(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def tokens_in(header: bytes) -> bytes:
    """Packed token ids of a header as a client writes it: nothing else in it is anything."""
    count = int.from_bytes(header[TOKEN_COUNT_OFFSET : TOKEN_COUNT_OFFSET + 4], "little")
    return header[TOKENS_OFFSET : TOKENS_OFFSET + min(count, MAX_TOKENS) * 4]


class StagingPool:
    """What all clients' staging together may take of the DRAM capacity. It is set aside at the start of the daemon, so
    that a tier full of blocks never keeps a client from writing."""

    def __init__(self, size_bytes: int, per_client_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.used_bytes = 0
        self._per_client_bytes = per_client_bytes

    def take(self, wanted_bytes: int) -> int:
        """What a client gets: what it wants, up to its own limit and a quarter of what is left, so that later clients
        can write too; 0 when nothing is left."""
        left_bytes = self.size_bytes - self.used_bytes
        fair_bytes = max(left_bytes // 4, min(left_bytes, SMALLEST_SHARE_BYTES))
        granted_bytes = min(wanted_bytes, self._per_client_bytes, fair_bytes)
        granted_bytes -= granted_bytes % ALIGNMENT_BYTES
        self.used_bytes += granted_bytes
        return granted_bytes

    def give_back(self, nbytes: int) -> None:
        self.used_bytes -= nbytes
