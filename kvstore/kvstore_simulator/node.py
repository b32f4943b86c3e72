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
from dataclasses import replace
from functools import partial

from kvstore_simulator.engine_reports import ANSWER_TOKEN_NS
from kvstore_simulator.hints import made_up
from kvstore_simulator.machine import ENGINE
from kvstore_simulator.node_settings import NodeSettings, ServingPlan
from kvstore_simulator.node_store import EnginePool, NodeStore
from kvstore_simulator.simulated_tiers import Medium
from kvstore_simulator.trace import Op, Trace
from kvstore_simulator.virtual_time import VirtualLoop, run_virtual
from kvstore_simulator.visit import Served, Visit
from kvstored.clock import NS_PER_MS, NS_PER_S, ManualClock
from kvstored.store.policies import ChainHint, Policy

RACE_TOKENS = 512  # computed at once before looking again what has been loaded meanwhile
TICK_S = 0.5  # the daemon's maintenance looks five times as often; nothing that it watches needs that here
FIRST_SAMPLES_S = 0.1  # apart; twice as far whenever there are too many
MOST_SAMPLES = 256


def serve_trace(trace: Trace, settings: NodeSettings, plan: ServingPlan, progress: Callable[[int, int], None]) -> Node:
    """Serve the whole trace under one plan, and return the node in its state at the end."""
    clock = ManualClock()

    async def run(loop: VirtualLoop) -> Node:
        node = Node(trace, settings, plan, loop, clock)
        await node.run(progress)
        return node

    return run_virtual(clock, run)


def visit_of(trace: Trace, at: int, blocks: Sequence[int], now_ns: int) -> Visit:
    """Return request number `at` of the trace, which asks for `blocks`."""
    tokens = int(trace.input_tokens[at]) or len(blocks) * trace.block_tokens
    return Visit(
        at, int(trace.tenants[at]), [trace.key(block) for block in blocks], tokens, Op(int(trace.ops[at])),
        now_ns, trace.kind_names[trace.kinds[at]], int(trace.output_tokens[at]),
    )  # fmt: skip


class Node:
    """A node that serves a trace under one plan."""

    def __init__(
        self, trace: Trace, settings: NodeSettings, plan: ServingPlan, loop: VirtualLoop, clock: ManualClock
    ) -> None:
        self.trace, self.settings, self.plan, self.clock = trace, settings, plan, clock
        block_bytes = settings.model.kv_bytes_per_token * trace.block_tokens
        self.link = Medium(settings.machine.link)
        self.media = [self.link, *(Medium(settings.machine.medium(name)) for name, _ in settings.tiers)]
        self.store: NodeStore | None = None
        if plan.has_store:
            self.store = NodeStore(settings, block_bytes, loop, clock, self.media, trace)
        self.pool = EnginePool(settings.pool_bytes // block_bytes, block_bytes)
        for number in range(int(trace.tenants.max()) + 1):
            self.pool.residency.tenant(f"tenant-{number}")
        self.served = Served()
        self._hints = made_up(trace, settings.hints)
        self._loop = loop
        self._queue: deque[Visit] = deque()
        self._waiting = 0  # requests in it
        self._arrived = asyncio.Event()
        self._is_over = False
        self._has_begun = False  # the request whose turn it is has its room: the next one may take some
        self._tasks: asyncio.TaskGroup
        self._puts: set[asyncio.Task[None]] = set()

    async def run(
        self, progress: Callable[[int, int], None] = lambda done, total: None, *, is_alone: bool = True
    ) -> None:
        """Run until the last request has been served and stored. `is_alone`: the whole trace arrives here; otherwise
        the requests passed to `accept`, until `end`.
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
            self.accept(visit_of(trace, at, blocks, self._now_ns()))
        self.end()

    def accept(self, visit: Visit) -> None:
        """Accept a request that has arrived."""
        self._queue.append(visit)
        if visit.op is not Op.PUT:
            self._expect(visit)
        self._arrived.set()

    def end(self) -> None:
        """Note that no further request arrives."""
        self._is_over = True
        self._arrived.set()

    def _expect(self, visit: Visit) -> None:
        """Report a request that has entered the queue. (A recorded put waits in it for the requests before it: they
        computed the blocks that it stores.)
        """
        self.served.visits.append(visit)
        self._waiting += 1
        self.served.largest_queue = max(self.served.largest_queue, self._waiting)
        if self.plan.prefetches and self.store is not None:
            self._tasks.create_task(self._stage(visit))
            self._call_next()

    async def _stage(self, visit: Visit) -> None:
        """Prepare a request before its turn: its blocks in slower tiers move up, and when it is next in line all its
        blocks move to the engine.
        """
        assert self.store is not None
        self.store.prefetch(visit, self.pool.leading(visit.tenant, visit.keys))
        await visit.is_near.wait()
        if visit.rows is None and not visit.is_served and visit.blocks <= self.pool.capacity_blocks:
            await self._begin_loading(visit)

    def _call_next(self) -> None:
        """Let the next request in line load its blocks while another one computes."""
        following = next((visit for visit in self._queue if visit.op is not Op.PUT), None)
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
            visit = self._queue.popleft()
            if visit.op is Op.PUT:
                self._put(visit)
                continue
            self._waiting -= 1
            self._has_begun = False
            await self._serve(visit)
            visit.is_near.set()  # served or not, nothing of it waits any longer
            done += 1
            if done % 16 == 0:
                progress(visit.number, self.trace.requests)

    async def _serve(self, visit: Visit) -> None:
        if visit.blocks > self.pool.capacity_blocks:
            self.served.refused += 1
            return
        while visit.rows is None and not await self._begin_loading(visit):
            await asyncio.wait(self._puts, return_when=asyncio.FIRST_COMPLETED)  # they hold what room there is
        visit.begin_ns = self._now_ns()
        self._has_begun = True
        self._call_next()
        await self._restore(visit)
        await self._compute(visit)
        visit.end_ns = self._now_ns()
        if self.store is not None:
            await self.store.end_get(visit)
        if self.store is None or visit.op is Op.GET:
            self._let_go(visit)
            self._report_answer(visit)
        else:
            self._put(visit)

    async def _begin_loading(self, visit: Visit) -> bool:
        """Reserve room in the engine's memory and ask the store for its blocks; return False if there is no room
        now.
        """
        held = self.pool.hold(visit.tenant, visit.keys, self._now_ns())
        if held is None:
            return False
        visit.in_pool, visit.rows = held
        visit.ready = [True] * visit.in_pool
        if self.store is not None:
            await self.store.begin_get(visit, partial(self._copy, visit))
        return True

    def _copy(self, visit: Visit, mapped: int, on_device: int) -> None:
        """Copy readable blocks to the engine: as they arrive, or later all at once."""
        if self.plan.overlaps and self.store is not None:
            visit.copied_ns = max(visit.copied_ns, self.store.copy(mapped, on_device))

    async def _restore(self, visit: Visit) -> None:
        """Wait until every stored block is mapped, computed, or given up."""
        if self.plan.weighs:
            await self._race(visit)
        elif not all(visit.ready) and self.store is not None:
            await self._ready_by(visit, 0, len(visit.ready), self._now_ns() + round(self.store.wait_s * NS_PER_S))
        visit.is_loading = False
        here = next((at for at, ready in enumerate(visit.ready) if not ready), len(visit.ready))
        visit.given_up = len(visit.ready) - here
        visit.recomputed += visit.given_up
        visit.ready = visit.ready[:here]
        if not self.plan.overlaps and self.store is not None and here > visit.in_pool:
            copied = here - visit.in_pool - (visit.recomputed - visit.given_up)
            on_device = sum(at < here for at in visit.on_device)
            await self._until(self.store.copy(copied - on_device, on_device))

    async def _race(self, visit: Visit) -> None:
        """Compute missing blocks from the head, while loading proceeds from the tail, until the two meet."""
        size = self.trace.block_tokens
        step = max(1, RACE_TOKENS // size)
        at, end = 0, len(visit.ready)
        while True:
            while at < end and visit.ready[at]:
                at += 1
            if at == end:
                return
            last = min(at + step, end)
            seconds = self._seconds(at * size, min(last * size, visit.tokens), least_passes=0.0)
            began_ns = self._now_ns()
            computed_ns = began_ns + round(seconds * NS_PER_S)
            if not await self._ready_by(visit, at, last, computed_ns):
                await self._until(computed_ns)
                self._stream(at * size, min(last * size, visit.tokens), least_passes=0.0)
                visit.recomputed += sum(not ready for ready in visit.ready[at:last])
                visit.ready[at:last] = [True] * (last - at)
            # What was computed of blocks that came in time after all (some of their layers) is of use where the rest
            # of them has to be computed in the end.
            raced_s = (self._now_ns() - began_ns) / NS_PER_S
            visit.raced_s += raced_s
            self.served.compute_busy_s += raced_s

    async def _ready_by(self, visit: Visit, first: int, last: int, deadline_ns: int) -> bool:
        """Wait until blocks `first` up to `last` are mapped; return False if that takes longer than the deadline."""
        try:
            async with asyncio.timeout_at(deadline_ns / NS_PER_S):
                while visit.is_loading and not all(visit.ready[first:last]):
                    visit.changed.clear()
                    await visit.changed.wait()
        except TimeoutError:
            pass
        return all(visit.ready[first:last])

    async def _compute(self, visit: Visit) -> None:
        """Compute the rest of the prompt. Its last token is always computed, since it makes the first token of the
        answer.
        """
        size, most = self.trace.block_tokens, visit.tokens - 1
        restored = min(len(visit.ready) * size, most)
        seconds = self._seconds(restored, visit.tokens)
        visit.prefill_ns = round(self._seconds(min(restored + visit.given_up * size, most), visit.tokens) * NS_PER_S)
        visit.overhead_ns = round(self.settings.machine.compute.overhead_s * NS_PER_S)
        self._stream(restored, visit.tokens)
        await self._until(self._now_ns() + visit.overhead_ns)
        copying_s = max(0, visit.copied_ns - self._now_ns()) / NS_PER_S
        taken_s = overlapped_s(copying_s, seconds, self.settings.model.layers)
        if self.plan.weighs and copying_s:
            again_s = self._seconds(min(visit.in_pool * size, most), restored, least_passes=0.0) - visit.raced_s
            if seconds + again_s < taken_s:
                self._stream(min((visit.in_pool + visit.recomputed) * size, most), restored, least_passes=0.0)
                visit.recomputed = len(visit.ready) - visit.in_pool
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

    def _put(self, visit: Visit) -> None:
        if self.store is None:
            return

        async def put(store: NodeStore) -> None:
            try:
                await store.put(visit, writes_behind=self.plan.writes_behind)
            finally:
                self._let_go(visit)
            self._report_answer(visit)

        task = self._tasks.create_task(put(self.store))
        self._puts.add(task)
        task.add_done_callback(self._puts.discard)

    def _let_go(self, visit: Visit) -> None:
        """Release the room of a request's blocks in the engine."""
        rows, visit.rows = visit.rows, None
        if rows is not None:
            self.pool.release(rows)

    def _report_answer(self, visit: Visit) -> None:
        """Report the answer to the store when it has been written, with the engine's expectation; the engine has stored
        the prompt before.
        """
        store = self.store
        if store is None or visit.op is Op.PUT:
            return
        answered_ns = max(self._now_ns(), visit.end_ns + visit.answer_tokens * ANSWER_TOKEN_NS)
        if visit.answer_tokens:
            self._loop.at_ns(answered_ns, store.answered, visit)
        hint = self._hints[visit.number]
        if hint is None or hint == ChainHint():
            return
        due_in_ms = None
        if hint.due_ns is not None:
            due_in_ms = round((hint.due_ns / self.settings.speed - answered_ns) / NS_PER_MS)
            hint = replace(hint, due_ns=None)
            if due_in_ms < 0:  # the next request was not waiting for the answer, and has come: nothing to announce
                if hint == ChainHint():
                    return
                due_in_ms = None
        self._loop.at_ns(answered_ns, store.hint, visit, hint, due_in_ms)

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
        held: list[tuple[str, Policy]] = [(ENGINE, self.pool.policy)]
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
    """Return the seconds that computing takes while blocks are copied, both a layer at a time: a layer starts when its
    blocks have arrived and the layer before it has been computed.
    """
    if not copying_s:
        return computing_s
    return max(copying_s / layers + computing_s, copying_s + computing_s / layers)
