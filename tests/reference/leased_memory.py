"""A lease over memory of the test's own: a grant that needs no daemon, and blocks in the layout of a fingerprint."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvstore_client.keys import Chain, KeyChains
from kvstore_client.lease import Lease, LeasedBlock
from kvstore_proto.arena import HEADER_BYTES, slot_bytes
from kvstore_proto.fingerprint import Fingerprint
from kvstore_proto.kv_layout import KVLayout
from kvstore_proto.token_ids import TokenIds


@dataclass
class MemoryGrant:
    """A daemon that grants and counts releases. Implements `Grant`."""

    layout: KVLayout
    now: float = 100.0
    alive: bool = True
    grants_s: float | None = 10.0
    name: str = "7"
    released: int = 0
    _counting: threading.Lock = field(default_factory=threading.Lock)

    @property
    def block_tokens(self) -> int:
        return self.layout.fingerprint.block_tokens

    @property
    def layer_count(self) -> int:
        return len(self.layout.group.layers)

    def clock(self) -> float:
        return self.now

    def is_alive(self) -> bool:
        return self.alive

    def renew(self) -> float | None:
        return self.grants_s

    def release(self) -> None:
        with self._counting:
            self.released += 1

    def chain(self, tokens: TokenIds) -> Chain:
        return KeyChains(self.layout.fingerprint, [b"r" * 16]).chain(tokens, None, self.layout.group.group_id)


def lease_over(
    fingerprint: Fingerprint, payloads: Sequence[npt.NDArray[np.uint8]], *, group: int = 0
) -> tuple[Lease, MemoryGrant]:
    """Lease blocks that hold `payloads`, in a mapping that nobody can write to."""
    found = fingerprint.group(group)
    assert found is not None
    grant, size = MemoryGrant(KVLayout(fingerprint, found)), slot_bytes(len(payloads[0]))
    mapping = mmap.mmap(-1, size * len(payloads))
    memory = np.frombuffer(mapping, np.uint8)
    for number, payload in enumerate(payloads):
        memory[number * size + HEADER_BYTES :][: len(payload)] = payload
    memory.flags.writeable = False
    held = [
        LeasedBlock(memory, number * size, len(payload), 1, bytes([number]) * 16)
        for number, payload in enumerate(payloads)
    ]
    return Lease(held, grant, expires_in_s=10.0, clock=grant.clock), grant
