"""Policies over a few queues: FIFO's relatives, which move a block on use, when it is looked at, or never.

A block is in one of its tenant's queues, and a `Discipline` says which of all would be evicted first; it owns what it
remembers beyond the `Queues` that it shares with the policy. What cannot
be evicted is parked, as in `ordered`; freed, it goes to the front of its queue, for it was at the front when it was
parked. The storing of a block is no use of it: the access that comes at the same instant as the insertion is not
counted. A run of new blocks is queued from the tail to the head, so that leaves come first.

The papers make room before a block comes in; here it may have been stored already, and a whole run of them. So a new
block waits at the door until one inside has left, unless one had left before; or until it turns out that there was room
(the next request comes, or time has passed). A block at the door is evicted only when none inside may be.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Container, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from kvstored.store.blocks import ResidencyView
from kvstored.store.policies.base import PolicySettings, Rows
from kvstored.store.policies.ordered import OUT, PARKED, QUEUED, OrderedPolicy
from kvstored.store.policies.rowqueue import QueueArrays, RowQueue


class Queues:
    """The queues in which each tenant's rows wait for eviction. Queues with numbers from 0 hold rows that have been let
    in; new rows wait in one more queue, the door (number `inside`). `of` has the queues by tenant, and `sizes` the
    number of rows in each queue but the door, rows included that cannot be evicted now (parked). By row, `where` is the
    state as in `ordered`, `queue_of` the queue, and `uses` the uses since the row was stored or last looked at."""

    __slots__ = ("door", "links", "of", "queue_of", "residency", "sizes", "uses", "where")

    def __init__(self, residency: ResidencyView, where: bytearray, inside: int) -> None:
        self.residency = residency
        self.where = where
        self.door = inside
        self.links = QueueArrays()
        self.of: list[tuple[RowQueue, ...]] = []
        self.sizes: list[list[int]] = []
        self.queue_of = bytearray()
        self.uses = bytearray()

    def move(self, row: int, tenant: int, to: int) -> None:
        """Move `row` to the back of the queue number `to` of `tenant`. A parked row (one that could not be evicted) is
        queued again."""
        if self.where[row] == QUEUED:
            self.unlink(row, tenant)
        sizes, before = self.sizes[tenant], self.queue_of[row]
        if before != self.door:
            sizes[before] -= 1
        sizes[to] += 1
        self.queue_of[row] = to
        self.of[tenant][to].push_back(row)
        self.where[row] = QUEUED

    def unlink(self, row: int, tenant: int) -> None:
        self.of[tenant][self.queue_of[row]].unlink(row)

    def add_tenant(self) -> None:
        self.of.append(tuple(RowQueue(self.links) for _ in range(self.door + 1)))
        self.sizes.append([0] * self.door)

    def grow(self, rows: int) -> None:
        """Extend the columns to `rows` rows."""
        self.links.grow(rows)
        for column in (self.queue_of, self.uses):
            column.extend(bytes(rows - len(column)))


class Discipline(ABC):
    """A rule over a few queues of rows, which makes a policy such as S3-FIFO: it decides which queue a new block
    enters, what a use changes, and which block is evicted."""

    inside: int  # how many queues there are behind the door

    def __init__(self, queues: Queues) -> None:
        self.queues = queues

    def key(self, row: int) -> bytes:
        return self.queues.residency.key(row)

    def add_tenant(self) -> None:  # noqa: B027  # optional
        """Note that there is a new tenant, whose queues exist already."""

    @abstractmethod
    def candidate(self, tenant: int, refused: Collection[int]) -> int:
        """Return the row of `tenant` that would be evicted first, or -1. Rows in `refused`, and rows that wait at the
        door (the queue of new rows), are not returned. It may move rows that it spares to other queues."""

    def entrance(self, row: int, tenant: int) -> int:
        """Return the number of the queue that the new `row` enters."""
        return 0

    def used(self, row: int, tenant: int) -> None:  # noqa: B027  # optional
        """Note that `row`, which is in a queue or is parked (cannot be evicted now), was used again."""

    def arriving(self) -> None:  # noqa: B027  # optional
        """Note that blocks are about to be inserted into the tier."""

    def stored(self, rows: Sequence[int], held: int) -> None:  # noqa: B027  # optional
        """Note that the blocks `rows` were inserted into the tier, which has `held` rows now."""

    def leaving(self, row: int, tenant: int) -> None:  # noqa: B027  # optional
        """Note that `row` is leaving the tier. It is still in its queue."""

    def left(self, queue: int, tenant: int) -> None:  # noqa: B027  # optional
        """Note that a row of the queue number `queue` of `tenant` has left the tier, and that a row that waited at the
        door (the queue of new rows) has been let in."""


def first_of(queue: RowQueue, refused: Collection[int]) -> int:
    """Return the first row of `queue` that is not in `refused`, or -1."""
    if not refused:
        return queue.front
    for row in queue:
        if row not in refused:
            return row
    return -1


_USES_MAX = 255
_HOT_USES = 2


class QueuedPolicy(OrderedPolicy):
    """A policy that keeps each tenant's rows in the queues of a `discipline`. A new row waits at a "door" queue until
    another has left.
    """

    def __init__(
        self,
        residency: ResidencyView,
        tier: int,
        settings: PolicySettings | None,
        name: str,
        discipline: type[Discipline],
    ) -> None:
        super().__init__(residency, tier, settings, name)
        self.queues = Queues(residency, self.where, discipline.inside)
        self.discipline = discipline(self.queues)
        self._is_new = bytearray()
        self._stored_ns = -1
        self._stored_by = 0  # the tenant of the last rows stored: only its rows wait at the door
        self._room = 0  # rows that left while none waited

    # Events

    def inserted(self, rows: Sequence[int], now_ns: int) -> None:
        self.discipline.arriving()
        self._let_in()
        self._stored_by = tenant = self.know(rows)
        for row in reversed(rows):
            super().inserted((row,), now_ns)
            self.queues.uses[row] = 0
            self._is_new[row] = 1
            if self._room:
                self._room -= 1
                self._let_in_one(row, tenant)
        self._stored_ns = now_ns
        self.discipline.stored(rows, self.rows)

    def accessed(self, rows: Sequence[int], now_ns: int) -> None:
        self.expect_accesses(len(rows))
        queues, where, stamp, is_new = self.queues, self.where, self.stamp, self._is_new
        uses, used = queues.uses, self.discipline.used
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
            self.accesses += 1
            stamp[row] = self.accesses
            if uses[row] < _USES_MAX:
                uses[row] += 1
            if queues.queue_of[row] == queues.door:
                self._let_in_one(row, tenant)
            used(row, tenant)

    def removed(self, rows: Sequence[int]) -> None:
        for row in rows:
            self._removed(row, self.residency.tenant_of(row))

    def _removed(self, row: int, tenant: int) -> None:
        queues = self.queues
        queue = queues.queue_of[row]
        self.discipline.leaving(row, tenant)
        super().removed((row,))
        if queue != queues.door:
            queues.sizes[tenant][queue] -= 1
            waiting = queues.of[self._stored_by][queues.door].front
            if waiting >= 0:
                self._let_in_one(waiting, self._stored_by)
            else:
                self._room += 1
        self.discipline.left(queue, tenant)

    def released(self, row: int) -> None:
        if self.where[row] != PARKED:
            return
        queues, tenant = self.queues, self.residency.tenant_of(row)
        queue = queues.queue_of[row]
        if queue == queues.door:
            self._let_in_one(row, tenant)
        else:
            self.where[row] = QUEUED
            queues.of[tenant][queue].push_front(row)

    # Decisions

    def next_victim(self, now_ns: int, *, exclude: Container[int] = (), tenant: int | None = None) -> int:
        if now_ns > self._stored_ns:  # a question asked now is not about them
            self._let_in()
        return super().next_victim(now_ns, exclude=exclude, tenant=tenant)

    # Queues

    def _let_in(self) -> None:
        """Let in all waiting rows."""
        if self.queues.of:
            for row in self.queues.of[self._stored_by][self.queues.door]:
                self._let_in_one(row, self._stored_by)

    def _let_in_one(self, row: int, tenant: int) -> None:
        self.queues.move(row, tenant, self.discipline.entrance(row, tenant))

    def _enqueue(self, row: int, tenant: int) -> None:
        self.queues.queue_of[row] = self.queues.door
        self.queues.of[tenant][self.queues.door].push_back(row)

    def _enqueue_all(self, rows: npt.NDArray[np.int64], tenant: int) -> None:
        for row in rows.tolist():  # they were here before
            self._enqueue(row, tenant)
            self.where[row] = QUEUED
            self._let_in_one(row, tenant)

    def _dequeue(self, row: int, tenant: int) -> None:
        self.queues.unlink(row, tenant)

    def _queue(self, tenant: int) -> Iterator[int]:
        refused: set[int] = set()
        while (row := self.discipline.candidate(tenant, refused)) >= 0:
            yield row
            if self.where[row] == QUEUED:  # not parked, so the caller excludes it
                refused.add(row)
        yield from self.queues.of[tenant][self.queues.door]

    def _rank(self, row: int) -> int:
        """Return the rank between tenants: the row unused for longest is evicted."""
        return self.stamp[row]

    def add_tenant(self) -> None:
        super().add_tenant()
        self.queues.add_tenant()
        self.discipline.add_tenant()

    def _grow(self, rows: int) -> None:
        super()._grow(rows)
        self.queues.grow(rows)
        self._is_new.extend(bytes(rows - len(self._is_new)))

    def classes(self, rows: Rows, now_ns: int) -> npt.NDArray[np.int64]:
        uses = np.frombuffer(self.queues.uses, dtype=np.uint8)[rows]
        return np.add(uses >= _HOT_USES, uses > 0, dtype=np.int64)
