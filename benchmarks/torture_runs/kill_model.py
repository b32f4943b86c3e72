"""The plain model beside the kills: what one client may count on after a crash.

Owns, for each conversation of one client, what became of each block by the answers it got. Knows nothing of tiers,
files or recovery. A block is `DURABLE` from the answer that said so until a delete of it is sent; `GONE` from the
answer to a delete until it is put again; `OPEN` otherwise: it may be there or not, but whole and right.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

import numpy as np
import numpy.typing as npt
import xxhash

from kvstore_client import Fingerprint, LayerGroup

Bytes = npt.NDArray[np.uint8]
_POOL_BYTES = 4 << 20
_POOL = np.random.default_rng(0x70C7).integers(0, 256, _POOL_BYTES, dtype=np.uint8)
_NAME_BYTES = 16
BLOCK_TOKENS = 64
MODELS = tuple(
    Fingerprint("torture", name, groups=(LayerGroup(0, "full", 0, (0, 1), nbytes // BLOCK_TOKENS // 2),))
    for name, nbytes in (("small blocks", 4096), ("large blocks", 24 * 1024))
)


def payload_of(nbytes: int, *name: object) -> Bytes:
    """The `nbytes` bytes of the block with this name. None, some or all of them are its name again and again, which
    codecs make small."""
    digest = xxhash.xxh3_128_digest(repr(name).encode())
    start = int.from_bytes(digest[:8], "little") % (_POOL_BYTES - nbytes)
    payload = _POOL[start : start + nbytes].copy()
    repeated = max(min(nbytes, _NAME_BYTES), nbytes * (digest[8] % 5) // 4)
    payload[:repeated] = np.resize(np.frombuffer(digest, dtype=np.uint8), repeated)
    return payload


class State(Enum):
    OPEN = "open"
    DURABLE = "durable"
    GONE = "gone"


@dataclass
class Conversation:
    """One chain of blocks under one fingerprint."""

    owner: str
    model: int
    number: int
    longest: int
    states: list[State] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.states = [State.OPEN] * self.longest

    @property
    def fingerprint(self) -> Fingerprint:
        return MODELS[self.model]

    def tokens(self, blocks: int) -> npt.NDArray[np.int32]:
        return np.arange(blocks * BLOCK_TOKENS, dtype=np.int32) + 1000 * self.number

    def payload(self, block: int) -> Bytes:
        return payload_of(self.fingerprint.payload_bytes(), self.owner, self.model, self.number, block)

    def payloads(self, blocks: int) -> list[Bytes]:
        return [self.payload(block) for block in range(blocks)]

    # -- what happened -----------------------------------------------------------------------------------------------

    def putting(self, blocks: int) -> None:
        """A put is about to be sent."""
        for block in range(blocks):
            if self.states[block] is State.GONE:
                self.states[block] = State.OPEN

    def answered(self, durability: Sequence[str]) -> None:
        for block, said in enumerate(durability):
            if said == "durable":
                self.states[block] = State.DURABLE

    def deleting(self) -> None:
        """A delete of all blocks is about to be sent."""
        self.states = [State.GONE if state is State.GONE else State.OPEN for state in self.states]

    def deleted(self) -> None:
        """The answer said that none of them is left."""
        self.states = [State.GONE] * self.longest

    # -- what must be ------------------------------------------------------------------------------------------------

    def lost(self, tiers: Sequence[str]) -> list[int]:
        """Durable blocks that no tier has, by what a lookup says of each."""
        return [
            block
            for block, state in enumerate(self.states)
            if state is State.DURABLE and (block >= len(tiers) or tiers[block] == "absent")
        ]

    def resurrected(self, tiers: Sequence[str]) -> list[int]:
        return [
            block
            for block, state in enumerate(self.states)
            if state is State.GONE and block < len(tiers) and tiers[block] != "absent"
        ]

    @property
    def durable_head(self) -> int:
        """Leading blocks that must be readable: all of them and their ancestors are durable."""
        head = 0
        while head < self.longest and self.states[head] is State.DURABLE:
            head += 1
        return head

    @property
    def durable_blocks(self) -> int:
        return self.states.count(State.DURABLE)
