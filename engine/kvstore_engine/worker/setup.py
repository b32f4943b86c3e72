"""What a worker is told at its birth, as plain values with a JSON form.

Owns no behaviour. A restarted worker gets the same setup as the first.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Self


@dataclass(frozen=True, slots=True)
class PoolSetup:
    """The block pool whose memory the worker maps: the arguments of `BlockPool`."""

    blocks: int
    block_tokens: int
    kv_dtype: str


@dataclass(frozen=True, slots=True)
class WorkerSetup:
    """The model's file, the pool, and the arguments of `Executor`."""

    model: str
    pool: PoolSetup
    threads: int
    max_tokens_per_step: int
    max_sequences: int
    max_context: int

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, packet: bytes) -> Self:
        fields = json.loads(packet)
        fields["pool"] = PoolSetup(**fields["pool"])
        return cls(**fields)
