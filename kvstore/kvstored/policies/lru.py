"""Least recently used, leaf-first, touched from the tail to the head.

The tail of a chain is older than its head, so the order itself evicts leaves first; parking (see `ordered`)
catches what it does not. Why more room never hurts it: Mattson, Gecsei, Slutz, Traiger: "Evaluation techniques
for storage hierarchies", IBM Systems Journal 9(2), 1970. On real traces no classical policy beats LRU at every
capacity. A bad choice where most blocks are used once and room is scarce: it keeps a one-time block as long as any
other; put an admission in front.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from kvstored.policies.base import ResidencyClass
from kvstored.policies.one_queue import OneQueuePolicy
from kvstored.policies.ordered import OUT, QUEUED

_HOT_SHARE = 4  # hot: used within the last quarter of a tier's worth of accesses; warm: within one tier's worth


class Lru(OneQueuePolicy):
    """O(1) an event; 16 bytes a row."""

    name: ClassVar[str] = "lru"

    def accessed(self, rows: Sequence[int], now_ns: int) -> None:
        where, stamp = self._where, self._stamp
        accesses = self._accesses
        tenant_of = self.residency.tenant_of
        queue = self._queues[tenant_of(rows[0])]  # rows used together are one tenant's
        to_back, push_back = queue.to_back, queue.push_back
        for row in reversed(rows):
            accesses += 1
            stamp[row] = accesses
            if where[row] == QUEUED:
                to_back(row)
            elif where[row] != OUT:
                push_back(row)
                where[row] = QUEUED
        self._accesses = accesses

    def inserted_run(self, rows: Sequence[int], now_ns: int) -> None:
        tenant = self._know(rows)
        where, stamp, accesses = self._where, self._stamp, self._accesses
        push_back = self._queues[tenant].push_back
        for row in rows:
            accesses += 1
            stamp[row] = accesses
            push_back(row)
            where[row] = QUEUED
        self._accesses = accesses
        self._rows += len(rows)

    def removed(self, row: int) -> None:
        if self._where[row] == QUEUED:
            queues = self._queues
            (queues[0] if len(queues) == 1 else queues[self.residency.tenant_of(row)]).unlink(row)
        self._where[row] = OUT
        self._rows -= 1

    def next_victim(self, now_ns: int, *, exclude: Container[int] = (), tenant: int | None = None) -> int:
        if not exclude and len(self._queues) == 1 and not self.shares and not self._returned[0]:
            row = self._queues[0].front  # of nearly every question the answer
            if row >= 0 and self.residency.may_leave(row, self.tier):
                return row
        return super().next_victim(now_ns, exclude=exclude, tenant=tenant)

    def residency_class(self, row: int, now_ns: int) -> ResidencyClass:
        age = self._accesses - self._stamp[row]
        if age * _HOT_SHARE < self._rows:
            return ResidencyClass.HOT
        return ResidencyClass.WARM if age < self._rows else ResidencyClass.COLD

    def _class_masks(self, now_ns: int) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
        age = np.uint64(self._accesses) - np.frombuffer(self._stamp, dtype=np.uint64)
        return age * np.uint64(_HOT_SHARE) < self._rows, age < self._rows
