"""First in, first out, leaf-first: a use changes nothing.

The yardstick that shows what recency is worth. It needs no work at all on a hit, which is why caches with many threads
like it. A bad choice nearly everywhere here: a system prompt that everybody shares leaves as soon as a private chat of
the same age, but for its children, which hold it (Yang, Zhang, Qiu, Yue, Rashmi: "FIFO queues are all you need for
cache eviction", SOSP 2023, tells when FIFO with a little more is enough: see `s3fifo`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from kvstored.store.blocks import ResidencyView
from kvstored.store.policies.base import PolicySettings, ResidencyClass
from kvstored.store.policies.classes import Masks
from kvstored.store.policies.ordered import OrderedPolicy
from kvstored.store.policies.rowqueue import TenantQueues


class Fifo(OrderedPolicy):
    """O(1) an event, nothing at all for a use. Classes go by age: hot is the newest quarter, cold the older half."""

    name = "fifo"

    def __init__(self, residency: ResidencyView, tier: int, settings: PolicySettings | None = None) -> None:
        super().__init__(residency, tier, settings)
        self.queues = TenantQueues()

    def inserted_run(self, rows: Sequence[int], now_ns: int) -> None:
        for row in reversed(rows):  # stored together: the tail first, as it must leave first
            self.inserted(row, now_ns)

    def accessed(self, rows: Sequence[int], now_ns: int) -> None:
        pass

    def residency_class(self, row: int, now_ns: int) -> ResidencyClass:
        age = self.accesses - self.stamp[row]
        if age * 4 < self.rows:
            return ResidencyClass.HOT
        return ResidencyClass.WARM if age * 2 < self.rows else ResidencyClass.COLD

    def class_masks(self, now_ns: int) -> Masks:
        age = np.uint64(self.accesses) - np.frombuffer(self.stamp, dtype=np.uint64)
        return age * np.uint64(4) < self.rows, age * np.uint64(2) < self.rows

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
