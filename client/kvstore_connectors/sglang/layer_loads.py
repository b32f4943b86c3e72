"""Copies between SGLang's device pools and leases, by `DeviceTransfers`: the pages of a pool, loads of a batch layer by
layer with the counter that makes its forward wait for them, and stores that run one after another.

A payload has the model's layers one after another, in each the buffers of that layer (K, V, states) in SGLang's order.
The module owns the leases of a batch until `finish`, and the threads; the memory is SGLang's. The forward's streams
wait for a layer's copies, its thread only until they are queued. A failure is never raised into a forward, as SGLang
requires: `finish` reports it. The module imports no SGLang, and torch only to ask other ranks. Invariant: a pool is
refused if one of its buffers would not be copied, or if one of its pages has gaps.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import threading
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from queue import Empty, Queue
from typing import Any, NamedTuple

from kvstore_client.device import DevicePool, DeviceTransfers, LayerLoad, PoolPart
from kvstore_client.lease import Lease
from kvstore_connectors.sglang.pages import BackendMisconfigured

log = logging.getLogger(__name__)


class PageCopies(NamedTuple):
    """One of SGLang's device pools with its copies: `pages` describes the pool, and `transfers` copies to and from
    it.
    """

    pages: SglangDevicePages
    transfers: DeviceTransfers


class HeldPages(NamedTuple):
    """Leased pages that wait to be loaded into one device pool. The leases together have one block for each page.
    `indices` are the indices of the pages' tokens in the pool, as a tensor on the device.
    """

    pool: str
    leases: Sequence[Lease]
    indices: Any


class LayerBatch:
    """The loads for one batch of SGLang's requests: a thread copies the leased pages `held` into device pools, layer by
    layer. `ready` is a CUDA event; after it the engine no longer uses the target pages, and their indices can be read.
    """

    def __init__(self, held: Sequence[HeldPages], pools: Mapping[str, PageCopies], ready: Any) -> None:
        self._held, self._pools, self._ready = held, pools, ready
        self._loads: list[tuple[tuple[int, ...], LayerLoad]] = []
        self._waited: dict[int, int] = {}  # by stream: the latest layer that it waits for
        self._failed = self._is_over = False
        self._begun = threading.Event()
        self._thread = threading.Thread(target=self._begin, name="kvstore-load-batch", daemon=True)
        self._thread.start()

    def wait(self, layer: int, stream: int) -> None:
        """Make work that is queued on `stream` (a CUstream's address) from now on run after the model's layer number
        `layer`, and the layers before it, have been copied.
        """
        self._begun.wait()
        if self._is_over or self._failed or self._waited.get(stream, -1) >= layer:
            return
        for layers, load in self._loads:
            at = bisect_right(layers, layer) - 1
            if at >= 0:
                load.wait_quietly(at, stream)
        self._waited[stream] = layer

    def finish(self) -> bool:
        """Wait until all copies of the batch have ended, and release the leases. Return True if all pages were
        loaded.
        """
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
    """The counter that SGLang's pools call before they hand out a layer, so that a forward pass waits until the layer
    is loaded. `set_consumer` names the batch that the forward pass computes, by a number from 0 on, or -1 for no batch.
    `current_stream` returns the calling thread's stream (a CUstream's address).
    """

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
        """End the loads of batch number `index`, and return True if all its pages were loaded. Return True for an
        unknown batch.
        """
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


class SglangDevicePages:
    """The pages of one of SGLang's device pools, described for copies. `layers[i]` is the number of the model's layer
    that is layer i of the pool, in ascending order. `form` is a text that describes the bytes of a page: kind, layout
    and types of the buffers, and the name of the `draft` model that has layers in the pool. Raises
    BackendMisconfigured.
    """

    def __init__(self, entry: Any, draft: str = "") -> None:
        self.entry = entry
        self.name = str(entry.name)
        self.layers: tuple[int, ...] = tuple(sorted(entry.layer_mapping))
        first, (_, _, page_bytes) = entry.kv_buffer[0], entry.buffer_meta[0][0]
        self._rows = page_bytes // (first.nbytes // first.shape[0])  # of a page: one for each token, or one in all
        buffers = [_indices(entry.layer_mapping[layer]) for layer in self.layers]
        for component in entry.buffer_meta:
            if sorted(index for each in buffers for index in each) != list(range(len(component))):
                raise BackendMisconfigured(f"SGLang's pool {self.name} has buffers that belong to no layer, or to two")
        pages = min(buffer.shape[0] for buffer in entry.kv_buffer) // self._rows
        self.pool = DevicePool([self._parts(each) for each in buffers], pages)
        self.form = "/".join(filter(None, [self._described(buffers), draft]))

    def pages(self, indices: Any) -> list[int]:
        """Return the page numbers of the token `indices`, a tensor on device or host. Raises ValueError if they do not
        form whole pages.
        """
        return [row // self._rows for row in self.entry.prepare_locations(indices)]

    def _parts(self, buffers: Sequence[int]) -> list[PoolPart]:
        parts = []
        for component in self.entry.buffer_meta:
            for address, row_stride, nbytes in (component[index] for index in buffers):
                if self._rows > 1 and row_stride * self._rows != nbytes:
                    raise BackendMisconfigured(f"pages of SGLang's pool {self.name} have gaps between their tokens")
                parts.append(PoolPart(address, row_stride * self._rows, nbytes))
        return parts

    def _described(self, buffers: Sequence[Sequence[int]]) -> str:
        entry = self.entry
        kind = entry.device_pool
        pool = (type(kind).__name__, getattr(kind, "kv_cache_layout", ""), str(getattr(kind, "dtype", "")))
        rows = [
            [(str(group[index].dtype), tuple(group[index].shape[1:])) for group in entry.components for index in each]
            for each in buffers
        ]
        whole = repr((pool, entry.page_size, self._rows, self.layers, buffers, rows))
        digest = hashlib.blake2b(whole.encode(), digest_size=16).hexdigest()
        return f"{self.name}/device/{len(self.layers)} layers/{self.pool.block_bytes} bytes/{digest}"


def _indices(mapped: int | Sequence[int]) -> list[int]:
    return [mapped] if isinstance(mapped, int) else list(mapped)


class Offloads:
    """A queue of functions that store pages, which one thread runs one after another until `close`."""

    def __init__(self) -> None:
        self._work: Queue[Callable[[], bool] | None] = Queue()
        self._results: Queue[bool] = Queue()
        self._thread = threading.Thread(target=self._run, name="kvstore-offload", daemon=True)
        self._thread.start()

    def put(self, store: Callable[[], bool]) -> None:
        self._work.put(store)

    def completed(self) -> int:
        """Return the number of finished stores whose results were not taken yet."""
        return self._results.qsize()

    def pop(self) -> bool:
        """Remove and return the result of the oldest finished store. Raises queue.Empty if there is none."""
        return self._results.get_nowait()

    def settle(self) -> None:
        """Wait until all queued stores have ended, and drop their results."""
        self._work.join()
        with contextlib.suppress(Empty):
            while True:
                self._results.get_nowait()

    def close(self) -> None:
        """Wait for the queued stores and end the thread. A second call does nothing."""
        if self._thread.is_alive():
            self.settle()
            self._work.put(None)
            self._thread.join()

    def _run(self) -> None:
        while (store := self._work.get()) is not None:
            is_stored = False
            try:
                is_stored = store()
            except Exception:
                log.exception("pages could not be stored")
            self._results.put(is_stored)
            self._work.task_done()


class Ranks:
    """The ranks (processes of one model) that must give SGLang the same answer about a hit, so that SGLang's radix
    trees agree on it. `params` is SGLang's CacheInitParams, with its process groups for the CPU. The object closes none
    of them.
    """

    def __init__(self, params: Any) -> None:
        import torch

        attention = [group for group in (params.attn_cp_cache_group, params.attn_tp_cache_group) if _size(group) > 1]
        self._groups = attention or [group for group in (params.tp_cache_group,) if _size(group) > 1]
        tensor = params.attn_tp_cache_group or params.tp_cache_group
        self.tp_size = _size(tensor)
        self.tp_rank = torch.distributed.get_rank(group=tensor) if self.tp_size > 1 else 0

    def all(self, is_so: bool) -> bool:
        """Return True if `is_so` is True on every rank. Every rank has to call this, and it waits for all ranks."""
        import torch

        flag = torch.tensor([int(is_so)], dtype=torch.int)
        for group in self._groups:
            torch.distributed.all_reduce(flag, op=torch.distributed.ReduceOp.MIN, group=group)
        return bool(flag.item())


def _size(group: Any) -> int:
    import torch

    if group is None or not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return 1
    return int(torch.distributed.get_world_size(group=group))
