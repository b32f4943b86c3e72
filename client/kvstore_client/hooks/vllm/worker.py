"""The worker's half: restores blocks into the paged pool before a step, has filled ones stored after it.

Owns the order lease, copy, check; the blocks that failed; and the saver. Never does: raise at the engine for what the
store does. Invariants: no byte is read outside a lease, and a block counts as loaded only if the lease still held
*after* it was copied; blocks computed in a step on top of a failed load are not stored.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from kvstore_client.hooks.vllm.identity import address
from kvstore_client.hooks.vllm.layout import Bytes, PagedLayers
from kvstore_client.hooks.vllm.orders import LoadOrder, SaveOrder, StepOrders
from kvstore_client.hooks.vllm.saver import PutSession, Saver
from kvstore_proto.errors import KVStoreError


class HeldBlocks(Protocol):
    """The part of a lease that is used."""

    @property
    def valid(self) -> bool: ...
    def __len__(self) -> int: ...
    def payload(self, block: int) -> Bytes: ...


class WorkerSession(PutSession, Protocol):
    """The part of a session that this half uses."""

    def get(
        self,
        tokens: Any = None,
        *,
        keys: Any = None,
        max_blocks: int | None = None,
        deadline_s: float | None = None,
    ) -> AbstractContextManager[HeldBlocks]: ...


@dataclass(slots=True)
class Counts:
    """Since the start, for the log."""

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
        load_deadline_s: float,
        reuse_wait_s: float,
        say: Callable[[str], None],
    ) -> None:
        self._session, self._pool, self._saver = session, pool, saver
        self._load_deadline_s, self._reuse_wait_s = load_deadline_s, reuse_wait_s
        self._say = say
        self._failed: set[int] = set()
        self.counts = Counts()

    def before_step(self, orders: StepOrders) -> None:
        """Before anything is written into the pool in this step."""
        if self._saver is not None and orders.ended:
            self._saver.let_go(orders.ended, self._reuse_wait_s)

    def load(self, loads: Sequence[LoadOrder]) -> None:
        """Restore what this step's attention will read. Failed blocks are kept for `take_failed`."""
        started = time.perf_counter()
        for order in loads:
            wanted = len(order.block_ids)
            loaded = self._load(order)
            self.counts.loaded_blocks += loaded
            self.counts.failed_blocks += wanted - loaded
            self._failed.update(order.block_ids[loaded:])
        self.counts.load_s += time.perf_counter() - started

    def save(self, saves: Sequence[SaveOrder]) -> None:
        """After the step's forward: its filled blocks may be stored."""
        if self._saver is None:
            return
        for order in saves:
            if self._failed.isdisjoint(order.block_ids):
                self._saver.submit(order)

    def take_failed(self) -> set[int]:
        """Pool blocks whose load failed in this step; vLLM computes them, and what depends on them, again."""
        failed, self._failed = self._failed, set()
        return failed

    def close(self, patience_s: float) -> str:
        """Store what waits, as far as the time reaches. One line for the log: what was done since the start."""
        counts = self.counts
        done = f"{counts.loaded_blocks} blocks restored in {counts.load_s:.3f} s, {counts.failed_blocks} could not be"
        if self._saver is None:
            return done
        self._saver.close(patience_s)
        return f"{done}; {self._saver.stored_blocks} stored, {self._saver.dropped_blocks} dropped"

    def _load(self, order: LoadOrder) -> int:
        """Leading blocks of the order that are in the pool now."""
        wanted = len(order.block_ids)
        try:
            named = address(self._session, order.prefix, order.first_block)
            if named is None:
                return 0
            with self._session.get(**named, max_blocks=wanted, deadline_s=self._load_deadline_s) as lease:
                count = min(len(lease), wanted)
                for index in range(count):
                    self._pool.scatter(lease.payload(index), order.block_ids[index])
                return count if lease.valid else 0
        except KVStoreError as error:
            self._say(f"blocks are not restored: {error}")
            return 0
