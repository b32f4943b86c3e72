"""An engine's KV pool in host memory: whole blocks are gathered from it and loaded into it, layer by layer.

The module knows addresses and sizes, no tensor of vLLM's: `tensors` looks at those. A copy of many bytes has two
threads, while a second processor is idle. Invariants: no byte outside the pool is touched; copies run without the GIL;
a layer counts as loaded once it and all layers before it are.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvstore_client.lease import Lease
from kvstore_client.memory import Bytes
from kvstore_connectors.moments import HostMoment, LayerProgress
from kvstore_connectors.vllm.orders import Place
from kvstore_cuda.host_copies import address_of, copy_runs
from kvstore_cuda.side_thread import together


class PageCopies(NamedTuple):
    """The copies of payloads into a pool in host memory. `targets` and `sources` are int64[payloads, layers] addresses.
    `is_there` says which of them have a pool block; None if all have one.
    """

    targets: npt.NDArray[np.int64]
    sources: npt.NDArray[np.int64]
    is_there: npt.NDArray[np.bool_] | None


class PagedLayers:
    """The KV pool of an engine in host memory. `layers` are uint8[num_blocks, page_bytes] views of vLLM's tensors, all
    of one shape. If a block of the store covers several pool blocks, `slots` says for each of `layers` which of the
    block's pool blocks it uses, and one layer may come several times. It implements `Pages`.
    """

    is_on_device = False

    def __init__(self, layers: Sequence[Bytes], slots: Sequence[int] | None = None) -> None:
        if not layers or len({layer.shape for layer in layers}) != 1 or layers[0].ndim != 2:
            raise ValueError(f"layers of one shape are needed, got {sorted({layer.shape for layer in layers})}")
        if any(layer.strides[1] != 1 for layer in layers):
            raise ValueError("the bytes of a page are apart in memory")
        self._layers = tuple(layers)
        self._slots = None if slots is None else np.array(slots, np.intp)
        self._bases = np.array([address_of(layer) for layer in layers], np.int64)
        self._strides = np.array([layer.strides[0] for layer in layers], np.int64)
        self.others: Sequence[PagedLayers] = ()
        self.blocks, self._page_bytes = layers[0].shape
        self.block_bytes = len(layers) * self._page_bytes
        self._offsets = np.arange(len(layers), dtype=np.int64) * self._page_bytes

    def now(self) -> HostMoment:
        return HostMoment(time.perf_counter())

    def of(self, group: int) -> PagedLayers:
        return self.others[group - 1] if group else self

    def load(self, sources: Sequence[tuple[Lease, Sequence[Place]]], after: HostMoment) -> HostLoad:
        return HostLoad(self, sources)

    def gather(self, block_id: Place, destination: Bytes) -> None:
        """Copy all layers of the pool block `block_id` to `destination`, uint8[block_bytes]. A pool block with the id 0
        in a group of several is copied as zeros. Raises ValueError for another size, IndexError for another id.
        """
        ids = self._ids([block_id])[0]
        targets, sources = self._address(destination) + self._offsets, self._bases + ids * self._strides
        if self._slots is not None and not ids.all():
            destination.reshape(len(self), -1)[ids == 0] = 0
            targets, sources = targets[ids != 0], sources[ids != 0]
        copy_runs(targets, sources, self._page_bytes)

    def copies(self, payloads: Sequence[Bytes], block_ids: Sequence[Place]) -> PageCopies:
        """Return the copies of each payload into the pool block at the same position of `block_ids`, except where there
        is no such pool block. Raises as `gather` does.
        """
        ids, places = self._ids(block_ids), np.array([self._address(payload) for payload in payloads], np.int64)
        is_there = None if self._slots is None or ids.all() else ids != 0
        return PageCopies(self._bases + ids * self._strides, places[:, None] + self._offsets, is_there)

    def scatter(self, copies: PageCopies, layers: range) -> None:
        """Make the `copies` of the layers `layers`."""
        part = slice(layers.start, layers.stop)
        targets, sources = copies.targets[:, part].ravel(), copies.sources[:, part].ravel()
        if copies.is_there is not None:
            is_there = copies.is_there[:, part].ravel()
            targets, sources = targets[is_there], sources[is_there]
        copy_runs(targets, sources, self._page_bytes, shares=True)

    @property
    def runs(self) -> list[range]:
        """The numbers of the layers, in ranges that share one of vLLM's tensors."""
        ends = [at for at in range(1, len(self)) if self._layers[at] is not self._layers[at - 1]]
        return [range(begin, end) for begin, end in itertools.pairwise([0, *ends, len(self)])]

    def _ids(self, block_ids: Sequence[Place]) -> npt.NDArray[np.int64]:
        """Return the pool block of each layer, int64[block_ids, layers]. Block 0 of a table is no block: never read,
        never written.
        """
        ids = np.array(block_ids, np.int64)
        ids = np.repeat(ids[:, None], len(self), axis=1) if self._slots is None else ids[:, self._slots]
        if ids.size and not 0 <= ids.min() <= ids.max() < self.blocks:
            raise IndexError(f"pool blocks {ids.min()} to {ids.max()} of {self.blocks}")
        return ids

    def _address(self, payload: Bytes) -> int:
        if payload.nbytes != self.block_bytes or not payload.flags.c_contiguous:
            raise ValueError(f"a block has {self.block_bytes} bytes in one piece, not {payload.nbytes}")
        return address_of(payload)

    def decoding(self, is_decoding: bool) -> None:
        """Do nothing, because copies in host memory use no link to a device."""

    def hurried(self) -> AbstractContextManager[None]:
        return nullcontext()

    def close(self) -> None:
        return

    def __len__(self) -> int:
        """Return the number of layers."""
        return len(self._layers)


class HostLoad:
    """A load of blocks into a pool in host memory. The thread that calls `finish` makes the copies, of many bytes
    together with a second thread; other threads wait for the layer that they will read. It implements `PageLoad`.
    """

    def __init__(self, pool: PagedLayers, sources: Sequence[tuple[Lease, Sequence[Place]]]) -> None:
        self._pool = pool
        self._payloads = [held.payload(at) for held, ids in sources for at in range(len(ids))]
        self._block_ids = [block_id for _, ids in sources for block_id in ids]
        self._progress = LayerProgress()

    def wait(self, layer: int) -> None:
        self._progress.wait(layer)

    def finish(self) -> None:
        try:
            if self._payloads:
                copies = self._pool.copies(self._payloads, self._block_ids)
                work = partial(self._copy, copies, deque(self._pool.runs))
                together(work, len(self._payloads) * self._pool.block_bytes)
        finally:
            self._progress.end()

    def _copy(self, copies: PageCopies, left: deque[range]) -> None:
        """Copy the layers that are `left`. Another thread may take some of them meanwhile."""
        while left:
            try:
                layers = left.popleft()
            except IndexError:  # the other thread took the last ones
                return
            self._pool.scatter(copies, layers)
            self._progress.copied(layers)
