"""FIFO, and SIEVE: FIFO with a hand that spares blocks used since it last passed, and leaves them in place; leaf-first.

FIFO is the yardstick for the value of recency. It needs no work at all on a hit, which is why caches with many threads
use it (Yang, Zhang, Qiu, Yue, Rashmi: "FIFO queues are all you need for cache eviction", SOSP 2023, shows when it is
enough with a little more). A bad choice nearly everywhere here: a prompt that all sessions share is evicted as early as
a private chat of its age, unless its children keep it.

Zhang, Yang, Yue, Vigfusson, Rashmi: "SIEVE is simpler than LRU", NSDI 2024. The queue is kept as two: blocks that the
hand has yet to meet on this round, with new blocks at the end, and blocks it has spared. A bad choice for chats: a
session between two turns looks like one that ended, and nothing says how long ago a block was used; scans of one-time
blocks hurt it less than they hurt LRU.
"""

from __future__ import annotations

from collections.abc import Collection

from kvstored.store.policies.queued import Discipline, Queues, first_of


class Fifo(Discipline):
    """The FIFO policy: it evicts the oldest block, used or not. An event costs O(1)."""

    inside = 1

    def candidate(self, tenant: int, refused: Collection[int]) -> int:
        return first_of(self.queues.of[tenant][0], refused)


class Sieve(Discipline):
    """The SIEVE policy: FIFO that spares blocks used since it last looked at them. An event costs O(1); choosing a
    victim costs the blocks that it spares, each paid for by a use.
    """

    inside = 2

    def __init__(self, queues: Queues) -> None:
        super().__init__(queues)
        self._ahead: list[int] = []  # by tenant: the queue that the hand is in

    def add_tenant(self) -> None:
        self._ahead.append(0)

    def entrance(self, row: int, tenant: int) -> int:
        ahead, queues = self._ahead, self.queues.of[tenant]
        if not queues[ahead[tenant]]:  # the hand is through: it goes round before it meets what comes now
            ahead[tenant] = 1 - ahead[tenant]
        return ahead[tenant]

    def candidate(self, tenant: int, refused: Collection[int]) -> int:
        uses, queues, ahead = self.queues.uses, self.queues.of[tenant], self._ahead
        for _ in range(2):
            for row in queues[ahead[tenant]]:
                if row in refused:
                    continue
                if not uses[row]:
                    return row
                uses[row] = 0
                self.queues.move(row, tenant, 1 - ahead[tenant])
            if queues[ahead[tenant]]:
                break  # only refused ones ahead
            ahead[tenant] = 1 - ahead[tenant]  # the hand has gone round
        found = first_of(queues[ahead[tenant]], refused)
        return found if found >= 0 else first_of(queues[1 - ahead[tenant]], refused)
