"""Greedy dual, size and frequency: blocks that are expensive to compute again are kept longer; leaf-first.

Cherkasova: "Improving WWW proxies performance with greedy-dual-size-frequency caching policy", HP Labs 1998. The rank
is K = age + uses * cost / size, `age` the K of the last victim. A larger model has larger blocks and computes them at a
higher cost, by about one factor, so cost / size depends on the position alone: attention looks back at everything
before a block. A block 64 places down its chain is taken to cost twice as much as the first one. A bad choice for
agents and long chats: the blocks of a long session that ended outrank the short ones that continue. If all blocks cost
alike, the policy is LFU.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from heapq import heapify, heappop, heappush

import numpy as np
import numpy.typing as npt

from kvstored.store.blocks import ResidencyView
from kvstored.store.policies.base import PolicySettings, Rows
from kvstored.store.policies.lfu_ttl import LfuTtl
from kvstored.store.policies.ordered import OUT, QUEUED, OrderedPolicy

_DEPTH_OF_TWICE = 64  # costs are in parts of the first block's: so many
_USES_MAX = 64
_HOT_LEAD = 4 * _DEPTH_OF_TWICE
_STAMP_BITS = 64
_SLACK_ENTRIES = 1024


class Gdsf(OrderedPolicy):
    """The GDSF policy (greedy dual, size and frequency): it keeps blocks longer that are expensive to compute again. An
    event costs O(log n); memory is 16 bytes a row and up to two entries of a heap.
    """

    def __init__(
        self, residency: ResidencyView, tier: int, settings: PolicySettings | None = None, name: str = ""
    ) -> None:
        super().__init__(residency, tier, settings, name)
        self._age = 0
        self._key = array("Q")  # K of each row
        self._heaps: list[list[tuple[int, int]]] = []  # by tenant: (rank, row); outdated entries until they are met
        self._queued: list[int] = []  # by tenant

    def accessed(self, rows: Sequence[int], now_ns: int) -> None:
        self.expect_accesses(len(rows))
        tenant = self.residency.tenant_of(rows[0])
        for row in reversed(rows):
            if self.where[row] == OUT:
                continue
            self.accesses += 1
            self.stamp[row] = self.accesses
            if self.where[row] == QUEUED:
                self._dequeue(row, tenant)
            self._enqueue(row, tenant)
            self.where[row] = QUEUED

    def next_victim(self, now_ns: int, **question: object) -> int:
        row = super().next_victim(now_ns, **question)  # type: ignore[arg-type]
        if row >= 0:
            self._age = max(self._age, self._key[row])
        return row

    # The order

    def _enqueue(self, row: int, tenant: int) -> None:
        columns = self.residency.rows
        cost = _DEPTH_OF_TWICE + columns.depth[row]
        self._key[row] = self._age + min(columns.accesses[row], _USES_MAX) * cost
        heap = self._heaps[tenant]
        heappush(heap, (self._rank(row), row))
        self._queued[tenant] += 1
        if len(heap) > 2 * self._queued[tenant] + _SLACK_ENTRIES:
            self._heaps[tenant] = [entry for entry in heap if self._is_valid(entry)]
            heapify(self._heaps[tenant])

    def _dequeue(self, row: int, tenant: int) -> None:
        self._queued[tenant] -= 1

    def _queue(self, tenant: int) -> Iterator[int]:
        passed: list[tuple[int, int]] = []
        try:
            while heap := self._heaps[tenant]:
                entry = heap[0]
                if not self._is_valid(entry):
                    heappop(heap)
                    continue
                yield entry[1]
                if heap and heap[0] == entry:
                    heappop(heap)
                    passed.append(entry)
        finally:
            for entry in passed:
                if self._is_valid(entry):
                    heappush(self._heaps[tenant], entry)

    def _is_valid(self, entry: tuple[int, int]) -> bool:
        rank, row = entry
        return self.where[row] == QUEUED and self._rank(row) == rank

    def _rank(self, row: int) -> int:
        return self._key[row] << _STAMP_BITS | self.stamp[row]

    def add_tenant(self) -> None:
        super().add_tenant()
        self._heaps.append([])
        self._queued.append(0)

    def _grow(self, rows: int) -> None:
        super()._grow(rows)
        self._key.frombytes(bytes(8 * (rows - len(self._key))))

    def classes(self, rows: Rows, now_ns: int) -> npt.NDArray[np.int64]:
        keys = np.frombuffer(self._key, dtype=np.uint64)[rows]
        return np.add(keys >= self._age + _HOT_LEAD, keys > self._age + 2 * _DEPTH_OF_TWICE, dtype=np.int64)


def lfu(residency: ResidencyView, tier: int, settings: PolicySettings | None = None, name: str = "") -> LfuTtl:
    """Return the policy LFU with ageing, which the daemon calls lfu-ttl, for tier number `tier` of `residency`."""
    return LfuTtl(residency, tier, settings, name)
