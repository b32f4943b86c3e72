"""ARC: recency and frequency side by side, the room between them moved by what comes back; leaf-first.

Megiddo, Modha: "ARC: a self-tuning, low overhead replacement cache", FAST 2003. Blocks used once (T1) and more often
(T2) are two LRU queues; keys that left either are remembered (B1, B2), and one that returns makes the queue it left
larger. The tier's size is taken for what is in it when something must leave. A bad choice where a return is no news
about others: in chats every session's blocks come back by themselves, and the target swings without a gain over LRU.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection
from typing import ClassVar

from kvstored.policies.base import PolicySettings
from kvstored.policies.queued import QueuedPolicy, first_of
from kvstored.residency import ResidencyView

_ONCE, _OFTEN = 0, 1
_MEMORY_MIN = 16


class Arc(QueuedPolicy):
    """O(1) an event; remembers up to twice as many keys as the tenant has blocks."""

    name: ClassVar[str] = "arc"
    queues: ClassVar[int] = 2

    def __init__(self, residency: ResidencyView, tier: int, settings: PolicySettings | None = None) -> None:
        super().__init__(residency, tier, settings)
        self._gone: list[tuple[OrderedDict[bytes, None], OrderedDict[bytes, None]]] = []  # by tenant: B1, B2
        self._target: list[float] = []  # by tenant: the size that T1 should have

    def removed(self, row: int) -> None:
        tenant = self.residency.tenant_of(row)
        gone = self._gone[tenant][self._queue_of[row]]
        gone[self.residency.key(row)] = None
        while len(gone) > max(_MEMORY_MIN, sum(self._sizes[tenant])):
            gone.popitem(last=False)
        super().removed(row)

    def _entrance(self, row: int, tenant: int) -> int:
        once, often = self._gone[tenant]
        key, target = self.residency.key(row), self._target[tenant]
        if key in once:
            self._target[tenant] = min(target + max(1.0, len(often) / len(once)), float(sum(self._sizes[tenant])))
            del once[key]
        elif key in often:
            self._target[tenant] = max(target - max(1.0, len(once) / len(often)), 0.0)
            del often[key]
        else:
            return _ONCE
        return _OFTEN

    def _used(self, row: int, tenant: int) -> None:
        self._move(row, tenant, _OFTEN)

    def _candidate(self, tenant: int, refused: Collection[int]) -> int:
        first = _ONCE if self._sizes[tenant][_ONCE] > self._target[tenant] else _OFTEN
        row = first_of(self._queues[tenant][first], refused)
        return row if row >= 0 else first_of(self._queues[tenant][1 - first], refused)

    def _add_tenant(self) -> None:
        super()._add_tenant()
        self._gone.append((OrderedDict(), OrderedDict()))
        self._target.append(0.0)
