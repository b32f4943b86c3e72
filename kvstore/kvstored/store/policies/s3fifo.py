"""S3-FIFO: a small queue on trial, a main queue, and a memory of keys that failed the trial; leaf-first.

Yang, Zhang, Qiu, Yue, Rashmi: "FIFO queues are all you need for cache eviction", SOSP 2023. A new block enters the
small queue, a tenth of the tier; if it was used by the time it is looked at it moves to the main queue, else it is
evicted and its key is remembered: one that returns is stored in the main queue at once. There a use buys another round,
three at most. One use passes the trial; the paper's pseudo-code asks for two, which here would let a block that was
used twice be evicted before one used once. A bad choice for sessions that pause: a turn's blocks are evicted after a
tenth of the tier's worth of others, before the next turn comes. Good against floods of one-time prompts.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection

from kvstored.store.policies.queued import Discipline, Queues

_SMALL, _MAIN = 0, 1
_SMALL_SHARE = 10
_USES_MAX = 3


class S3Fifo(Discipline):
    """The policy s3fifo: new blocks enter a small queue, blocks used there move to a main queue, and keys of blocks
    evicted from the small queue are remembered. An event takes constant time; it remembers as many keys as nine tenths
    of the tenant's blocks.
    """

    inside = 2

    def __init__(self, queues: Queues) -> None:
        super().__init__(queues)
        self._failed: list[OrderedDict[bytes, None]] = []  # by tenant

    def leaving(self, row: int, tenant: int) -> None:
        if self.queues.queue_of[row] == _SMALL:
            failed = self._failed[tenant]
            failed[self.key(row)] = None
            blocks = sum(self.queues.sizes[tenant])
            while len(failed) > max(1, blocks - blocks // _SMALL_SHARE):
                failed.popitem(last=False)

    def entrance(self, row: int, tenant: int) -> int:
        failed, key = self._failed[tenant], self.key(row)
        if key not in failed:
            return _SMALL
        del failed[key]
        return _MAIN

    def candidate(self, tenant: int, refused: Collection[int]) -> int:
        uses, queues, sizes = self.queues.uses, self.queues.of[tenant], self.queues.sizes[tenant]
        while True:
            is_small_full = sizes[_SMALL] * _SMALL_SHARE >= sizes[_SMALL] + sizes[_MAIN]
            for number in (_SMALL, _MAIN) if is_small_full else (_MAIN, _SMALL):
                row = next((row for row in queues[number] if row not in refused), -1)
                if row >= 0:
                    break
            else:
                return -1
            if not uses[row]:
                return row
            uses[row] = 0 if number == _SMALL else min(uses[row], _USES_MAX) - 1
            self.queues.move(row, tenant, _MAIN)

    def add_tenant(self) -> None:
        self._failed.append(OrderedDict())
