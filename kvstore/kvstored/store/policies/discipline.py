"""What distinguishes FIFO's relatives: where a new block goes, what a use does, and which block is evicted first.

`queued` keeps the rows and asks a discipline; the two share `Queues`. A discipline owns what it remembers beyond them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence

from kvstored.store.blocks import ResidencyView
from kvstored.store.policies.ordered import QUEUED
from kvstored.store.policies.rowqueue import Links, RowQueue


class Queues:
    """Each tenant's `inside` queues, numbered from 0, and the door, which is queue number `inside`.

    `where`: the policy's state of each row, as in `ordered`. `of`: queues by tenant. `sizes`: by tenant, the rows of
    each queue but the door, parked ones too. `queue_of`, `uses`: by row; uses since it was stored, or since the
    discipline looked at it.
    """

    __slots__ = ("door", "links", "of", "queue_of", "residency", "sizes", "uses", "where")

    def __init__(self, residency: ResidencyView, where: bytearray, inside: int) -> None:
        self.residency = residency
        self.where = where
        self.door = inside
        self.links = Links()
        self.of: list[tuple[RowQueue, ...]] = []
        self.sizes: list[list[int]] = []
        self.queue_of = bytearray()
        self.uses = bytearray()

    def move(self, row: int, tenant: int, to: int) -> None:
        """To the back of queue `to`, in line again if it was parked."""
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
        """Make room for `rows` rows."""
        self.links.grow(rows)
        for column in (self.queue_of, self.uses):
            column.extend(bytes(rows - len(column)))


class Discipline(ABC):
    """The part of a policy over a few queues that is its own."""

    inside: int  # how many queues there are behind the door

    def __init__(self, queues: Queues) -> None:
        self.queues = queues

    def key(self, row: int) -> bytes:
        return self.queues.residency.key(row)

    def add_tenant(self) -> None:  # noqa: B027  # optional
        """One more tenant; its queues are there already."""

    @abstractmethod
    def candidate(self, tenant: int, refused: Collection[int]) -> int:
        """What is evicted first among the tenant's queued rows inside that are not `refused`, or -1. May reorder what
        it spares.
        """

    def entrance(self, row: int, tenant: int) -> int:
        """The queue of a new row that is let in."""
        return 0

    def used(self, row: int, tenant: int) -> None:  # noqa: B027  # optional
        """`row`, queued or parked, was used again."""

    def arriving(self) -> None:  # noqa: B027  # optional
        """A run of blocks is about to be inserted."""

    def stored(self, rows: Sequence[int], held: int) -> None:  # noqa: B027  # optional
        """`rows` were inserted; `held` rows are in the tier now."""

    def leaving(self, row: int, tenant: int) -> None:  # noqa: B027  # optional
        """`row` leaves the tier; it is in its queue still."""

    def left(self, queue: int, tenant: int) -> None:  # noqa: B027  # optional
        """A row of the tenant's `queue` has left, and the row that waited at the door was let in."""


def first_of(queue: RowQueue, refused: Collection[int]) -> int:
    """The first of `queue` that is not `refused`, or -1."""
    if not refused:
        return queue.front
    for row in queue:
        if row not in refused:
            return row
    return -1
