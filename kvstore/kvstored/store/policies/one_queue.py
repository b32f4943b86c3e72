"""What LRU and FIFO share: one queue a tenant, in the order of the rows' stamps.

Owns the queues. A subclass says what a use does to them, and what is hot. Invariant: a row goes to the back when its
stamp is set, so the front has the smallest rank.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from kvstored.store.blocks import ResidencyView
from kvstored.store.policies.base import PolicySettings
from kvstored.store.policies.ordered import OrderedPolicy
from kvstored.store.policies.rowqueue import Links, RowQueue


class OneQueuePolicy(OrderedPolicy):
    """O(1) an event; 16 bytes a row."""

    def __init__(self, residency: ResidencyView, tier: int, settings: PolicySettings | None = None) -> None:
        super().__init__(residency, tier, settings)
        self._links = Links()
        self._queues: list[RowQueue] = []  # by tenant

    def _enqueue(self, row: int, tenant: int) -> None:
        self._queues[tenant].push_back(row)

    def _enqueue_all(self, rows: npt.NDArray[np.int64], tenant: int) -> None:
        self._queues[tenant].extend(rows)

    def _dequeue(self, row: int, tenant: int) -> None:
        self._queues[tenant].unlink(row)

    def _queue(self, tenant: int) -> Iterator[int]:
        return iter(self._queues[tenant])

    def _rank(self, row: int) -> int:
        return self._stamp[row]

    def _add_tenant(self) -> None:
        super()._add_tenant()
        self._queues.append(RowQueue(self._links))

    def _grow(self, rows: int) -> None:
        super()._grow(rows)
        self._links.grow(rows)
