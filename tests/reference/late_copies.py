"""Copies that come as late as they may: when a step begins that reads them, or when somebody waits for them.

Owns the loads under way. Until one has come its blocks hold garbage; one that is lost stays so.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from kvstore_engine.pool import BlockPool
from kvstore_engine.restore.copies import HostPoolCopies
from kvstore_engine.restore.session import KvLease, Payload
from tests.reference.memory_session import MemoryLease

_GARBAGE = 0x5A


@dataclass(eq=False)
class LateLoad:
    copies: HostPoolCopies
    lease: KvLease
    blocks: Sequence[tuple[int, list[int]]]
    is_lost: bool
    has_come: bool = False
    seconds: float = 0.25

    def arrive(self) -> None:
        assert isinstance(self.lease, MemoryLease) and (self.has_come or not self.lease.released)
        if not self.has_come and not self.is_lost:
            self.copies.load(self.lease, self.blocks)
        self.has_come = True

    def finish(self) -> bool:
        self.arrive()
        return self.lease.valid and not self.is_lost


@dataclass(eq=False)
class LateCopies:
    """`lost`: which loads are, in the order in which they are begun. `device`: as of `BlockCopies`."""

    pool: BlockPool
    lost: Collection[int] = ()
    loads: list[LateLoad] = field(default_factory=list)
    waits_by_layer: bool = True
    device: None = None
    decodes: list[bool] = field(default_factory=list)  # what the engine said before its steps

    def load(self, lease: KvLease, blocks: Sequence[tuple[int, list[int]]]) -> LateLoad:
        for _, table in blocks:
            self.pool.planes[:, table] = _GARBAGE
        self.loads.append(LateLoad(HostPoolCopies(self.pool), lease, blocks, len(self.loads) in self.lost))
        return self.loads[-1]

    def arrive(self) -> None:
        """A step reads the pool now."""
        for load in self.loads:
            if not load.has_come:
                load.arrive()

    def payload(self, table: list[int]) -> Payload:
        return HostPoolCopies(self.pool).payload(table)

    def decoding(self, is_decoding: bool) -> None:
        self.decodes.append(is_decoding)
