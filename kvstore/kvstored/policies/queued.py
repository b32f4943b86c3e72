"""What policies over a few queues share: FIFO's relatives, which move a block on use, when it is looked at, or never.

A block is in one of its tenant's queues, and a subclass's `_candidate` says which of all would go first. What cannot
leave is parked, as `ordered` tells; freed, it goes to the front of its queue, for it was at the front when it was
parked. The storing of a block is no use of it: the access that comes at the same instant as the insertion is not
counted. A run of new blocks is queued from the tail to the head, so that leaves come first.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Iterator, Sequence
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from kvstored.policies.base import PolicySettings, ResidencyClass
from kvstored.policies.ordered import OUT, PARKED, QUEUED, OrderedPolicy
from kvstored.policies.rowqueue import Links, RowQueue
from kvstored.residency import ResidencyView

_USES_MAX = 255
_HOT_USES = 2


class QueuedPolicy(OrderedPolicy):
    """Subclasses say where a new block goes (`_entrance`), what a use does (`_used`) and what leaves (`_candidate`)."""

    queues: ClassVar[int]

    def __init__(self, residency: ResidencyView, tier: int, settings: PolicySettings | None = None) -> None:
        super().__init__(residency, tier, settings)
        self._links = Links()
        self._queues: list[tuple[RowQueue, ...]] = []  # by tenant
        self._sizes: list[list[int]] = []  # by tenant: rows of each queue, parked ones too
        self._queue_of = bytearray()
        self._uses = bytearray()  # since it was stored, or since the policy looked at it
        self._is_new = bytearray()
        self._stored_ns = -1

    # The subclass's part

    @abstractmethod
    def _candidate(self, tenant: int, refused: Collection[int]) -> int:
        """What goes first among the tenant's queued rows that are not `refused`, or -1. May reorder what it spares."""

    def _entrance(self, row: int, tenant: int) -> int:
        """The queue of a new row."""
        return 0

    def _used(self, row: int, tenant: int) -> None:
        """`row`, queued or parked, was used again."""

    # Events

    def inserted(self, row: int, now_ns: int) -> None:
        super().inserted(row, now_ns)
        self._uses[row] = 0
        self._is_new[row] = 1
        self._stored_ns = now_ns

    def inserted_run(self, rows: Sequence[int], now_ns: int) -> None:
        for row in reversed(rows):
            self.inserted(row, now_ns)

    def accessed(self, rows: Sequence[int], now_ns: int) -> None:
        where, stamp, uses, is_new = self._where, self._stamp, self._uses, self._is_new
        tenant = self.residency.tenant_of(rows[0])
        for row in reversed(rows):
            if where[row] == OUT:
                continue
            if is_new[row]:
                is_new[row] = 0
                if now_ns == self._stored_ns:
                    continue
            self._accesses += 1
            stamp[row] = self._accesses
            if uses[row] < _USES_MAX:
                uses[row] += 1
            self._used(row, tenant)

    def removed(self, row: int) -> None:
        self._sizes[self.residency.tenant_of(row)][self._queue_of[row]] -= 1
        super().removed(row)

    def released(self, row: int) -> None:
        if self._where[row] == PARKED:
            self._where[row] = QUEUED
            self._queues[self.residency.tenant_of(row)][self._queue_of[row]].push_front(row)

    # Queues

    def _move(self, row: int, tenant: int, to: int) -> None:
        """To the back of queue `to`, in line again if it was parked."""
        if self._where[row] == QUEUED:
            self._dequeue(row, tenant)
        sizes = self._sizes[tenant]
        sizes[self._queue_of[row]] -= 1
        sizes[to] += 1
        self._queue_of[row] = to
        self._queues[tenant][to].push_back(row)
        self._where[row] = QUEUED

    def _enqueue(self, row: int, tenant: int) -> None:
        self._queue_of[row] = to = self._entrance(row, tenant)
        self._sizes[tenant][to] += 1
        self._queues[tenant][to].push_back(row)

    def _dequeue(self, row: int, tenant: int) -> None:
        self._queues[tenant][self._queue_of[row]].unlink(row)

    def _queue(self, tenant: int) -> Iterator[int]:
        refused: set[int] = set()
        while (row := self._candidate(tenant, refused)) >= 0:
            yield row
            if self._where[row] == QUEUED:  # not parked, so the one who asked excludes it
                refused.add(row)

    def _rank(self, row: int) -> int:
        """Between tenants the longest unused goes."""
        return self._stamp[row]

    def _add_tenant(self) -> None:
        super()._add_tenant()
        self._queues.append(tuple(RowQueue(self._links) for _ in range(self.queues)))
        self._sizes.append([0] * self.queues)

    def _grow(self, rows: int) -> None:
        super()._grow(rows)
        self._links.grow(rows)
        for column in (self._queue_of, self._uses, self._is_new):
            column.extend(bytes(rows - len(column)))

    # Classes

    def residency_class(self, row: int, now_ns: int) -> ResidencyClass:
        if self._uses[row] >= _HOT_USES:
            return ResidencyClass.HOT
        return ResidencyClass.WARM if self._uses[row] else ResidencyClass.COLD

    def _class_masks(self, now_ns: int) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
        uses = np.frombuffer(self._uses, dtype=np.uint8)
        return uses >= _HOT_USES, uses > 0


def first_of(queue: RowQueue, refused: Collection[int]) -> int:
    """The first of `queue` that is not `refused`, or -1."""
    if not refused:
        return queue.front
    for row in queue:
        if row not in refused:
            return row
    return -1
