"""The next use of each block, which only a simulator knows, and a policy that uses it.

`Clairvoyant` is Belady's MIN (IBM Systems Journal 5(2), 1966) with bypass for chains: it evicts the block whose next
use is farthest away, the deeper one of two, so that leaves are evicted first; a block just stored may be evicted at
once. With blocks of one size no policy has more prefix-closed hits. The daemon's registry of policies does not have it.
"""

from __future__ import annotations

from array import array
from collections.abc import Container, Sequence
from heapq import heapify, heappop, heappush

import numpy as np
import numpy.typing as npt

from kvstore_simulator.trace import Op, Trace
from kvstored.store.blocks import ResidencyView
from kvstored.store.policies import EvictionPolicy, PolicySettings
from kvstored.store.policies.base import Rows

_DEPTH_BITS = 24
_ROW_BITS = 32
_ROWS = int(2**_ROW_BITS)
_SLACK_ENTRIES = 4096


def next_uses(trace: Trace) -> npt.NDArray[np.int64]:
    """Return for each block access of `trace` the number of the next request that looks the same block up, or the
    number of all requests if no later request does. A PUT does not count as a use, because it only stores.
    """
    request_of = np.repeat(np.arange(trace.requests), np.diff(trace.starts))
    counts = (trace.ops != Op.PUT)[request_of]
    order = np.lexsort((request_of, trace.blocks))
    blocks, requests = trace.blocks[order].astype(np.int64), request_of[order]
    # Among accesses sorted by block and time: the nearest later access of the same block that counts.
    stride = trace.requests + 1
    used = blocks[counts[order]] * stride + requests[counts[order]]
    at = np.searchsorted(used, blocks * stride + requests, side="right")
    following = np.append(used, -1)[np.minimum(at, len(used))]
    same = (at < len(used)) & (following // stride == blocks)
    found = np.empty(len(order), dtype=np.int64)
    found[order] = np.where(same, following % stride, trace.requests)
    return found


class Clairvoyant(EvictionPolicy):
    """A policy that knows the future: it evicts the block whose next use is farthest away (Belady's MIN, for chains).
    `foresee` is called with the next uses of the blocks of a request before anything is evicted.
    """

    name = "clairvoyant"

    def __init__(self, residency: ResidencyView, tier: int, settings: PolicySettings | None = None) -> None:
        super().__init__(residency, tier, settings, self.name)
        self._urgency = array("q")  # by row; -1: not here. The larger, the sooner it is evicted
        self._heap: list[int] = []  # -(urgency << row bits | row); stale entries stay until they are met
        self._rows = 0

    def foresee(self, rows: Sequence[int], uses: Sequence[int]) -> None:
        urgency, heap, depth = self._urgency, self._heap, self.residency.rows.depth
        for row, use in zip(rows, uses, strict=True):
            urgency[row] = key = use << _DEPTH_BITS | depth[row]
            heappush(heap, -(key << _ROW_BITS | row))
        if len(heap) > 4 * self._rows + _SLACK_ENTRIES:
            self._heap = [-(key << _ROW_BITS | row) for row, key in enumerate(urgency) if key >= 0]
            heapify(self._heap)

    # Events

    def inserted(self, rows: Sequence[int], now_ns: int) -> None:
        if (last := max(rows)) >= len(self._urgency):
            self._urgency.extend([-1] * (last + 1024 - len(self._urgency)))
        for row in rows:
            self._urgency[row] = 0
        self._rows += len(rows)

    def accessed(self, rows: Sequence[int], now_ns: int) -> None:
        pass  # `foresee` says more

    def removed(self, rows: Sequence[int]) -> None:
        for row in rows:
            self._urgency[row] = -1
        self._rows -= len(rows)

    def released(self, row: int) -> None:
        pass  # nothing is ever held out of the heap

    # Decisions

    def next_victim(self, now_ns: int, *, exclude: Container[int] = (), tenant: int | None = None) -> int:
        """Return the row number of the block to evict. No block is pinned in a replay, and of two blocks with the same
        next use the child is evicted before its parent, so the first block in the order may always be evicted.
        """
        heap, urgency = self._heap, self._urgency
        while heap:
            entry = -heap[0]
            row = entry % _ROWS
            if urgency[row] == entry >> _ROW_BITS:
                return row
            heappop(heap)
        return -1

    def classes(self, rows: Rows, now_ns: int) -> npt.NDArray[np.int64]:
        is_used = np.frombuffer(self._urgency, np.int64)[rows] >> _DEPTH_BITS < np.iinfo(np.int32).max
        return is_used.astype(np.int64)

    def __len__(self) -> int:
        return self._rows
