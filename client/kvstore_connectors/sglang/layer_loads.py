"""Loads of a batch into SGLang's device pools, layer by layer, and the counter by which its forward waits for them.

Owns the leases of a batch from when it is made until `finish`. The forward's streams wait for a layer's copies, its
thread only until they are queued. As SGLang asks, a failure is never raised into a forward: `finish` reports it.
"""

from __future__ import annotations

import logging
import threading
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from kvstore_client.device import DeviceTransfers, LayerLoad
from kvstore_client.lease import Lease
from kvstore_connectors.sglang.device_pages import DevicePages

log = logging.getLogger(__name__)


class Copies(NamedTuple):
    """One device pool, and what copies to and from it."""

    pages: DevicePages
    transfers: DeviceTransfers


class HeldPages(NamedTuple):
    """Pages of one pool that wait to be loaded: together the leases are as many pages as there are for `indices`, token
    indices of the pool (a tensor on the device)."""

    pool: str
    leases: Sequence[Lease]
    indices: Any


class LayerBatch:
    """`ready` is an event that SGLang's streams have to pass before the pages of `held` are known and free."""

    def __init__(self, held: Sequence[HeldPages], pools: Mapping[str, Copies], ready: Any) -> None:
        self._held, self._pools, self._ready = held, pools, ready
        self._loads: list[tuple[tuple[int, ...], LayerLoad]] = []
        self._waited: dict[int, int] = {}  # by stream: the latest layer that it waits for
        self._failed = self._is_over = False
        self._begun = threading.Event()
        self._thread = threading.Thread(target=self._begin, name="kvstore-load-batch", daemon=True)
        self._thread.start()

    def wait(self, layer: int, stream: int) -> None:
        """What is queued on the stream (a CUstream's address) from now on runs after this layer of the model, and those
        before it, have come."""
        self._begun.wait()
        if self._is_over or self._failed or self._waited.get(stream, -1) >= layer:
            return
        for layers, load in self._loads:
            at = bisect_right(layers, layer) - 1
            if at >= 0:
                load.wait_quietly(at, stream)
        self._waited[stream] = layer

    def finish(self) -> bool:
        """Wait until nothing is copied any more, and release the leases. Whether all of it has come."""
        self._thread.join()
        if not self._is_over:
            for _, load in self._loads:
                if self._guarded(load.finish) is False:
                    self._failed = True
            release(self._held)
            self._is_over = True
        return not self._failed

    def _begin(self) -> None:
        self._guarded(self._load)
        self._begun.set()

    def _load(self) -> None:
        self._ready.synchronize()
        by_pool: dict[str, list[tuple[Lease, int, Sequence[int]]]] = defaultdict(list)
        for held in self._held:
            pages, start = self._pools[held.pool].pages.pages(held.indices), 0
            for lease in held.leases:
                by_pool[held.pool].append((lease, 0, pages[start : start + len(lease)]))
                start += len(lease)
        for name, placed in by_pool.items():
            pool = self._pools[name]
            self._loads.append((pool.pages.layers, pool.transfers.load_all(placed)))

    def _guarded(self, work: Callable[[], Any]) -> Any:
        try:
            return work()
        except Exception:
            log.exception("pages could not be loaded into the device")
            self._failed = True
            return None


class LayerCounter:
    """What SGLang's pools call before they hand out a layer; `set_consumer` says for which batch. Batches are numbered
    from 0; -1 is none. `current_stream` gives the calling thread's stream (a CUstream's address)."""

    def __init__(self, num_layers: int, current_stream: Callable[[], int]) -> None:
        self.num_layers = num_layers
        self.producer_index = self.consumer_index = -1
        self._current_stream = current_stream
        self._batches: dict[int, LayerBatch] = {}

    def add(self, batch: LayerBatch) -> int:
        self.producer_index += 1
        self._batches[self.producer_index] = batch
        return self.producer_index

    def set_consumer(self, index: int) -> None:
        self.consumer_index = index

    def wait_until(self, threshold: int) -> None:
        batch = self._batches.get(self.consumer_index)
        if batch is not None:
            batch.wait(threshold, self._current_stream())

    def finish(self, index: int) -> bool:
        """True for a batch that is not known: there is nothing to wait for."""
        batch = self._batches.get(index)
        has_come = batch is None or batch.finish()
        self._batches.pop(index, None)
        return has_come

    def reset(self) -> None:
        for index in list(self._batches):
            self.finish(index)
        self.producer_index = self.consumer_index = -1


def release(held: Sequence[HeldPages]) -> None:
    for pages in held:
        for lease in pages.leases:
            lease.release()
