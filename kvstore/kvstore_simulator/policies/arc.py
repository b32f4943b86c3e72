"""ARC: recency and frequency side by side; returns move the room between them; leaf-first.

Megiddo, Modha: "ARC: a self-tuning, low overhead replacement cache", FAST 2003. Blocks used once (T1) and more often
(T2) are two LRU queues. Keys that left either are remembered (B1, B2), and one that returns makes the queue it left
larger. The number of blocks in the tier counts as its size when something must be evicted. A bad choice if a return
says nothing about other blocks: in chats every session's blocks come back by themselves, and the target swings without
a gain over LRU.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection

from kvstored.store.policies.queued import Discipline, Queues, first_of

_ONCE, _OFTEN, _DOOR = 0, 1, 2
_NO_ROW = -1


class Arc(Discipline):
    """The ARC policy (adaptive replacement cache, of Megiddo and Modha): it balances recent against frequent use. An
    event costs O(1). It remembers as many keys as the tenant has blocks.
    """

    inside = 2

    def __init__(self, queues: Queues) -> None:
        super().__init__(queues)
        self._gone: list[tuple[OrderedDict[bytes, None], OrderedDict[bytes, None]]] = []  # by tenant: B1, B2
        self._target: list[float] = []  # by tenant: the size that T1 should have
        self._known: list[tuple[int, int]] = []  # by tenant: whose return has moved the target already, and from where

    def leaving(self, row: int, tenant: int) -> None:
        queue = self.queues.queue_of[row]
        if queue == _DOOR:
            if self._known[tenant][0] == row:
                self._known[tenant] = (_NO_ROW, _DOOR)
        else:
            self._gone[tenant][queue][self.key(row)] = None

    def _recall(self, row: int, tenant: int) -> int:
        """Return the queue that `row` left, if it is remembered, otherwise the queue for new blocks; a return moves the
        target, once.
        """
        known, queue = self._known[tenant]
        if known == row:
            return queue
        once, often = self._gone[tenant]
        key, target = self.key(row), self._target[tenant]
        queue = _DOOR
        if key in once:
            queue = _ONCE
            self._target[tenant] = min(target + max(1.0, len(often) / len(once)), float(sum(self.queues.sizes[tenant])))
        elif key in often:
            queue = _OFTEN
            self._target[tenant] = max(target - max(1.0, len(once) / len(often)), 0.0)
        self._known[tenant] = (row, queue)
        return queue

    def entrance(self, row: int, tenant: int) -> int:
        queue = self._recall(row, tenant)
        self._known[tenant] = (_NO_ROW, _DOOR)
        if queue != _DOOR:
            del self._gone[tenant][queue][self.key(row)]
            return _OFTEN
        # It is new, and counts: what is remembered gives way.
        (once, often), sizes = self._gone[tenant], self.queues.sizes[tenant]
        blocks = sum(sizes) + 1
        while once and sizes[_ONCE] + 1 + len(once) > blocks:
            once.popitem(last=False)
        while often and len(once) + len(often) > blocks:
            often.popitem(last=False)
        return _ONCE

    def used(self, row: int, tenant: int) -> None:
        self.queues.move(row, tenant, _OFTEN)

    def candidate(self, tenant: int, refused: Collection[int]) -> int:
        queues, size = self.queues.of[tenant], self.queues.sizes[tenant][_ONCE]
        comes = queues[_DOOR].front
        returns_often = comes >= 0 and self._recall(comes, tenant) == _OFTEN
        target = self._target[tenant]
        first = _ONCE if size > target or (returns_often and size == target) else _OFTEN
        row = first_of(queues[first], refused)
        return row if row >= 0 else first_of(queues[1 - first], refused)

    def add_tenant(self) -> None:
        self._gone.append((OrderedDict(), OrderedDict()))
        self._target.append(0.0)
        self._known.append((_NO_ROW, _DOOR))
