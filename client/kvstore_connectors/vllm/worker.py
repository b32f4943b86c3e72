"""The worker side: it restores blocks into the paged pool, has filled blocks stored after a step, and reports the times
of both.

The module owns the loads under way, each in a thread that leases blocks and has them copied layer by layer, the blocks
that failed, and the saver. Invariants: the store's failures are never raised into the engine; no byte is read outside a
lease; a block counts as loaded only if the lease still held *after* it was copied; once a load has ended, it writes
nothing any more; blocks computed in a step on top of a failed load are not stored.

On a device vLLM calls `save` when a step is queued. So a step is measured by moments that come later, and reported with
a later step; a step whose stream waited for a load is not measured, and a load counts from its beginning to its end.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import groupby

from kvstore_client.lease import Lease
from kvstore_client.session import Session
from kvstore_client.trace import traced
from kvstore_connectors.moments import Moment
from kvstore_connectors.vllm.identity import address
from kvstore_connectors.vllm.orders import LoadOrder, LoadReport, Place, SaveOrder, StepOrders, StepReport
from kvstore_connectors.vllm.pages import PageLoad, Pages
from kvstore_connectors.vllm.saver import Saver
from kvstore_proto.errors import KVStoreError

IDLE_WAIT_S = 0.005  # vLLM asks in a loop while requests wait for nothing but their loads
STEPS_LATER = 2  # on a device: the step before may still run; the same for all ranks, which report together


@dataclass(slots=True)
class LoadCounts:
    """Counts of loaded and failed blocks since the start, for the log. `load_s` is the number of seconds by which loads
    delayed steps; on a device it is an upper bound.
    """

    loaded_blocks: int = 0
    failed_blocks: int = 0
    load_s: float = 0.0


@dataclass(frozen=True, slots=True)
class _Ran:
    """A step that computed something, and waited for loads for `waited_s`."""

    orders: StepOrders
    began: Moment
    ended: Moment
    waited_s: float


class VllmWorkerSide:
    """The part of the vLLM connector in a worker's process. It carries out the orders to load and to store blocks of
    `pages`, the pool that vLLM has registered. `saver` stores blocks; it is None for an engine that only reads.
    """

    def __init__(
        self, session: Session, pages: Pages, saver: Saver | None, *, reuse_wait_s: float, say: Callable[[str], None]
    ) -> None:
        self._session, self._pages, self._saver = session, pages, saver
        self._reuse_wait_s = reuse_wait_s
        self._say = say
        self._load: Load | None = None  # of this step
        self._failed: set[Place] = set()
        self._failed_requests: set[str] = set()
        self._reports: list[LoadReport] = []
        self._beside = 0  # loads under way beside steps
        self._ended: list[Load] = []  # of those
        self._changed = threading.Condition()  # of the two above
        self._step: tuple[StepOrders, Moment] | None = None
        self._ran: deque[_Ran] = deque()  # not reported yet
        self.counts = LoadCounts()

    def before_step(self, orders: StepOrders) -> None:
        """Prepare the step with `orders` before it writes anything into the pool. It may wait `reuse_wait_s` seconds
        for copies out of blocks that the step reuses.
        """
        self._pages.decoding(bool(orders.decodes))
        if self._saver is not None and (orders.ended or orders.released):
            self._saver.let_go(orders.ended, self._reuse_wait_s, orders.released)
        self._step = (orders, self._pages.now())

    def load(self, loads: Sequence[LoadOrder]) -> None:
        """Begin to restore the blocks in `loads`, which this step's attention will read."""
        self._load = Load(self._session, self._pages, loads, say=self._say).start()

    def wait_layer(self, layer: int) -> None:
        """Make the engine's further work wait until layer number `layer` of this step's loads is restored. The pool
        blocks whose load failed are remembered for `take_failed`.
        """
        if self._load is not None:
            self._load.wait_layer(layer)

    def load_beside(self, orders: Sequence[LoadOrder]) -> None:
        """Begin to restore the blocks in `orders` while the engine runs steps for other requests. `take_ended` names
        the requests whose load has ended.
        """
        for _, of_request in groupby(orders, lambda order: order.request_id):
            with self._changed:
                self._beside += 1
            Load(self._session, self._pages, list(of_request), say=self._say, on_end=self._beside_ended).start()

    def save(self, saves: Sequence[SaveOrder]) -> None:
        """Pass `saves`, the orders to store blocks that this step filled, to the saver, after the step's forward pass.
        Blocks that were computed from a failed load are left out.
        """
        load = self._end_load()
        now = self._pages.now()
        is_measured = load is None or not self._pages.is_on_device
        if self._step is not None and self._step[0].tokens and is_measured:
            orders, began = self._step
            self._ran.append(_Ran(orders, began, now, 0.0 if load is None else load.waited_s))
        if self._saver is None:
            return
        for order in saves:
            if self._failed.isdisjoint(order.block_ids):
                self._saver.submit(order, now)

    def take_ended(self) -> set[str]:
        """Return the ids of requests whose load beside the steps has ended since the last call, with success or not.
        Call it before `take_failed`.
        """
        is_idle = self._step is not None and not self._step[0].tokens
        with self._changed:
            if is_idle and self._beside and not self._ended:
                self._changed.wait(IDLE_WAIT_S)
            ended, self._ended = self._ended, []
        for load in ended:
            self._count(load, load.seconds)
        return {load.orders[0].request_id for load in ended}

    def take_failed(self) -> set[int]:
        """Return the ids of pool blocks whose load failed since the last call. vLLM computes these blocks, and the
        tokens behind them, again.
        """
        self._end_load()
        failed, self._failed = self._failed, set()
        return {block for block in failed if isinstance(block, int)}

    def take_failed_requests(self) -> set[str]:
        """Return the ids of requests whose load failed since the last call, for models in which vLLM recomputes a
        failed load as a whole. Call it after `take_ended`.
        """
        failed, self._failed_requests = self._failed_requests, set()
        return failed

    def take_report(self) -> StepReport | None:
        """Return a report on a step's time and on the loads that have ended, or None if there is nothing to report."""
        loads, self._reports = tuple(self._reports), []
        self._step = None
        is_due = len(self._ran) > (STEPS_LATER if self._pages.is_on_device else 0)
        ran = self._ran.popleft() if is_due else None
        took_s = None if ran is None else ran.ended.seconds_since(ran.began)
        if ran is None or took_s is None:
            return StepReport(loads) if loads else None
        return StepReport(loads, ran.orders.tokens, ran.orders.attended, max(took_s - ran.waited_s, 0.0))

    def close(self, patience_s: float) -> str:
        """Store the waiting blocks for at most `patience_s` seconds, and return a line for the log with the counts
        since the start.
        """
        counts = self.counts
        self._pages.decoding(False)
        done = f"{counts.loaded_blocks} blocks restored in {counts.load_s:.3f} s, {counts.failed_blocks} could not be"
        if self._saver is not None:
            self._saver.close(patience_s)
            done += f"; {self._saver.stored_blocks} stored, {self._saver.dropped_blocks} dropped"
        self._pages.close()
        return done

    def _end_load(self) -> Load | None:
        """Wait for this step's load, and return it; None if there is none."""
        load, self._load = self._load, None
        if load is not None:
            load.join()
            self._count(load, load.seconds if self._pages.is_on_device else load.waited_s)
        return load

    def _count(self, load: Load, seconds: float) -> None:
        failed = load.failed()
        if any(isinstance(place, tuple) for place in failed):
            self._failed_requests.add(load.orders[0].request_id)
        else:
            self._failed |= failed
        self.counts.failed_blocks += len(failed)
        self.counts.load_s += seconds
        wanted = sum(len(order.block_ids) for order in load.orders)
        self.counts.loaded_blocks += sum(load.join())
        if len({order.group for order in load.orders}) > 1:
            request_id = load.orders[0].request_id
            self._reports.append(LoadReport(request_id, 0 if failed else wanted, seconds))
            return
        for order, loaded in zip(load.orders, load.join(), strict=True):
            share_s = seconds * len(order.block_ids) / max(wanted, 1)
            self._reports.append(LoadReport(order.request_id, loaded, share_s))

    def _beside_ended(self, load: Load) -> None:
        with self._changed:
            self._beside -= 1
            self._ended.append(load)
            self._changed.notify_all()


def open_worker(
    session: Session,
    open_pages: Callable[[Session], Pages],
    *,
    save_deadline_s: float | None,
    reuse_wait_s: float,
    say: Callable[[str], None],
    refuse: Callable[[str], None],
) -> VllmWorkerSide | None:
    """Return the worker side for the pool that `open_pages(session)` opens. If that fails, call `refuse` with the
    reason and return None. `save_deadline_s` is the time for a put in seconds, or None for an engine that only
    reads.
    """
    try:
        pages = open_pages(session)
    except (OSError, KVStoreError, RuntimeError) as error:
        refuse(f"its KV memory cannot be copied: {error}")
        return None
    saver = None if save_deadline_s is None else Saver(session, pages, deadline_s=save_deadline_s, say=say)
    return VllmWorkerSide(session, pages, saver, reuse_wait_s=reuse_wait_s, say=say)


class Load:
    """A load of the blocks in `orders` into the pool, in a thread that begins with `start`. The copies wait for the
    work that the engine had begun when this object was made, because that work may still use the pool blocks. The
    engine's thread makes the object. `on_end` is called at the end, in the load's thread.
    """

    def __init__(
        self,
        session: Session,
        pages: Pages,
        orders: Sequence[LoadOrder],
        *,
        say: Callable[[str], None],
        on_end: Callable[[Load], None] = lambda load: None,
    ) -> None:
        self.orders = orders
        self.seconds = 0.0  # until the end
        self.waited_s = 0.0  # by threads that called `wait_layer` or `join`
        self._session, self._pages, self._say, self._on_end = session, pages, say, on_end
        self._after = pages.now()
        self._loaded = [0] * len(orders)
        self._changed = threading.Condition()  # of the two below
        self._copies: PageLoad | None = None  # once blocks are leased
        self._has_ended = False

    def start(self) -> Load:
        threading.Thread(target=self._run, name="kvstore-vllm-load", daemon=True).start()
        return self

    def wait_layer(self, layer: int) -> None:
        """Make the engine's further work wait until layer number `layer` is in the pool, or until the load has
        failed.
        """
        started = time.perf_counter()
        with self._changed:
            self._changed.wait_for(lambda: self._copies is not None or self._has_ended)
        if self._copies is not None:
            self._copies.wait(layer)
        self.waited_s += time.perf_counter() - started

    def join(self) -> list[int]:
        """Wait for the end of the load, and return for each order the number of leading blocks that were loaded."""
        started = time.perf_counter()
        with self._changed:
            self._changed.wait_for(lambda: self._has_ended)
        self.waited_s += time.perf_counter() - started
        return self._loaded

    def failed(self) -> set[Place]:
        """Return the pool blocks that were not loaded. Call it after the load has ended."""
        ends = zip(self.orders, self._loaded, strict=True)
        return {block for order, loaded in ends for block in order.block_ids[loaded:]}

    def _run(self) -> None:
        started = time.perf_counter()
        try:
            with ExitStack() as held:
                self._loaded = self._copied([self._leased(order, held) for order in self.orders])
        except Exception as error:  # a request the daemon refuses, the device, a bug here: the blocks are computed
            self._say(f"blocks are not restored: {error}")
            self._loaded = [0] * len(self.orders)
        self.seconds = time.perf_counter() - started
        with self._changed:
            self._has_ended = True
            self._changed.notify_all()
        self._on_end(self)

    def _leased(self, order: LoadOrder, held: ExitStack) -> Lease | None:
        named = address(self._session, order.prefix, order.first_block, order.group)
        if named is None:  # degraded
            return None
        wanted = len(order.block_ids)
        with traced(order.prefix.trace):
            return held.enter_context(self._session.get(**named, max_blocks=wanted, deadline_s=order.deadline_s))

    def _copied(self, leases: Sequence[Lease | None]) -> list[int]:
        """Copy the leased blocks into the pool; return how many leading blocks of each order are there."""
        counts = [
            0 if lease is None else min(len(lease), len(order.block_ids))
            for order, lease in zip(self.orders, leases, strict=True)
        ]
        for group in dict.fromkeys(order.group for order in self.orders):
            sources = [
                (lease, order.block_ids[:count])
                for order, lease, count in zip(self.orders, leases, counts, strict=True)
                if lease is not None and count and order.group == group
            ]
            if not sources:
                continue
            copies = self._pages.of(group).load(sources, self._after)
            with self._changed:
                self._copies = copies
                self._changed.notify_all()
            copies.finish()
        return [count if lease is not None and lease.valid else 0 for lease, count in zip(leases, counts, strict=True)]
