"""Policies with a total order of rows: parking rows that cannot be evicted, classes, and the precedence of tenants'
shares over the order of their blocks.

A subclass keeps, for each tenant, the rows that are QUEUED in its own order. If the first of them cannot leave (a
lease, a child), it is PARKED: out of the queue, so that no later question stumbles over it. When residency says it may
be free, it is RETURNED: in a heap by rank, from which it competes with the queue at its old place, since it was not
used in between. An access puts it back into the queue. Each parking is paid for by the event that ends it, hence O(log
n) amortised a question.
"""

from __future__ import annotations

from abc import abstractmethod
from array import array
from collections.abc import Callable, Container, Iterator, Sequence
from heapq import heappop, heappush

import numpy as np
import numpy.typing as npt

from kvstore_cuda.host_copies import address_of, native
from kvstored.store.blocks import ResidencyView
from kvstored.store.blocks.rows import add_zeros, as_array, grown
from kvstored.store.policies.base import NO_SHARE, EvictionPolicy, PolicySettings


def choose_tenant(
    policy: EvictionPolicy,
    tenants: int,
    *,
    first: Callable[[int], int],
    standing: Callable[[int], float],
) -> int:
    """Choose the tenant, among `tenants` tenant numbers, whose block leaves the policy's tier next. Return the row of
    that block, or -1 if none may leave.

    `first(tenant)` returns the tenant's row that would be evicted first, or -1. Blocks of tenants over their maximum go
    first; between equals, the row with the lower `standing(row)`. A tenant at its guaranteed minimum loses none."""
    residency, tier = policy.residency, policy.tier
    chosen = -1
    smallest: tuple[bool, float] | None = None
    for number in range(tenants):
        share = policy.shares.get(number, NO_SHARE)
        held_bytes = residency.tenant_bytes(number, tier)
        row = first(number)
        if row < 0 or held_bytes - residency.copies[tier].nbytes[row] < share.min_bytes:
            continue
        order = (not policy.is_over_maximum(number, share), standing(row))
        if smallest is None or order < smallest:
            chosen, smallest = row, order
    return chosen


OUT, QUEUED, PARKED, RETURNED = range(4)
_GROWTH_MIN_ROWS = 1024
_NARROW = 2**32 - 1


class OrderedPolicy(EvictionPolicy):
    """A policy that keeps all blocks of a tier in one order for each tenant. Subclasses keep the order (`_enqueue`,
    `_dequeue`, `_queue`, `_rank`) and set `stamp` on every access.

    `where` is OUT, QUEUED, PARKED or RETURNED, by row. `stamp` is the value of `accesses` when the row was last used,
    by row, and unique. `accesses` counts the tier's accesses so far, `rows` its blocks.
    """

    def __init__(
        self, residency: ResidencyView, tier: int, settings: PolicySettings | None = None, name: str = ""
    ) -> None:
        super().__init__(residency, tier, settings, name)
        self.may_name = residency.policy_may_name
        self.where = bytearray()
        self.stamp = array("I")  # "Q" from access number 2^32 on
        self.accesses = 0
        self.rows = 0
        self._returned: list[list[tuple[int, int]]] = []  # by tenant: heap of (rank, row)

    # The subclass's order

    @abstractmethod
    def _enqueue(self, row: int, tenant: int) -> None:
        """Put `row` where its rank belongs; no queued row of equal standing has been used later."""

    def _enqueue_all(self, rows: npt.NDArray[np.int64], tenant: int) -> None:
        """`_enqueue` for each of `rows`, in the order in which they should be evicted."""
        for row in rows.tolist():
            self._enqueue(row, tenant)

    @abstractmethod
    def _dequeue(self, row: int, tenant: int) -> None: ...

    @abstractmethod
    def _queue(self, tenant: int) -> Iterator[int]:
        """Yield the tenant's queued rows by growing rank; the row just yielded may be dequeued."""

    @abstractmethod
    def _rank(self, row: int) -> int:
        """Return the rank, unique among the tier's rows; the smallest is evicted first."""

    def add_tenant(self) -> None:
        self._returned.append([])

    def _grow(self, rows: int) -> None:
        """Make room for `rows` rows."""
        more = rows - len(self.where)
        add_zeros(self.where, more)
        self.stamp = grown(self.stamp, more)

    def expect_accesses(self, count: int) -> None:
        """Make `stamp` wide enough for `count` more accesses. Call it before they are counted."""
        if self.accesses + count > _NARROW and self.stamp.itemsize == 4:
            self.stamp = array("Q", self.stamp)

    # Events

    def inserted(self, rows: Sequence[int], now_ns: int) -> None:
        tenant = self.know(rows)
        self.expect_accesses(len(rows))
        for row in rows:
            self.accesses += 1
            self.stamp[row] = self.accesses
            self._enqueue(row, tenant)
            self.where[row] = QUEUED
        self.rows += len(rows)

    def know(self, rows: Sequence[int]) -> int:
        """Extend the columns for `rows`, new blocks of one tenant. Return the tenant's number."""
        last = max(rows)
        if last >= len(self.where):
            self._grow(max(last + 1, self.residency.rows.capacity, len(self.where) + _GROWTH_MIN_ROWS))
        tenant = self.residency.tenant_of(last)
        while tenant >= len(self._returned):
            self.add_tenant()
        return tenant

    def adopt(self, rows: npt.NDArray[np.int64]) -> None:
        by_tenant = [(0, rows)]
        if len(self.residency.tenants) > 1:
            tenants = self.residency.tenants_of(rows)
            by_tenant = [(tenant, rows[tenants == tenant]) for tenant in range(int(tenants.max()) + 1)]
        for _, ours in by_tenant:
            if len(ours):
                self.know((int(ours.max()), int(ours[-1])))
        first = self.accesses + 1
        self.expect_accesses(len(rows))
        stamp, library = as_array(self.stamp), native.library
        if library is not None and stamp.itemsize == 4:
            rows = np.ascontiguousarray(rows, np.int64)
            library.kv_number_rows(len(rows), address_of(rows), first, address_of(stamp))
        else:
            stamp[rows] = np.arange(first, first + len(rows), dtype=stamp.dtype)
        for tenant, ours in by_tenant:
            if len(ours):
                self._enqueue_all(ours, tenant)
        np.frombuffer(self.where, np.uint8)[together(rows)] = QUEUED
        self.accesses += len(rows)
        self.rows += len(rows)

    def removed(self, rows: Sequence[int]) -> None:
        tenant = self.residency.tenant_of(rows[0])
        for row in rows:
            if self.where[row] == QUEUED:
                self._dequeue(row, tenant)
            self.where[row] = OUT
        self.rows -= len(rows)

    def released(self, row: int) -> None:
        if self.where[row] == PARKED:
            self.where[row] = RETURNED
            heappush(self._returned[self.residency.tenant_of(row)], (self._rank(row), row))

    def __len__(self) -> int:
        return self.rows

    # Decisions

    def next_victim(self, now_ns: int, *, exclude: Container[int] = (), tenant: int | None = None) -> int:
        if tenant is not None:
            return self.first(tenant, now_ns, exclude) if tenant < len(self._returned) else -1
        if len(self._returned) == 1 and not self.shares:
            return self.first(0, now_ns, exclude)
        return choose_tenant(
            self,
            len(self._returned),
            first=lambda number: self.first(number, now_ns, exclude),
            standing=self._rank,
        )

    def first(self, tenant: int, now_ns: int, exclude: Container[int]) -> int:
        """Return the row of `tenant` that would be evicted first, or -1. It may be evicted, and is not in `exclude`."""
        best = self._first_returned(tenant, exclude)
        best_rank = self._rank(best) if best >= 0 else 0
        may_name, tier = self.may_name, self.tier
        kids, kinds, windows = self.residency.copies[tier].kids, self.residency.rows.kind, self.residency.kind_window
        for row in self._queue(tenant):
            if best >= 0 and self._rank(row) > best_rank:
                return best
            if (not kids[row] or windows[kinds[row]]) and may_name(row, tier):  # a child holds most, without a call
                if row not in exclude:
                    return row
            else:
                self._dequeue(row, tenant)
                self.where[row] = PARKED
        return best

    def _first_returned(self, tenant: int, exclude: Container[int]) -> int:
        heap = self._returned[tenant]
        skipped: list[tuple[int, int]] = []
        found = -1
        while heap:
            rank, row = heap[0]
            if self.where[row] != RETURNED or self._rank(row) != rank:
                heappop(heap)  # used, removed or replaced since
            elif not self.may_name(row, self.tier):
                heappop(heap)
                self.where[row] = PARKED
            elif row in exclude:
                skipped.append(heappop(heap))
            else:
                found = row
                break
        for entry in skipped:
            heappush(heap, entry)
        return found

    def here(self) -> npt.NDArray[np.bool_]:
        """Return an array of bools: entry i is True if the block at row i is in the tier."""
        found: npt.NDArray[np.bool_] = np.frombuffer(self.where, dtype=np.uint8) != OUT
        return found


def together(rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64] | slice:
    """Return an index that picks `rows` (distinct, at least one) from a column, perhaps in another order: one slice if
    they are consecutive, otherwise `rows`. A slice is ten times as fast for a million rows.
    """
    first, last = int(rows.min()), int(rows.max())
    return slice(first, last + 1) if last - first + 1 == len(rows) else rows
