"""What every policy with a total order of rows shares: parking what cannot leave, and the precedence between
tenants.

A subclass keeps, for each tenant, the rows that are QUEUED in its own order. When the first of them cannot
leave (a lease, a child), it is PARKED: out of the queue, so that no later question stumbles over it.
When residency says it may be free, it is RETURNED: in a heap by rank, from which it competes with the queue
at the very place it had, since nobody used it in between. An access puts it back into the queue. Each parking
is paid for by the event that ends it, hence O(log n) amortised a question.
"""

from __future__ import annotations

from abc import abstractmethod
from array import array
from collections.abc import Container, Iterator, Sequence
from heapq import heappop, heappush

import numpy as np
import numpy.typing as npt

from kvstored.store.blocks import ResidencyView
from kvstored.store.blocks.rows import grown
from kvstored.store.policies.base import Policy, PolicySettings, ResidencyClass, Share

OUT, QUEUED, PARKED, RETURNED = range(4)
_NO_SHARE = Share()
_GROWTH_MIN_ROWS = 1024


class OrderedPolicy(Policy):
    """Subclasses keep the order (`_enqueue`, `_dequeue`, `_queue`, `_rank`) and set `_stamp` on every access."""

    def __init__(self, residency: ResidencyView, tier: int, settings: PolicySettings | None = None) -> None:
        super().__init__(residency, tier, settings)
        self._where = bytearray()  # OUT, QUEUED, PARKED, RETURNED
        self._stamp = array("Q")  # the access count of the tier when the row was last used: unique, so ranks are
        self._accesses = 0
        self._rows = 0
        self._returned: list[list[tuple[int, int]]] = []  # by tenant: heap of (rank, row)

    # The subclass's order

    @abstractmethod
    def _enqueue(self, row: int, tenant: int) -> None:
        """Put `row` where its rank belongs; no queued row of equal standing has been used later."""

    def _enqueue_all(self, rows: npt.NDArray[np.int64], tenant: int) -> None:
        """`_enqueue` for each of `rows`, in the order in which they should leave."""
        for row in rows.tolist():
            self._enqueue(row, tenant)

    @abstractmethod
    def _dequeue(self, row: int, tenant: int) -> None: ...

    @abstractmethod
    def _queue(self, tenant: int) -> Iterator[int]:
        """The tenant's queued rows by growing rank; the row just given may be dequeued."""

    @abstractmethod
    def _rank(self, row: int) -> int:
        """Unique among the tier's rows; the smallest leaves first."""

    def _standing(self, row: int) -> float:
        """Between the first rows of two tenants, nothing else told apart, the one of lower standing goes."""
        return self._rank(row)

    def _add_tenant(self) -> None:
        self._returned.append([])

    def _grow(self, rows: int) -> None:
        """Make room for `rows` rows."""
        more = rows - len(self._where)
        self._where.extend(bytes(more))
        self._stamp = grown(self._stamp, more)

    def _is_expired(self, row: int, now_ns: int) -> bool:
        return False

    # Events

    def inserted(self, row: int, now_ns: int) -> None:
        tenant = self._know((row,))
        self._accesses += 1
        self._stamp[row] = self._accesses
        self._enqueue(row, tenant)
        self._where[row] = QUEUED
        self._rows += 1

    def _know(self, rows: Sequence[int]) -> int:
        """Make room for `rows` of one tenant, which are about to come; the tenant."""
        last = max(rows)
        if last >= len(self._where):
            self._grow(max(last + 1, self.residency.rows.capacity, len(self._where) + _GROWTH_MIN_ROWS))
        tenant = self.residency.tenant_of(last)
        while tenant >= len(self._returned):
            self._add_tenant()
        return tenant

    def adopt(self, rows: npt.NDArray[np.int64]) -> None:
        by_tenant = [(0, rows)]
        if len(self.residency.tenants) > 1:
            tenants = self.residency.tenants_of(rows)
            by_tenant = [(tenant, rows[tenants == tenant]) for tenant in range(int(tenants.max()) + 1)]
        for _, ours in by_tenant:
            if len(ours):
                self._know((int(ours.max()), int(ours[-1])))
        first = self._accesses + 1
        np.frombuffer(self._stamp, np.uint64)[rows] = np.arange(first, first + len(rows), dtype=np.uint64)
        for tenant, ours in by_tenant:
            if len(ours):
                self._enqueue_all(ours, tenant)
        np.frombuffer(self._where, np.uint8)[together(rows)] = QUEUED
        self._accesses += len(rows)
        self._rows += len(rows)

    def removed(self, row: int) -> None:
        if self._where[row] == QUEUED:
            self._dequeue(row, self.residency.tenant_of(row))
        self._where[row] = OUT
        self._rows -= 1

    def released(self, row: int) -> None:
        if self._where[row] == PARKED:
            self._where[row] = RETURNED
            heappush(self._returned[self.residency.tenant_of(row)], (self._rank(row), row))

    def __len__(self) -> int:
        return self._rows

    # Decisions

    def next_victim(self, now_ns: int, *, exclude: Container[int] = (), tenant: int | None = None) -> int:
        if tenant is not None:
            return self._first(tenant, now_ns, exclude) if tenant < len(self._returned) else -1
        if len(self._returned) == 1 and not self.shares:
            return self._first(0, now_ns, exclude)
        chosen = -1
        smallest: tuple[bool, int, bool, float] | None = None
        for number in range(len(self._returned)):
            share = self.shares.get(number, _NO_SHARE)
            held_bytes = self.residency.tenant_bytes(number, self.tier)
            row = self._first(number, now_ns, exclude)
            if row < 0 or held_bytes - self.residency.copies[self.tier].nbytes[row] < share.min_bytes:
                continue
            within = share.max_bytes is None or held_bytes <= share.max_bytes
            order = (within, share.priority, not self._is_expired(row, now_ns), self._standing(row))
            if smallest is None or order < smallest:
                chosen, smallest = row, order
        return chosen

    def expired(self, now_ns: int, limit: int) -> list[int]:
        return []

    def _first(self, tenant: int, now_ns: int, exclude: Container[int]) -> int:
        """The tenant's row of smallest rank that may leave and is not excluded, or -1."""
        best = self._first_returned(tenant, exclude)
        best_rank = self._rank(best) if best >= 0 else 0
        may_leave, tier = self.residency.may_leave, self.tier
        for row in self._queue(tenant):
            if best >= 0 and self._rank(row) > best_rank:
                return best
            if may_leave(row, tier):
                if row not in exclude:
                    return row
            else:
                self._dequeue(row, tenant)
                self._where[row] = PARKED
        return best

    def _first_returned(self, tenant: int, exclude: Container[int]) -> int:
        heap = self._returned[tenant]
        skipped: list[tuple[int, int]] = []
        found = -1
        while heap:
            rank, row = heap[0]
            if self._where[row] != RETURNED or self._rank(row) != rank:
                heappop(heap)  # used, removed or replaced since
            elif not self.residency.may_leave(row, self.tier):
                heappop(heap)
                self._where[row] = PARKED
            elif row in exclude:
                skipped.append(heappop(heap))
            else:
                found = row
                break
        for entry in skipped:
            heappush(heap, entry)
        return found

    # Classes

    def class_counts(self, now_ns: int) -> dict[ResidencyClass, int]:
        here = np.frombuffer(self._where, dtype=np.uint8) != OUT
        hot, warm = self._class_masks(now_ns)
        n_hot = int(np.count_nonzero(here & hot))
        n_warm = int(np.count_nonzero(here & warm)) - n_hot
        return {
            ResidencyClass.HOT: n_hot,
            ResidencyClass.WARM: n_warm,
            ResidencyClass.COLD: self._rows - n_hot - n_warm,
        }

    def class_bytes(self, now_ns: int) -> dict[ResidencyClass, int]:
        here = np.frombuffer(self._where, dtype=np.uint8) != OUT
        hot, warm = self._class_masks(now_ns)
        sizes = np.frombuffer(self.residency.copies[self.tier].nbytes, np.uint32)
        known = min(len(here), len(sizes))  # rows beyond have no copy
        sizes, here, hot, warm = sizes[:known], here[:known], hot[:known], warm[:known]
        all_bytes, hot_bytes, warm_bytes = (int(sizes[here & rows].sum()) for rows in (here, hot, hot | warm))
        return {
            ResidencyClass.HOT: hot_bytes,
            ResidencyClass.WARM: warm_bytes - hot_bytes,
            ResidencyClass.COLD: all_bytes - warm_bytes,
        }

    @abstractmethod
    def _class_masks(self, now_ns: int) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
        """For every row number: is it hot; is it hot or warm. Rows that are OUT may have any value."""


def together(rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64] | slice:
    """What picks the same of a column as `rows` (each once, one at least), perhaps in another order: one slice where
    they lie side by side, as after a start. A million scattered ones are ten times as slow."""
    first, last = int(rows.min()), int(rows.max())
    return slice(first, last + 1) if last - first + 1 == len(rows) else rows
