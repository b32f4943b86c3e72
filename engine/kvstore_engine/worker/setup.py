"""What a worker gets at its start, as plain values with a JSON form.

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
class StepSizes:
    """The most that a step may have, and the threads that compute it: the arguments of `Executor`."""

    threads: int = 2
    max_tokens_per_step: int = 512
    max_sequences: int = 16
    max_context: int = 8192


@dataclass(frozen=True, slots=True)
class WorkerSetup:
    """`model`: the file."""

    model: str
    pool: PoolSetup
    sizes: StepSizes

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, packet: bytes) -> Self:
        fields = json.loads(packet)
        return cls(fields["model"], PoolSetup(**fields["pool"]), StepSizes(**fields["sizes"]))
