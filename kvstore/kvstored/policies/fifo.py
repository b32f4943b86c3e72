"""First in, first out, leaf-first: a use changes nothing.

The yardstick that shows what recency is worth. It needs no work at all on a hit, which is why caches with many threads
like it. A bad choice nearly everywhere here: a system prompt that everybody shares leaves as soon as a private chat of
the same age, but for its children, which hold it (Yang, Zhang, Qiu, Yue, Rashmi: "FIFO queues are all you need for
cache eviction", SOSP 2023, tells when FIFO with a little more is enough: see `s3fifo`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from kvstored.policies.base import PolicySettings, ResidencyClass
from kvstored.policies.ordered import OrderedPolicy
from kvstored.policies.rowqueue import Links, RowQueue
from kvstored.residency import ResidencyView


class Fifo(OrderedPolicy):
    """O(1) an event, nothing at all for a use. Classes go by age: hot is the newest quarter, cold the older half."""

    name: ClassVar[str] = "fifo"

    def __init__(self, residency: ResidencyView, tier: int, settings: PolicySettings | None = None) -> None:
        super().__init__(residency, tier, settings)
        self._links = Links()
        self._queues: list[RowQueue] = []

    def inserted_run(self, rows: Sequence[int], now_ns: int) -> None:
        for row in reversed(rows):  # stored together: the tail first, as it must leave first
            self.inserted(row, now_ns)

    def accessed(self, rows: Sequence[int], now_ns: int) -> None:
        pass

    def residency_class(self, row: int, now_ns: int) -> ResidencyClass:
        age = self._accesses - self._stamp[row]
        if age * 4 < self._rows:
            return ResidencyClass.HOT
        return ResidencyClass.WARM if age * 2 < self._rows else ResidencyClass.COLD

    def _class_masks(self, now_ns: int) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
        age = np.uint64(self._accesses) - np.frombuffer(self._stamp, dtype=np.uint64)
        return age * np.uint64(4) < self._rows, age * np.uint64(2) < self._rows

    def _enqueue(self, row: int, tenant: int) -> None:
        self._queues[tenant].push_back(row)

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
