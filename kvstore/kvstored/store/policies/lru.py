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

from kvstored.store.policies.base import ResidencyClass
from kvstored.store.policies.one_queue import OneQueuePolicy
from kvstored.store.policies.ordered import OUT, QUEUED

_HOT_SHARE = 4  # hot: used within the last quarter of a tier's worth of accesses; warm: within one tier's worth


class Lru(OneQueuePolicy):
    """O(1) an event; 16 bytes a row."""

    name: ClassVar[str] = "lru"

    def accessed(self, rows: Sequence[int], now_ns: int) -> None:
        where, stamp = self._where, self._stamp
        accesses = self._accesses
        tenant_of = self.residency.tenant_of
        queue = self._queues[tenant_of(rows[0])]  # rows used together are one tenant's
        befores, afters = self._links.before, self._links.after
        back = queue.back
        for row in reversed(rows):
            accesses += 1
            stamp[row] = accesses
            if where[row] == QUEUED:  # `to_back`, without a call
                after = afters[row]
                if after < 0:
                    continue
                before = befores[row]
                befores[after] = before
                if before >= 0:
                    afters[before] = after
                else:
                    queue.front = after
            elif where[row] == OUT:
                continue
            else:
                where[row] = QUEUED
                if back < 0:
                    queue.front = row
            befores[row] = back
            if back >= 0:
                afters[back] = row
            afters[row] = -1
            back = row
        queue.back = back
        self._accesses = accesses

    def inserted_run(self, rows: Sequence[int], now_ns: int) -> None:
        tenant = self._know(rows)
        where, stamp, accesses = self._where, self._stamp, self._accesses
        queue = self._queues[tenant]
        befores, afters, back = self._links.before, self._links.after, queue.back
        if back < 0:
            queue.front = rows[0]
        for row in rows:
            accesses += 1
            stamp[row] = accesses
            where[row] = QUEUED
            befores[row] = back
            if back >= 0:
                afters[back] = row
            back = row
        afters[back] = -1
        queue.back = back
        self._accesses = accesses
        self._rows += len(rows)

    def removed(self, row: int) -> None:
        if self._where[row] == QUEUED:
            queues = self._queues
            (queues[0] if len(queues) == 1 else queues[self.residency.tenant_of(row)]).unlink(row)
        self._where[row] = OUT
        self._rows -= 1

    def removed_run(self, rows: Sequence[int]) -> None:
        queue = self._queues[0]
        where, afters = self._where, self._links.after
        befores = self._links.before
        if len(self._queues) > 1:
            queue = self._queues[self.residency.tenant_of(rows[0])]
        for row in rows:
            if where[row] == QUEUED:  # `unlink`, without a call
                before, after = befores[row], afters[row]
                if before >= 0:
                    afters[before] = after
                else:
                    queue.front = after
                if after >= 0:
                    befores[after] = before
                else:
                    queue.back = before
            where[row] = OUT
        self._rows -= len(rows)

    def next_victims(self, now_ns: int, limit: int) -> list[int]:
        row = self.next_victim(now_ns)
        if row < 0 or self._queues[0].front != row or len(self._queues) > 1 or self.shares or self._returned[0]:
            return [row] if row >= 0 else []
        run = self.residency.run_above(row, self.tier, limit)
        afters = self._links.after
        for at in range(1, len(run)):
            if afters[row] != run[at]:
                return run[:at]
            row = run[at]
        return run

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
