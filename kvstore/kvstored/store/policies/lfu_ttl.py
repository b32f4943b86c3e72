"""Least frequently used with dynamic ageing; leaf-first.

The rank is LFU-DA's key K = age + uses (Arlitt, Cherkasova, Dilley, Friedrich, Jin: "Evaluating content
management techniques for web proxy caches", 2000): `age` is the K of the last victim, so that what was
popular once gives way when a cache's worth of others has passed. Uses are capped: one block outlives at most
that many generations of one-time blocks (TinyLFU's counters are capped for the same reason). Blocks of equal
K are evicted in the order of last use, tail first.

A bad choice for sessions: a long chat's new blocks have been used once and are evicted before the stale blocks of a
session that ended; on agent traces plain frequency is far below LRU. A good one for many shared prompts and one-time
requests.
"""

from __future__ import annotations

from array import array
from collections.abc import Container, Iterator, Sequence
from heapq import heapify, heappop, heappush

import numpy as np
import numpy.typing as npt

from kvstored.store.blocks import ResidencyView
from kvstored.store.blocks.rows import grown
from kvstored.store.policies.base import PolicySettings, Rows
from kvstored.store.policies.ordered import OUT, QUEUED, OrderedPolicy, together
from kvstored.store.policies.rowqueue import QueueArrays, RowQueue

_USES_MAX = 64
_HOT_LEAD = 4  # generations ahead of the last victim
_STAMP_BITS = 64


class _Buckets:
    """One tenant's queued rows: a queue for each K, and a heap of the Ks in use."""

    __slots__ = ("_links", "by_key", "keys")

    def __init__(self, links: QueueArrays) -> None:
        self._links = links
        self.by_key: dict[int, RowQueue] = {}
        self.keys: list[int] = []

    def push_back(self, row: int, key: int) -> None:
        queue = self.by_key.get(key)
        if queue is None:
            queue = self._add(key)
        queue.push_back(row)

    def extend(self, rows: npt.NDArray[np.int64], key: int) -> None:
        """`push_back` for each of `rows`."""
        (self.by_key.get(key) or self._add(key)).extend(rows)

    def _add(self, key: int) -> RowQueue:
        if key not in self.by_key:
            self.by_key[key] = RowQueue(self._links)
            heappush(self.keys, key)
        return self.by_key[key]

    def unlink(self, row: int, key: int) -> None:
        self.by_key[key].unlink(row)

    def __iter__(self) -> Iterator[int]:
        """Iterate by growing K, then age. Empty queues are dropped as they are met at the front."""
        while self.keys and not self.by_key[self.keys[0]]:
            del self.by_key[heappop(self.keys)]
        if not self.keys:
            return
        yield from self.by_key[self.keys[0]]
        if len(self.keys) > 1:  # only when every row of the first bucket was refused
            for key in sorted(self.keys)[1:]:
                yield from self.by_key[key]

    def compact(self) -> None:
        """Drop every empty queue."""
        self.by_key = {key: queue for key, queue in self.by_key.items() if queue}
        self.keys = list(self.by_key)
        heapify(self.keys)


class LfuTtl(OrderedPolicy):
    """The policy lfu-ttl: it evicts the block used least often, with ageing. An access takes constant time; memory is
    17 bytes for each row.
    """

    def __init__(
        self, residency: ResidencyView, tier: int, settings: PolicySettings | None = None, name: str = ""
    ) -> None:
        super().__init__(residency, tier, settings, name)
        self._age = 0
        self._key = array("I")  # K of each row, which a turnover of the whole tier raises by at most _USES_MAX
        self._links = QueueArrays()
        self._buckets: list[_Buckets] = []

    # Events

    def accessed(self, rows: Sequence[int], now_ns: int) -> None:
        self.expect_accesses(len(rows))
        where, stamp, keys, uses = self.where, self.stamp, self._key, self.residency.rows.accesses
        age = self._age
        tenant = self.residency.tenant_of(rows[0])
        buckets = self._buckets[tenant]
        for row in reversed(rows):
            state = where[row]
            if state == OUT:
                continue
            self.accesses += 1
            stamp[row] = self.accesses
            if state == QUEUED:
                buckets.unlink(row, keys[row])
            keys[row] = key = age + min(uses[row], _USES_MAX)
            buckets.push_back(row, key)
            where[row] = QUEUED
        if len(buckets.keys) > 2 * _USES_MAX + 2:
            buckets.compact()

    # Decisions

    def next_victim(self, now_ns: int, *, exclude: Container[int] = (), tenant: int | None = None) -> int:
        row = super().next_victim(now_ns, exclude=exclude, tenant=tenant)
        if row >= 0:
            self._age = max(self._age, self._key[row])
        return row

    def next_victims(self, now_ns: int, limit: int) -> list[int]:
        run = super().next_victims(now_ns, limit)
        if limit > 1 and run and len(self._buckets) == 1 and not self.shares:
            other = self.first(0, now_ns, run)
            run = self.residency.run_above(run[0], self.tier, limit)
            for at in range(1, len(run)):
                if other >= 0 and self._rank(run[at]) > self._rank(other):
                    run = run[:at]
                    break
                self._age = max(self._age, self._key[run[at]])
        return run

    # Classes

    def classes(self, rows: Rows, now_ns: int) -> npt.NDArray[np.int64]:
        keys = np.frombuffer(self._key, dtype=np.uint32)[rows]
        return np.add(keys >= self._age + _HOT_LEAD, keys > self._age + 1, dtype=np.int64)

    # The order

    def _enqueue(self, row: int, tenant: int) -> None:
        self._key[row] = key = self._age + min(self.residency.rows.accesses[row], _USES_MAX)
        self._buckets[tenant].push_back(row, key)

    def _enqueue_all(self, rows: npt.NDArray[np.int64], tenant: int) -> None:
        here, keys = together(rows), np.frombuffer(self._key, np.uint32)
        accesses = np.frombuffer(self.residency.rows.accesses, np.uint16)
        uses = np.minimum(accesses[here], np.uint16(_USES_MAX))
        keys[here] = uses + np.uint32(self._age)
        blocks = np.bincount(uses)
        for use in np.flatnonzero(blocks).tolist():
            ours = rows if blocks[use] == len(rows) else rows[keys[rows] == self._age + use]
            self._buckets[tenant].extend(ours, self._age + use)

    def _dequeue(self, row: int, tenant: int) -> None:
        self._buckets[tenant].unlink(row, self._key[row])

    def _queue(self, tenant: int) -> Iterator[int]:
        return iter(self._buckets[tenant])

    def _rank(self, row: int) -> int:
        return self._key[row] << _STAMP_BITS | self.stamp[row]

    def add_tenant(self) -> None:
        super().add_tenant()
        self._buckets.append(_Buckets(self._links))

    def _grow(self, rows: int) -> None:
        more = rows - len(self.where)
        super()._grow(rows)
        self._key = grown(self._key, more)
        self._links.grow(rows)
