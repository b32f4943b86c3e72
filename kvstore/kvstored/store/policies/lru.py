"""Least recently used, leaf-first, touched from the tail to the head.

The tail of a chain is older than its head, so the order itself evicts leaves first; parking (see `ordered`) handles the
exceptions. More room never hurts it: Mattson, Gecsei, Slutz, Traiger: "Evaluation techniques for storage hierarchies",
IBM Systems Journal 9(2), 1970. On real traces no classical policy beats LRU at every capacity. A bad choice if most
blocks are used once and room is scarce: it keeps a one-time block as long as any other; put an admission in front.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Container, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from kvstored.store.blocks import ResidencyView
from kvstored.store.blocks.rows import as_array
from kvstored.store.blocks.runs import NEIGHBOURS_MIN, span_of
from kvstored.store.policies.base import PolicySettings, Rows
from kvstored.store.policies.ordered import OUT, PARKED, QUEUED, OrderedPolicy
from kvstored.store.policies.rowqueue import TenantQueues

_HOT_SHARE = 0.25  # of a tier's worth of accesses


class Lru(OrderedPolicy):
    """The policy lru: it evicts the block used longest ago. An event takes constant time; memory is 13 bytes for each
    row.

    A block is hot if fewer accesses came since its last use than a quarter of the blocks in the tier, and warm if fewer
    than all of them."""

    def __init__(
        self, residency: ResidencyView, tier: int, settings: PolicySettings | None = None, name: str = ""
    ) -> None:
        super().__init__(residency, tier, settings, name)
        self.queues = TenantQueues()

    def accessed(self, rows: Sequence[int], now_ns: int) -> None:
        self.expect_accesses(len(rows))
        where, stamp = self.where, self.stamp
        accesses = self.accesses
        tenant_of = self.residency.tenant_of
        queue = self.queues.of[tenant_of(rows[0])]  # rows used together are one tenant's
        if len(rows) >= NEIGHBOURS_MIN and (span := span_of(rows)) is not None:
            is_queued = where[span].count(QUEUED) == len(rows)
            if is_queued and queue.neighbours_to_back(rows):
                self.accesses = accesses + len(rows)
                stamp[span] = array(stamp.typecode, range(self.accesses, accesses, -1))
                return
        befores, afters = self.queues.links.before, self.queues.links.after
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
        self.accesses = accesses

    def inserted(self, rows: Sequence[int], now_ns: int) -> None:
        tenant = self.know(rows)
        self.expect_accesses(len(rows))
        where, stamp, accesses = self.where, self.stamp, self.accesses
        queue = self.queues.of[tenant]
        befores, afters, back = self.queues.links.before, self.queues.links.after, queue.back
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
        self.accesses = accesses
        self.rows += len(rows)

    def removed(self, rows: Sequence[int]) -> None:
        queue = self.queues.of[0]
        where, afters = self.where, self.queues.links.after
        befores = self.queues.links.before
        if len(self.queues.of) > 1:
            queue = self.queues.of[self.residency.tenant_of(rows[0])]
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
        self.rows -= len(rows)

    def next_victims(self, now_ns: int, limit: int) -> list[int]:
        row = self.next_victim(now_ns)
        return self.run_from(row, limit) if row >= 0 else []

    def run_from(self, row: int, limit: int) -> list[int]:
        """Return up to `limit` rows that `next_victim`, which has just returned `row`, would return one after another,
        if each were evicted: `row` and blocks before it in its chain."""
        if len(self.queues.of) > 1 or self.shares:
            return [row]
        where, stamp, afters, returned = self.where, self.stamp, self.queues.links.after, self._returned[0]
        front, others = self.queues.of[0].front, returned[:1]
        if front == row:
            front = afters[row]
        elif returned:  # `row` is the first of them
            others = returned[1:3]
        else:
            return [row]
        rival = min(others)[0] if others else math.inf  # none of those that returned has a lower rank
        run = self.residency.run_above(row, self.tier, limit)
        for at in range(1, len(run)):
            row = run[at]
            rank = stamp[row]
            if rank > rival:
                return run[:at]
            if row == front:
                front = afters[row]
            elif where[row] != PARKED or (front >= 0 and stamp[front] < rank):
                return run[:at]
        return run

    def next_victim(self, now_ns: int, *, exclude: Container[int] = (), tenant: int | None = None) -> int:
        if not tenant and len(self.queues.of) == 1 and not self.shares and not self._returned[0]:
            row = self.queues.of[0].front  # of nearly every question the answer
            if row >= 0 and row not in exclude and self.may_name(row, self.tier):
                return row
        return super().next_victim(now_ns, exclude=exclude, tenant=tenant)

    def classes(self, rows: Rows, now_ns: int) -> npt.NDArray[np.int64]:
        age = np.uint64(self.accesses) - as_array(self.stamp)[rows].astype(np.uint64)
        return np.add(age < _HOT_SHARE * self.rows, age < self.rows, dtype=np.int64)

    # The order: a row goes to the back when its stamp is set, so the front has the smallest rank

    def _enqueue(self, row: int, tenant: int) -> None:
        self.queues.of[tenant].push_back(row)

    def _enqueue_all(self, rows: npt.NDArray[np.int64], tenant: int) -> None:
        self.queues.of[tenant].extend(rows)

    def _dequeue(self, row: int, tenant: int) -> None:
        self.queues.of[tenant].unlink(row)

    def _queue(self, tenant: int) -> Iterator[int]:
        return iter(self.queues.of[tenant])

    def _rank(self, row: int) -> int:
        return self.stamp[row]

    def add_tenant(self) -> None:
        super().add_tenant()
        self.queues.add()

    def _grow(self, rows: int) -> None:
        super()._grow(rows)
        self.queues.links.grow(rows)
