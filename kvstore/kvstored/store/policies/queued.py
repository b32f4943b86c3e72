"""What policies over a few queues share: FIFO's relatives, which move a block on use, when it is looked at, or never.

A block is in one of its tenant's queues, and a subclass's `_candidate` says which of all would go first. What cannot
leave is parked, as `ordered` tells; freed, it goes to the front of its queue, for it was at the front when it was
parked. The storing of a block is no use of it: the access that comes at the same instant as the insertion is not
counted. A run of new blocks is queued from the tail to the head, so that leaves come first.

The papers make room before a block comes in; here it may have come already, and a whole run of them. So a new block
waits at the door until one inside has left, unless one had left before; or until it turns out that there was room (the
next request comes, or time has passed). From the door a block leaves only when none inside may.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Container, Iterator, Sequence
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from kvstored.store.blocks import ResidencyView
from kvstored.store.policies.base import PolicySettings, ResidencyClass
from kvstored.store.policies.ordered import OUT, PARKED, QUEUED, OrderedPolicy
from kvstored.store.policies.rowqueue import Links, RowQueue

_USES_MAX = 255
_HOT_USES = 2


class QueuedPolicy(OrderedPolicy):
    """Subclasses say where a new block goes (`_entrance`), what a use does (`_used`) and what leaves (`_candidate`).

    The door is queue number `queues`.
    """

    queues: ClassVar[int]

    def __init__(self, residency: ResidencyView, tier: int, settings: PolicySettings | None = None) -> None:
        super().__init__(residency, tier, settings)
        self._links = Links()
        self._queues: list[tuple[RowQueue, ...]] = []  # by tenant
        self._sizes: list[list[int]] = []  # by tenant: rows of each queue, parked ones too; without the door's
        self._queue_of = bytearray()
        self._uses = bytearray()  # since it was stored, or since the policy looked at it
        self._is_new = bytearray()
        self._stored_ns = -1
        self._stored_by = 0  # the tenant of who came last: nobody waits at another's door
        self._room = 0  # who left while nobody waited

    # The subclass's part

    @abstractmethod
    def _candidate(self, tenant: int, refused: Collection[int]) -> int:
        """What goes first among the tenant's queued rows inside that are not `refused`, or -1. May reorder what it
        spares.
        """

    def _entrance(self, row: int, tenant: int) -> int:
        """The queue of a new row that is let in."""
        return 0

    def _used(self, row: int, tenant: int) -> None:
        """`row`, queued or parked, was used again."""

    # Events

    def inserted(self, row: int, now_ns: int) -> None:
        self.inserted_run((row,), now_ns)

    def inserted_run(self, rows: Sequence[int], now_ns: int) -> None:
        self._let_in()
        self._stored_by = tenant = self._know(rows)
        for row in reversed(rows):
            super().inserted(row, now_ns)
            self._uses[row] = 0
            self._is_new[row] = 1
            if self._room:
                self._room -= 1
                self._let_in_one(row, tenant)
        self._stored_ns = now_ns

    def accessed(self, rows: Sequence[int], now_ns: int) -> None:
        where, stamp, uses, is_new = self._where, self._stamp, self._uses, self._is_new
        tenant = self.residency.tenant_of(rows[0])
        if not is_new[rows[-1]]:  # another request than the one that stored what waits
            self._let_in()
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
            if self._queue_of[row] == self.queues:
                self._let_in_one(row, tenant)
            self._used(row, tenant)

    def removed(self, row: int) -> None:
        tenant = self.residency.tenant_of(row)
        was_inside = self._queue_of[row] != self.queues
        super().removed(row)
        if was_inside:
            self._sizes[tenant][self._queue_of[row]] -= 1
            waiting = self._queues[self._stored_by][self.queues].front
            if waiting >= 0:
                self._let_in_one(waiting, self._stored_by)
            else:
                self._room += 1

    def released(self, row: int) -> None:
        if self._where[row] != PARKED:
            return
        tenant, queue = self.residency.tenant_of(row), self._queue_of[row]
        if queue == self.queues:
            self._let_in_one(row, tenant)
        else:
            self._where[row] = QUEUED
            self._queues[tenant][queue].push_front(row)

    # Decisions

    def next_victim(self, now_ns: int, *, exclude: Container[int] = (), tenant: int | None = None) -> int:
        if now_ns > self._stored_ns:  # whoever asks now does not ask for them
            self._let_in()
        return super().next_victim(now_ns, exclude=exclude, tenant=tenant)

    # Queues

    def _let_in(self) -> None:
        """All who wait."""
        if self._queues:
            for row in self._queues[self._stored_by][self.queues]:
                self._let_in_one(row, self._stored_by)

    def _let_in_one(self, row: int, tenant: int) -> None:
        self._move(row, tenant, self._entrance(row, tenant))

    def _move(self, row: int, tenant: int, to: int) -> None:
        """To the back of queue `to`, in line again if it was parked."""
        if self._where[row] == QUEUED:
            self._dequeue(row, tenant)
        sizes, before = self._sizes[tenant], self._queue_of[row]
        if before != self.queues:
            sizes[before] -= 1
        sizes[to] += 1
        self._queue_of[row] = to
        self._queues[tenant][to].push_back(row)
        self._where[row] = QUEUED

    def _enqueue(self, row: int, tenant: int) -> None:
        self._queue_of[row] = self.queues
        self._queues[tenant][self.queues].push_back(row)

    def _enqueue_all(self, rows: npt.NDArray[np.int64], tenant: int) -> None:
        for row in rows.tolist():  # they were here before
            self._enqueue(row, tenant)
            self._where[row] = QUEUED
            self._let_in_one(row, tenant)

    def _dequeue(self, row: int, tenant: int) -> None:
        self._queues[tenant][self._queue_of[row]].unlink(row)

    def _queue(self, tenant: int) -> Iterator[int]:
        refused: set[int] = set()
        while (row := self._candidate(tenant, refused)) >= 0:
            yield row
            if self._where[row] == QUEUED:  # not parked, so the one who asked excludes it
                refused.add(row)
        yield from self._queues[tenant][self.queues]

    def _rank(self, row: int) -> int:
        """Between tenants the longest unused goes."""
        return self._stamp[row]

    def _add_tenant(self) -> None:
        super()._add_tenant()
        self._queues.append(tuple(RowQueue(self._links) for _ in range(self.queues + 1)))
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
