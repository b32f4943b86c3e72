"""The worker's half: restores blocks into the paged pool, has filled ones stored after a step, and reports what both
took.

Owns the loads under way, the blocks that failed, and the saver. Never does: raise at the engine for what the store
does. Invariant: blocks computed in a step on top of a failed load are not stored.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvstore_client.hooks.vllm.layout import PagedLayers
from kvstore_client.hooks.vllm.loads import GetSession, Load
from kvstore_client.hooks.vllm.orders import LoadOrder, LoadReport, SaveOrder, StepOrders, StepReport
from kvstore_client.hooks.vllm.saver import PutSession, Saver

IDLE_WAIT_S = 0.005  # vLLM asks in a loop while requests wait for nothing but their loads


class WorkerSession(PutSession, GetSession, Protocol):
    """The part of a session that this half uses."""


@dataclass(slots=True)
class Counts:
    """Since the start, for the log. `load_s` is by how much steps were held up."""

    loaded_blocks: int = 0
    failed_blocks: int = 0
    load_s: float = 0.0


class WorkerSide:
    """Made when vLLM registers its KV memory. `saver` is None for an engine that only reads."""

    def __init__(
        self,
        session: WorkerSession,
        pool: PagedLayers,
        saver: Saver | None,
        *,
        reuse_wait_s: float,
        say: Callable[[str], None],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._session, self._pool, self._saver = session, pool, saver
        self._reuse_wait_s = reuse_wait_s
        self._say = say
        self._clock = clock
        self._load: Load | None = None  # of this step
        self._failed: set[int] = set()
        self._reports: list[LoadReport] = []
        self._beside = 0  # loads under way beside steps
        self._ended: list[Load] = []  # of those
        self._changed = threading.Condition()  # of the two above
        self._step: tuple[StepOrders, float] | None = None
        self._compute_s = 0.0
        self.counts = Counts()

    def before_step(self, orders: StepOrders) -> None:
        """Before anything is written into the pool in this step."""
        if self._saver is not None and orders.ended:
            self._saver.let_go(orders.ended, self._reuse_wait_s)
        self._step, self._compute_s = (orders, self._clock()), 0.0

    def load(self, loads: Sequence[LoadOrder]) -> None:
        """Begin to restore what this step's attention will read."""
        self._load = Load(self._session, self._pool, loads, say=self._say).start()

    def wait_layer(self, layer: int) -> None:
        """Until a layer is restored. Failed blocks are kept for `take_failed`."""
        if self._load is not None:
            self._load.wait_layer(layer)

    def load_beside(self, orders: Sequence[LoadOrder]) -> None:
        """Begin to restore for requests that wait; `take_ended` names those that need not any more."""
        for order in orders:
            with self._changed:
                self._beside += 1
            Load(self._session, self._pool, [order], say=self._say, on_end=self._beside_ended).start()

    def save(self, saves: Sequence[SaveOrder]) -> None:
        """After the step's forward: its filled blocks may be stored."""
        waited_s = self._end_load()
        if self._step is not None:
            self._compute_s = max(self._clock() - self._step[1] - waited_s, 0.0)
        if self._saver is None:
            return
        for order in saves:
            if self._failed.isdisjoint(order.block_ids):
                self._saver.submit(order)

    def take_ended(self) -> set[str]:
        """Requests whose load beside the steps has ended, well or not; to be called before `take_failed`."""
        is_idle = self._step is not None and not self._step[0].tokens
        with self._changed:
            if is_idle and self._beside and not self._ended:
                self._changed.wait(IDLE_WAIT_S)
            ended, self._ended = self._ended, []
        for load in ended:
            self._count(load, load.seconds)
        return {load.orders[0].request_id for load in ended}

    def take_failed(self) -> set[int]:
        """Pool blocks whose load failed; vLLM computes them, and what depends on them, again."""
        self._end_load()
        failed, self._failed = self._failed, set()
        return failed

    def take_report(self) -> StepReport | None:
        """What this step took and which loads have ended; None where there is nothing to say."""
        loads, self._reports = tuple(self._reports), []
        orders = self._step[0] if self._step is not None else StepOrders()
        self._step = None
        if not loads and not orders.tokens:
            return None
        return StepReport(loads, orders.tokens, orders.attended, self._compute_s)

    def close(self, patience_s: float) -> str:
        """Store what waits, as far as the time reaches. One line for the log: what was done since the start."""
        counts = self.counts
        done = f"{counts.loaded_blocks} blocks restored in {counts.load_s:.3f} s, {counts.failed_blocks} could not be"
        if self._saver is None:
            return done
        self._saver.close(patience_s)
        return f"{done}; {self._saver.stored_blocks} stored, {self._saver.dropped_blocks} dropped"

    def _end_load(self) -> float:
        """Wait for this step's load, if there is one; how long the step was held up by it."""
        load, self._load = self._load, None
        if load is None:
            return 0.0
        load.join()
        self._count(load, load.waited_s)
        return load.waited_s

    def _count(self, load: Load, seconds: float) -> None:
        failed = load.failed()
        self._failed |= failed
        self.counts.failed_blocks += len(failed)
        self.counts.load_s += seconds
        wanted = sum(len(order.block_ids) for order in load.orders)
        for order, loaded in zip(load.orders, load.join(), strict=True):
            self.counts.loaded_blocks += loaded
            share_s = seconds * len(order.block_ids) / max(wanted, 1)
            self._reports.append(LoadReport(order.request_id, loaded, share_s))

    def _beside_ended(self, load: Load) -> None:
        with self._changed:
            self._beside -= 1
            self._ended.append(load)
            self._changed.notify_all()
