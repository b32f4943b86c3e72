"""Loads under way: threads that lease blocks and copy them into the paged pool, layer by layer.

Owns the order lease, copy, check. Invariants: no byte is read outside a lease; a block counts as loaded only if the
lease still held *after* it was copied; once a load has ended, nothing of it is written any more; nothing is raised at
the engine.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any, Protocol

from kvstore_client.hooks.layer_progress import LayerProgress
from kvstore_client.hooks.vllm.identity import KeySource, address
from kvstore_client.hooks.vllm.layout import Bytes, PagedLayers
from kvstore_client.hooks.vllm.orders import LoadOrder


class HeldBlocks(Protocol):
    """The part of a lease that is used."""

    @property
    def valid(self) -> bool: ...
    def __len__(self) -> int: ...
    def payload(self, block: int) -> Bytes: ...


class GetSession(KeySource, Protocol):
    """The part of a session that restores."""

    def get(
        self,
        tokens: Any = None,
        *,
        keys: Any = None,
        max_blocks: int | None = None,
        deadline_s: float | None = None,
    ) -> AbstractContextManager[HeldBlocks]: ...


class Load:
    """Some orders, in a thread of their own from `start` on. `on_end` is called in that thread, at the end."""

    def __init__(
        self,
        session: GetSession,
        pool: PagedLayers,
        orders: Sequence[LoadOrder],
        *,
        say: Callable[[str], None],
        on_end: Callable[[Load], None] = lambda load: None,
    ) -> None:
        self.orders = orders
        self.seconds = 0.0  # until the end
        self.waited_s = 0.0  # by those who called `wait_layer` or `join`
        self._session, self._pool, self._say, self._on_end = session, pool, say, on_end
        self._loaded = [0] * len(orders)
        self._progress = LayerProgress()

    def start(self) -> Load:
        threading.Thread(target=self._run, name="kvstore-vllm-load", daemon=True).start()
        return self

    def wait_layer(self, layer: int) -> None:
        """Until a layer may be read; after that of a load that failed nothing more will come."""
        if not self._progress.is_over(layer):
            self._wait(lambda: self._progress.is_over(layer))

    def join(self) -> list[int]:
        """Wait for the end: how many leading blocks of each order were loaded."""
        if not self._progress.has_ended:
            self._wait(lambda: self._progress.has_ended)
        return self._loaded

    def failed(self) -> set[int]:
        """Pool blocks that were not loaded. For a load that has ended."""
        ends = zip(self.orders, self._loaded, strict=True)
        return {block for order, loaded in ends for block in order.block_ids[loaded:]}

    def _wait(self, happened: Callable[[], bool]) -> None:
        started = time.perf_counter()
        self._progress.wait(happened)
        self.waited_s += time.perf_counter() - started

    def _run(self) -> None:
        started = time.perf_counter()
        try:
            with ExitStack() as held:
                self._loaded = self._copied([self._leased(order, held) for order in self.orders])
        except Exception as error:  # a request the daemon refuses, a bug here: the blocks are computed
            self._say(f"blocks are not restored: {error}")
            self._loaded = [0] * len(self.orders)
        self.seconds = time.perf_counter() - started
        self._progress.end()
        self._on_end(self)

    def _leased(self, order: LoadOrder, held: ExitStack) -> HeldBlocks | None:
        named = address(self._session, order.prefix, order.first_block)
        if named is None:  # degraded
            return None
        wanted = len(order.block_ids)
        return held.enter_context(self._session.get(**named, max_blocks=wanted, deadline_s=order.deadline_s))

    def _copied(self, leases: Sequence[HeldBlocks | None]) -> list[int]:
        """How many leading blocks of each order are in the pool."""
        counts = [
            0 if lease is None else min(len(lease), len(order.block_ids))
            for order, lease in zip(self.orders, leases, strict=True)
        ]
        copies = [
            (lease.payload(index), block_id)
            for order, lease, count in zip(self.orders, leases, counts, strict=True)
            if lease is not None
            for index, block_id in enumerate(order.block_ids[:count])
        ]
        for layer in range(len(self._pool)):
            for payload, block_id in copies:
                self._pool.scatter(payload, block_id, layer)
            self._progress.advance()
        return [count if lease is not None and lease.valid else 0 for lease, count in zip(leases, counts, strict=True)]
