"""Several nodes in virtual time that serve one trace and share a remote store, and the router before them.

The module owns the nodes, the arrival of requests, the router's memory, and its estimate of each node's queue; `node`
models a node.

The router weighs a second in a queue less than a second of computing. The queue delays one request. A second
computation takes compute, and room for a second copy, from all requests that follow, including the conversation's next
turns. With equal weights, a long conversation would leave its node, and its blocks there, as soon as the node is busy.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from kvstore_simulator.node import Node, simulated_request
from kvstore_simulator.node_settings import ORCHESTRATED, NodeSettings
from kvstore_simulator.simulated_remote import RemoteSpec, SharedObjects
from kvstore_simulator.simulated_request import SimulatedRequest
from kvstore_simulator.trace import Trace
from kvstore_simulator.virtual_time import VirtualLoop, run_virtual
from kvstored.clock import NS_PER_S, ManualClock

RANDOM, STICKY, EVENTS = "random", "sticky", "events"
ROUTINGS = (RANDOM, STICKY, EVENTS)
QUEUED = 0.05  # what a second in a queue counts; a second of computing counts 1
_ENDS = 2  # the last block of a request may be cut differently in the next turn


class Router:
    """A router that chooses a node for each request, by the rule `name`: a random node, the node where the conversation
    was, or the node where its blocks are. `seed` makes the choices reproducible.

    The rule `events` knows the blocks in each node's own tiers, as a router does that follows the nodes' KV events. It
    chooses the node with the least time for the request and for the node's queue.
    """

    def __init__(self, name: str, nodes: Sequence[Node], seed: int) -> None:
        self._choose = {RANDOM: self._at_random, STICKY: self._sticky, EVENTS: self._by_events}[name]
        self._nodes = nodes
        self._random = random.Random(seed)
        self._turns: dict[tuple[int, bytes], int] = {}  # where the request that ended with this block was served
        # with the seconds that it will take
        self._queues: list[list[tuple[SimulatedRequest, float]]] = [[] for _ in nodes]

    def choose(self, request: SimulatedRequest) -> Node:
        number = self._choose(request)
        for key in request.keys[1:][-_ENDS:]:  # many conversations share the first block
            self._turns[request.tenant, key] = number
        return self._nodes[number]

    def _at_random(self, request: SimulatedRequest) -> int:
        return self._random.randrange(len(self._nodes))

    def _sticky(self, request: SimulatedRequest) -> int:
        """Return the node that served the turn before; a new conversation gets a random node."""
        for key in reversed(request.keys):
            number = self._turns.get((request.tenant, key))
            if number is not None:
                return number
        return self._at_random(request)

    def _by_events(self, request: SimulatedRequest) -> int:
        costs = []
        for number, node in enumerate(self._nodes):
            seconds = self._seconds(node, request)
            costs.append((QUEUED * self._queue_s(number) + seconds, self._random.random(), number, seconds))
        _, _, number, seconds = min(costs)
        self._queues[number].append((request, seconds))
        return number

    def _queue_s(self, number: int) -> float:
        left = self._queues[number] = [each for each in self._queues[number] if not each[0].is_served]
        return sum(seconds for _, seconds in left)

    def _seconds(self, node: Node, request: SimulatedRequest) -> float:
        """Return the seconds that computing the rest of the prompt takes on `node`."""
        here = node.pool.leading(request.tenant, request.keys)
        if node.store is not None:
            here = max(here, node.store.local_blocks(request.tenant, request.keys))
        restored = min(here * node.trace.block_tokens, request.tokens - 1)
        return node.settings.machine.prefill_s(node.settings.model, restored, request.tokens)


ONE = "one node"
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class FleetStudy:
    """A study that compares `nodes` nodes with a shared remote store to one node of their total size. `settings` hold
    for each node, and each rule in `routings` is tried. `remote` is the shared store, or None. Requests before number
    `count_from` are served and not counted. Requests longer than one node's engine memory are left out everywhere, so
    that all rows serve the same requests.
    """

    trace: Trace
    settings: NodeSettings
    nodes: int
    routings: Sequence[str]
    remote: RemoteSpec | None
    count_from: int = 0
    seed: int = 0

    @property
    def too_long(self) -> int:
        """The number of counted requests that are left out, because they are longer than a node's engine memory."""
        return int((np.diff(self.trace.starts)[self.count_from :] > self._most_blocks).sum())

    @property
    def _most_blocks(self) -> int:
        return self.settings.pool_bytes // (self.settings.model.kv_bytes_per_token * self.trace.block_tokens)

    def rows(self, progress: Progress) -> Iterator[dict[str, Any]]:
        settings, times = self.settings, self.nodes
        big = replace(
            settings, machine=settings.machine.times(times), pool_bytes=settings.pool_bytes * times,
            tiers=tuple((name, nbytes * times) for name, nbytes in settings.tiers),
        )  # fmt: skip
        yield self._row(ONE, [big], "", progress)
        for routing in self.routings:
            shared = SharedObjects(self.remote, self.seed) if self.remote is not None else None
            yield self._row(routing, [replace(settings, remote=shared)] * times, routing, progress)

    def _row(self, label: str, each: Sequence[NodeSettings], routing: str, progress: Progress) -> dict[str, Any]:
        began = time.perf_counter()
        nodes = self._serve(each, routing, lambda done: progress(label, done, self.trace.requests))
        requests = [request for node in nodes for request in node.served.requests if request.number >= self.count_from]
        served = [request for request in requests if request.is_served]
        if not served:
            raise ValueError("no request of this trace could be served: more devices, or --tiers engine=SIZE")
        store = nodes[0].store
        assert store is not None
        wanted = sum(request.blocks for request in served)
        hits = {"engine": sum(request.in_pool for request in served)}
        hits |= {name: sum(request.found[at] for request in served) for at, name in enumerate(store.names)}
        found, recomputed = sum(hits.values()), sum(request.recomputed for request in served)
        seconds = np.array([request.ttft_ns for request in served]) / NS_PER_S
        busiest = max(node.served.compute_busy_s for node in nodes)
        return {
            "mode": "fleet", "routing": label, "nodes": len(nodes), "requests": len(served),
            "refused": self.too_long, "block_accesses": wanted, "found_ratio": round(found / wanted, 6),
            "hit_ratio": round((found - recomputed) / wanted, 6), "hits_by_tier": hits,
            "recomputed_blocks": recomputed,
            "ttft_s": {
                "mean": round(float(seconds.mean()), 6),
                **{f"p{share}": round(float(np.percentile(seconds, share)), 6) for share in (50, 90, 99)},
            },
            "busiest_share": round(busiest / max(1e-9, sum(node.served.compute_busy_s for node in nodes)), 4),
            "seconds": round(time.perf_counter() - began, 3),
        }  # fmt: skip

    def _serve(self, each: Sequence[NodeSettings], routing: str, progress: Callable[[int], None]) -> list[Node]:
        clock, trace = ManualClock(), self.trace

        async def run(loop: VirtualLoop) -> list[Node]:
            nodes = [Node(trace, settings, ORCHESTRATED, loop, clock) for settings in each]
            router = Router(routing, nodes, self.seed) if routing else None
            first_ns = int(trace.times_ns[0])
            async with asyncio.TaskGroup() as tasks:
                for node in nodes:
                    tasks.create_task(node.run(is_alone=False))
                for at in range(trace.requests):
                    due_ns = round((int(trace.times_ns[at]) - first_ns) / self.settings.speed)
                    await asyncio.sleep(max(0, due_ns - clock.monotonic_ns()) / NS_PER_S)
                    blocks = trace.blocks[trace.starts[at] : trace.starts[at + 1]].tolist()
                    if 0 < len(blocks) <= self._most_blocks:
                        request = simulated_request(trace, at, blocks, clock.monotonic_ns())
                        (nodes[0] if router is None else router.choose(request)).accept(request)
                    if at % 16 == 0:
                        progress(at)
                for node in nodes:
                    node.end()
            return nodes

        return run_virtual(clock, run)
