"""What a worker gets at its start, as plain values with a JSON form.

Owns no behaviour. A restarted worker gets the same setup as the first.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Self

from kvstore_engine.executors.sizes import PoolSetup, StepSizes


@dataclass(frozen=True, slots=True)
class WorkerSetup:
    """`model`: what messages call the file, whose descriptor the worker inherits. `pool`: whose memory it maps."""

    model: str
    pool: PoolSetup
    sizes: StepSizes

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, packet: bytes) -> Self:
        fields = json.loads(packet)
        return cls(fields["model"], PoolSetup(**fields["pool"]), StepSizes(**fields["sizes"]))
