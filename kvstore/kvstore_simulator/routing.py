"""Which of several nodes serves a request: at random, where its conversation was, or where its blocks are.

Owns what a router remembers, and its own estimate of each node's queue. `events` knows the blocks in each node's own
tiers, as a router does that follows their events, and weighs what is left to compute against the queue.

A second in a queue counts less than a second of computing: it delays this request, while what is computed a second time
takes compute, and room for a second copy, from all that follow, the conversation's next turns included. Counted alike,
a long conversation leaves its node as soon as that is busy, and its blocks with it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from kvstore_simulator.node import Node
from kvstore_simulator.visit import Visit

RANDOM, STICKY, EVENTS = "random", "sticky", "events"
ROUTINGS = (RANDOM, STICKY, EVENTS)
QUEUED = 0.05  # what a second in a queue counts; a second of computing counts 1
_ENDS = 2  # the last block of a request may be cut differently in the next turn


class Router:
    """`name` is one of ROUTINGS."""

    def __init__(self, name: str, nodes: Sequence[Node], seed: int) -> None:
        self._choose = {RANDOM: self._at_random, STICKY: self._sticky, EVENTS: self._by_events}[name]
        self._nodes = nodes
        self._random = random.Random(seed)
        self._turns: dict[tuple[int, bytes], int] = {}  # where the request that ended with this block was served
        self._queues: list[list[tuple[Visit, float]]] = [[] for _ in nodes]  # with the seconds that it will take

    def choose(self, visit: Visit) -> Node:
        number = self._choose(visit)
        for key in visit.keys[1:][-_ENDS:]:  # many conversations share the first block
            self._turns[visit.tenant, key] = number
        return self._nodes[number]

    def _at_random(self, visit: Visit) -> int:
        return self._random.randrange(len(self._nodes))

    def _sticky(self, visit: Visit) -> int:
        """Where the turn before was served; a new conversation goes anywhere."""
        for key in reversed(visit.keys):
            number = self._turns.get((visit.tenant, key))
            if number is not None:
                return number
        return self._at_random(visit)

    def _by_events(self, visit: Visit) -> int:
        costs = []
        for number, node in enumerate(self._nodes):
            seconds = self._seconds(node, visit)
            costs.append((QUEUED * self._queue_s(number) + seconds, self._random.random(), number, seconds))
        _, _, number, seconds = min(costs)
        self._queues[number].append((visit, seconds))
        return number

    def _queue_s(self, number: int) -> float:
        left = self._queues[number] = [each for each in self._queues[number] if not each[0].is_served]
        return sum(seconds for _, seconds in left)

    def _seconds(self, node: Node, visit: Visit) -> float:
        """What computing the rest of the prompt takes there."""
        here = node.pool.leading(visit.tenant, visit.keys)
        if node.store is not None:
            here = max(here, node.store.local_blocks(visit.tenant, visit.keys))
        restored = min(here * node.trace.block_tokens, visit.tokens - 1)
        return node.settings.machine.prefill_s(node.settings.model, restored, visit.tokens)
