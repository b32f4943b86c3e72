"""The packets between an executor and its worker: fixed binary, one datagram each.

The module owns their layout. Nothing is evaluated or unpickled on either side.

Parent to child: the setup (JSON, once), then `Order` for each step. Child to parent: `Reply` for the setup and for each
order.
"""

from __future__ import annotations

import json
import struct
from dataclasses import asdict, dataclass, replace
from enum import IntEnum
from typing import NamedTuple, Self

from kvstore_engine.executors.sizes import PoolSetup, StepSizes
from kvstore_engine.page_selection import PageSelection

_ORDER = struct.Struct("<QII")
_REPLY = struct.Struct("<QIIQ")
MAX_PACKET_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class EngineWorkerSetup:
    """The first message to an engine's worker process, with what it needs to open the model: `model`, the path of the
    file, which is used in messages only, the settings `pool` of the K/V pool, and the `sizes` of steps.
    """

    model: str
    pool: PoolSetup
    sizes: StepSizes

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, packet: bytes) -> Self:
        fields = json.loads(packet)
        pool = PoolSetup(**fields["pool"])
        if selection := fields["pool"]["selection"]:
            pool = replace(pool, selection=PageSelection(**selection))
        return cls(fields["model"], pool, StepSizes(**fields["sizes"]))


class Status(IntEnum):
    """The result of an order to the worker process, or of its start. Each one but DONE comes with a message."""

    DONE = 0
    INVALID = 1  # ValueError: the step breaks a limit
    FAILED = 2  # RuntimeError: ggml says that it failed
    USAGE = 3  # UsageError, at the setup: the user's mistake
    OPERATION = 4  # OperationError, at the setup: the system's failure


class Order(NamedTuple):
    """A message to the worker process: compute step number `step` with `threads` threads. The step's `slices` slices
    are in the mailbox (shared memory for steps and their logits).
    """

    step: int
    slices: int
    threads: int

    def encode(self) -> bytes:
        return _ORDER.pack(*self)

    @classmethod
    def decode(cls, packet: bytes) -> Order:
        return cls(*_ORDER.unpack(packet))


class Reply(NamedTuple):
    """The worker process's answer to the order for step number `step`. If `status` is DONE, `rows` rows of logits are
    in the mailbox (shared memory for steps and their logits); otherwise `message` gives the reason. `compute_ns` is the
    computing time in nanoseconds.
    """

    step: int
    status: Status
    rows: int = 0
    compute_ns: int = 0
    message: str = ""

    def encode(self) -> bytes:
        text = self.message.encode(errors="replace")[: MAX_PACKET_BYTES - _REPLY.size]
        return _REPLY.pack(self.step, self.status, self.rows, self.compute_ns) + text

    @classmethod
    def decode(cls, packet: bytes) -> Reply:
        step, status, rows, compute_ns = _REPLY.unpack_from(packet)
        return cls(step, Status(status), rows, compute_ns, packet[_REPLY.size :].decode(errors="replace"))
