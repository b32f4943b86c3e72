"""First in, first out, leaf-first: a use changes nothing.

The yardstick that shows what recency is worth. It needs no work at all on a hit, which is why caches with many threads
like it. A bad choice nearly everywhere here: a system prompt that everybody shares leaves as soon as a private chat of
the same age, but for its children, which hold it (Yang, Zhang, Qiu, Yue, Rashmi: "FIFO queues are all you need for
cache eviction", SOSP 2023, tells when FIFO with a little more is enough: see `s3fifo`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from kvstored.store.policies.base import ResidencyClass
from kvstored.store.policies.one_queue import OneQueuePolicy


class Fifo(OneQueuePolicy):
    """O(1) an event, nothing at all for a use. Classes go by age: hot is the newest quarter, cold the older half."""

    name: ClassVar[str] = "fifo"

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
