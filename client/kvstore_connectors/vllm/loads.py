"""Loads under way: threads that lease blocks and have them copied into the paged pool, layer by layer.

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

from kvstore_connectors.vllm.identity import KeySource, address
from kvstore_connectors.vllm.orders import LoadOrder
from kvstore_connectors.vllm.pages import BlockLoad, HeldBlocks, Pages


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
    """Some orders, in a thread of their own from `start` on. Made by the engine's thread: copies into pool blocks begin
    behind what that has begun by now. `on_end` is called in the load's thread, at the end."""

    def __init__(
        self,
        session: GetSession,
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
        self._copies: BlockLoad | None = None  # once blocks are leased
        self._has_ended = False

    def start(self) -> Load:
        threading.Thread(target=self._run, name="kvstore-vllm-load", daemon=True).start()
        return self

    def wait_layer(self, layer: int) -> None:
        """Until the engine may be given work that reads a layer; after that of a load that failed nothing more will
        come."""
        started = time.perf_counter()
        with self._changed:
            self._changed.wait_for(lambda: self._copies is not None or self._has_ended)
        if self._copies is not None:
            self._copies.wait(layer)
        self.waited_s += time.perf_counter() - started

    def join(self) -> list[int]:
        """Wait for the end: how many leading blocks of each order were loaded."""
        started = time.perf_counter()
        with self._changed:
            self._changed.wait_for(lambda: self._has_ended)
        self.waited_s += time.perf_counter() - started
        return self._loaded

    def failed(self) -> set[int]:
        """Pool blocks that were not loaded. For a load that has ended."""
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
        sources = [
            (lease, order.block_ids[:count])
            for order, lease, count in zip(self.orders, leases, counts, strict=True)
            if lease is not None and count
        ]
        if not sources:
            return counts
        copies = self._pages.load(sources, self._after)
        with self._changed:
            self._copies = copies
            self._changed.notify_all()
        copies.finish()
        return [count if lease is not None and lease.valid else 0 for lease, count in zip(leases, counts, strict=True)]
