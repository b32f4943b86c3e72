"""One inference node in virtual time: requests queue for the engine, get stored blocks, compute the rest, store it.

The module owns the queue (first come, first served, one prompt at a time, as on the prefill side of a node that decodes
elsewhere), the overlap of loading and computing, and the time of a request's first token. The store decides where
blocks are and how they move. Causal: nothing depends on a request before it has arrived. Invariant: with `weighs`,
bringing blocks back never takes longer than computing them would, since both race and the first to end counts.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from kvstore_simulator.engine_reports import ANSWER_TOKEN_NS
from kvstore_simulator.hints import made_up
from kvstore_simulator.machine import ENGINE
from kvstore_simulator.node_settings import NodeSettings, ServingPlan
from kvstore_simulator.node_store import EnginePool, NodeStore
from kvstore_simulator.simulated_request import Served, SimulatedRequest
from kvstore_simulator.simulated_tiers import SimulatedMedium
from kvstore_simulator.trace import Op, Trace
from kvstore_simulator.virtual_time import VirtualLoop, run_virtual
from kvstored.clock import NS_PER_MS, NS_PER_S, ManualClock
from kvstored.store.policies import ChainHint, EvictionPolicy

RACE_TOKENS = 512  # computed at once before looking again what has been loaded meanwhile
TICK_S = 0.5  # the daemon's maintenance looks five times as often; nothing that it watches needs that here
FIRST_SAMPLES_S = 0.1  # apart; twice as far whenever there are too many
MOST_SAMPLES = 256


def serve_trace(trace: Trace, settings: NodeSettings, plan: ServingPlan, progress: Callable[[int, int], None]) -> Node:
    """Serve all requests of `trace` on a new simulated node with `settings`, by the way of serving `plan`, and return
    the node as it is at the end.
    """
    clock = ManualClock()

    async def run(loop: VirtualLoop) -> Node:
        node = Node(trace, settings, plan, loop, clock)
        await node.run(progress)
        return node

    return run_virtual(clock, run)


def simulated_request(trace: Trace, at: int, blocks: Sequence[int], now_ns: int) -> SimulatedRequest:
    """Return request number `at` of `trace`, which asks for `blocks` and arrives at the time `now_ns`."""
    tokens = int(trace.input_tokens[at]) or len(blocks) * trace.block_tokens
    return SimulatedRequest(
        at, int(trace.tenants[at]), [trace.key(block) for block in blocks], tokens, Op(int(trace.ops[at])),
        now_ns, trace.kind_names[trace.kinds[at]], int(trace.output_tokens[at]),
    )  # fmt: skip


class Node:
    """A simulated inference node, which serves the requests of a trace by the way of serving `plan`. In virtual time it
    reads the stored blocks of each request, computes the other blocks, and stores them.
    """

    def __init__(
        self, trace: Trace, settings: NodeSettings, plan: ServingPlan, loop: VirtualLoop, clock: ManualClock
    ) -> None:
        self.trace, self.settings, self.plan, self.clock = trace, settings, plan, clock
        block_bytes = settings.model.kv_bytes_per_token * trace.block_tokens
        self.link = SimulatedMedium(settings.machine.link)
        self.media = [self.link, *(SimulatedMedium(settings.machine.medium(name)) for name, _ in settings.tiers)]
        self.store: NodeStore | None = None
        if plan.has_store:
            self.store = NodeStore(settings, block_bytes, loop, clock, self.media, trace)
        self.pool = EnginePool(settings.pool_bytes // block_bytes, block_bytes)
        for number in range(int(trace.tenants.max()) + 1):
            self.pool.residency.tenant(f"tenant-{number}")
        self.served = Served()
        self._hints = made_up(trace, settings.hints)
        self._loop = loop
        self._queue: deque[SimulatedRequest] = deque()
        self._waiting = 0  # requests in it
        self._arrived = asyncio.Event()
        self._is_over = False
        self._has_begun = False  # the request whose turn it is has its room: the next one may take some
        self._tasks: asyncio.TaskGroup
        self._puts: set[asyncio.Task[None]] = set()

    async def run(
        self, progress: Callable[[int, int], None] = lambda done, total: None, *, is_alone: bool = True
    ) -> None:
        """Run until the last request has been served and its blocks stored. With `is_alone` the node takes all requests
        of its trace; otherwise another object passes them to `accept`, and calls `end` after the last one.
        """
        async with asyncio.TaskGroup() as self._tasks:
            watching = [self._tasks.create_task(self._sample_all()), self._tasks.create_task(self._tick_all())]
            if is_alone:
                self._tasks.create_task(self._arrive_all())
            await self._serve_all(progress)
            self.served.lasted_s = self._now_ns() / NS_PER_S
            while self._puts:
                await asyncio.wait(self._puts)
            if self.store is not None:
                await self.store.settle()
            for task in watching:
                task.cancel()
        self._sample()

    # Arriving

    async def _arrive_all(self) -> None:
        trace, first_ns = self.trace, int(self.trace.times_ns[0])
        for at in range(trace.requests):
            await self._until(round((int(trace.times_ns[at]) - first_ns) / self.settings.speed))
            blocks = trace.blocks[trace.starts[at] : trace.starts[at + 1]].tolist()
            if not blocks:
                continue
            self.accept(simulated_request(trace, at, blocks, self._now_ns()))
        self.end()

    def accept(self, request: SimulatedRequest) -> None:
        """Put `request`, which has just arrived, into the node's queue."""
        self._queue.append(request)
        if request.op is not Op.PUT:
            self._expect(request)
        self._arrived.set()

    def end(self) -> None:
        """Note that no further request arrives, so that `run` may end."""
        self._is_over = True
        self._arrived.set()

    def _expect(self, request: SimulatedRequest) -> None:
        """Report a request that has entered the queue. (A recorded put waits in it for the requests before it: they
        computed the blocks that it stores.)
        """
        self.served.requests.append(request)
        self._waiting += 1
        self.served.largest_queue = max(self.served.largest_queue, self._waiting)
        if self.plan.prefetches and self.store is not None:
            self._tasks.create_task(self._stage(request))
            self._call_next()

    async def _stage(self, request: SimulatedRequest) -> None:
        """Prepare a request before its turn: its blocks in slower tiers move up, and when it is next in line all its
        blocks move to the engine.
        """
        assert self.store is not None
        self.store.prefetch(request, self.pool.leading(request.tenant, request.keys))
        await request.is_near.wait()
        if request.rows is None and not request.is_served and request.blocks <= self.pool.capacity_blocks:
            await self._begin_loading(request)

    def _call_next(self) -> None:
        """Let the next request in line load its blocks while another one computes."""
        following = next((request for request in self._queue if request.op is not Op.PUT), None)
        if self._has_begun and following is not None:
            following.is_near.set()

    # Serving

    async def _serve_all(self, progress: Callable[[int, int], None]) -> None:
        done = 0
        while True:
            while not self._queue:
                if self._is_over:
                    return
                self._arrived.clear()
                await self._arrived.wait()
            request = self._queue.popleft()
            if request.op is Op.PUT:
                self._put(request)
                continue
            self._waiting -= 1
            self._has_begun = False
            await self._serve(request)
            request.is_near.set()  # served or not, nothing of it waits any longer
            done += 1
            if done % 16 == 0:
                progress(request.number, self.trace.requests)

    async def _serve(self, request: SimulatedRequest) -> None:
        if request.blocks > self.pool.capacity_blocks:
            self.served.refused += 1
            return
        while request.rows is None and not await self._begin_loading(request):
            await asyncio.wait(self._puts, return_when=asyncio.FIRST_COMPLETED)  # they hold what room there is
        request.begin_ns = self._now_ns()
        self._has_begun = True
        self._call_next()
        await self._restore(request)
        await self._compute(request)
        request.end_ns = self._now_ns()
        if self.store is not None:
            await self.store.end_get(request)
        if self.store is None or request.op is Op.GET:
            self._let_go(request)
            self._report_answer(request)
        else:
            self._put(request)

    async def _begin_loading(self, request: SimulatedRequest) -> bool:
        """Reserve room in the engine's memory and ask the store for its blocks; return False if there is no room
        now.
        """
        held = self.pool.hold(request.tenant, request.keys, self._now_ns())
        if held is None:
            return False
        request.in_pool, request.rows = held
        request.ready = [True] * request.in_pool
        if self.store is not None:
            await self.store.begin_get(request, partial(self._copy, request))
        return True

    def _copy(self, request: SimulatedRequest, mapped: int, on_device: int) -> None:
        """Copy readable blocks to the engine: as they arrive, or later all at once."""
        if self.plan.overlaps and self.store is not None:
            request.copied_ns = max(request.copied_ns, self.store.copy(mapped, on_device))

    async def _restore(self, request: SimulatedRequest) -> None:
        """Wait until every stored block is mapped, computed, or given up."""
        if self.plan.weighs:
            await self._race(request)
        elif not all(request.ready) and self.store is not None:
            await self._ready_by(request, 0, len(request.ready), self._now_ns() + round(self.store.wait_s * NS_PER_S))
        request.is_loading = False
        here = next((at for at, ready in enumerate(request.ready) if not ready), len(request.ready))
        request.given_up = len(request.ready) - here
        request.recomputed += request.given_up
        request.ready = request.ready[:here]
        if not self.plan.overlaps and self.store is not None and here > request.in_pool:
            copied = here - request.in_pool - (request.recomputed - request.given_up)
            on_device = sum(at < here for at in request.on_device)
            await self._until(self.store.copy(copied - on_device, on_device))

    async def _race(self, request: SimulatedRequest) -> None:
        """Compute missing blocks from the head, while loading proceeds from the tail, until the two meet."""
        size = self.trace.block_tokens
        step = max(1, RACE_TOKENS // size)
        at, end = 0, len(request.ready)
        while True:
            while at < end and request.ready[at]:
                at += 1
            if at == end:
                return
            last = min(at + step, end)
            seconds = self._seconds(at * size, min(last * size, request.tokens), least_passes=0.0)
            began_ns = self._now_ns()
            computed_ns = began_ns + round(seconds * NS_PER_S)
            if not await self._ready_by(request, at, last, computed_ns):
                await self._until(computed_ns)
                self._stream(at * size, min(last * size, request.tokens), least_passes=0.0)
                request.recomputed += sum(not ready for ready in request.ready[at:last])
                request.ready[at:last] = [True] * (last - at)
            # What was computed of blocks that came in time after all (some of their layers) is of use where the rest
            # of them has to be computed in the end.
            raced_s = (self._now_ns() - began_ns) / NS_PER_S
            request.raced_s += raced_s
            self.served.compute_busy_s += raced_s

    async def _ready_by(self, request: SimulatedRequest, first: int, last: int, deadline_ns: int) -> bool:
        """Wait until blocks `first` up to `last` are mapped; return False if that takes longer than the deadline."""
        try:
            async with asyncio.timeout_at(deadline_ns / NS_PER_S):
                while request.is_loading and not all(request.ready[first:last]):
                    request.changed.clear()
                    await request.changed.wait()
        except TimeoutError:
            pass
        return all(request.ready[first:last])

    async def _compute(self, request: SimulatedRequest) -> None:
        """Compute the rest of the prompt. Its last token is always computed, since it makes the first token of the
        answer.
        """
        size, most = self.trace.block_tokens, request.tokens - 1
        restored = min(len(request.ready) * size, most)
        seconds = self._seconds(restored, request.tokens)
        request.prefill_ns = round(
            self._seconds(min(restored + request.given_up * size, most), request.tokens) * NS_PER_S
        )
        request.overhead_ns = round(self.settings.machine.compute.overhead_s * NS_PER_S)
        self._stream(restored, request.tokens)
        await self._until(self._now_ns() + request.overhead_ns)
        copying_s = max(0, request.copied_ns - self._now_ns()) / NS_PER_S
        taken_s = overlapped_s(copying_s, seconds, self.settings.model.layers)
        if self.plan.weighs and copying_s:
            again_s = self._seconds(min(request.in_pool * size, most), restored, least_passes=0.0) - request.raced_s
            if seconds + again_s < taken_s:
                self._stream(min((request.in_pool + request.recomputed) * size, most), restored, least_passes=0.0)
                request.recomputed = len(request.ready) - request.in_pool
                taken_s = seconds = seconds + max(0.0, again_s)
        self.served.compute_busy_s += seconds
        await self._until(self._now_ns() + round(taken_s * NS_PER_S))

    def _stream(self, first: int, last: int, *, least_passes: float = 1.0) -> None:
        """Count the reads of the engine's memory for computing tokens `first` up to `last`."""
        machine, model = self.settings.machine, self.settings.model
        self.served.streamed_bytes += machine.streamed_bytes(model, first, last, least_passes=least_passes)

    def _seconds(self, first: int, last: int, *, least_passes: float = 1.0) -> float:
        return self.settings.machine.prefill_s(self.settings.model, first, last, least_passes=least_passes)

    # Afterwards

    def _put(self, request: SimulatedRequest) -> None:
        if self.store is None:
            return

        async def put(store: NodeStore) -> None:
            try:
                await store.put(request, writes_behind=self.plan.writes_behind)
            finally:
                self._let_go(request)
            self._report_answer(request)

        task = self._tasks.create_task(put(self.store))
        self._puts.add(task)
        task.add_done_callback(self._puts.discard)

    def _let_go(self, request: SimulatedRequest) -> None:
        """Release the room of a request's blocks in the engine."""
        rows, request.rows = request.rows, None
        if rows is not None:
            self.pool.release(rows)

    def _report_answer(self, request: SimulatedRequest) -> None:
        """Report the answer to the store when it has been written, with the engine's expectation; the engine has stored
        the prompt before.
        """
        store = self.store
        if store is None or request.op is Op.PUT:
            return
        answered_ns = max(self._now_ns(), request.end_ns + request.answer_tokens * ANSWER_TOKEN_NS)
        if request.answer_tokens:
            self._loop.at_ns(answered_ns, store.answered, request)
        hint = self._hints[request.number]
        if hint is None or hint == ChainHint():
            return
        due_in_ms = None
        if hint.due_ns is not None:
            due_in_ms = round((hint.due_ns / self.settings.speed - answered_ns) / NS_PER_MS)
            hint = hint._replace(due_ns=None)
            if due_in_ms < 0:  # the next request was not waiting for the answer, and has come: nothing to announce
                if hint == ChainHint():
                    return
                due_in_ms = None
        self._loop.at_ns(answered_ns, store.hint, request, hint, due_in_ms)

    # Time

    async def _sample_all(self) -> None:
        """Take samples evenly, at most as many as a plot can show; the duration is not known in advance."""
        step_s = FIRST_SAMPLES_S
        while True:
            self._sample()
            if len(self.served.rounds) > MOST_SAMPLES:
                self.served.thin()
                step_s *= 2
            await asyncio.sleep(step_s)

    def _sample(self) -> None:
        held: list[tuple[str, EvictionPolicy]] = [(ENGINE, self.pool.policy)]
        if self.store is not None:
            held += zip(self.store.names, self.store.store.policies, strict=True)
        self.served.sample(held, self._now_ns())

    async def _tick_all(self) -> None:
        while self.store is not None:
            await asyncio.sleep(TICK_S)
            self.store.tick()

    def _now_ns(self) -> int:
        return self.clock.monotonic_ns()

    async def _until(self, when_ns: int) -> None:
        while (wait_ns := when_ns - self._now_ns()) > 0:
            await asyncio.sleep(wait_ns / NS_PER_S)


def overlapped_s(copying_s: float, computing_s: float, layers: int) -> float:
    """Return the seconds until all `layers` layers are computed, if blocks are copied layer by layer meanwhile. A layer
    starts when its blocks have arrived and the layer before it has been computed. Copying alone takes `copying_s`
    seconds, and computing alone `computing_s`.
    """
    if not copying_s:
        return computing_s
    return max(copying_s / layers + computing_s, copying_s + computing_s / layers)
