"""vLLM's paged KV memory as bytes: one storage block is one pool block of every layer, layers in order.

Owns gathering and scattering whole blocks in host memory. Never looks inside a block: vLLM's CPU kernels pack keys and
values in an order of their own instruction set, so no slice of a block means anything elsewhere (the fingerprint names
the order).
Invariant: `layers[i][b]` is contiguous; copies run without the GIL.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import numpy as np

from kvstore_client.memory import Bytes
from kvstore_connectors.layer_progress import LayerProgress
from kvstore_connectors.moments import HostMoment
from kvstore_connectors.vllm.pages import HeldBlocks


class PagedLayers:
    """`layers`: uint8[num_blocks, page_bytes] views of vLLM's tensors, all of one shape. Implements `Pages`."""

    is_on_device = False

    def __init__(self, layers: Sequence[Bytes]) -> None:
        if not layers or len({layer.shape for layer in layers}) != 1 or layers[0].ndim != 2:
            raise ValueError(f"layers of one shape are needed, got {sorted({layer.shape for layer in layers})}")
        self._layers = tuple(layers)
        self.blocks, self._page_bytes = layers[0].shape
        self.block_bytes = len(layers) * self._page_bytes

    def now(self) -> HostMoment:
        return HostMoment(time.perf_counter())

    def load(self, sources: Sequence[tuple[HeldBlocks, Sequence[int]]], after: HostMoment) -> HostLoad:
        return HostLoad(self, sources)

    def gather(self, block_id: int, destination: Bytes) -> None:
        """Copy a pool block of all layers to uint8[block_bytes]."""
        start = 0
        for layer in self._layers:
            np.copyto(destination[start : start + self._page_bytes], layer[block_id])
            start += self._page_bytes

    def scatter(self, source: Bytes, block_id: int, layer: int) -> None:
        """The reverse, of one layer."""
        start = layer * self._page_bytes
        np.copyto(self._layers[layer][block_id], source[start : start + self._page_bytes])

    def decoding(self, is_decoding: bool) -> None:
        """Copies in host memory have no link to leave."""

    def hurried(self) -> AbstractContextManager[None]:
        return nullcontext()

    def close(self) -> None:
        return

    def __len__(self) -> int:
        """Layers."""
        return len(self._layers)


class HostLoad:
    """The thread that calls `finish` copies; others wait for the layer that they will read. Implements `BlockLoad`."""

    def __init__(self, pool: PagedLayers, sources: Sequence[tuple[HeldBlocks, Sequence[int]]]) -> None:
        self._pool = pool
        self._copies = [(held.payload(at), block_id) for held, ids in sources for at, block_id in enumerate(ids)]
        self._progress = LayerProgress()

    def wait(self, layer: int) -> None:
        if not self._progress.is_over(layer):
            self._progress.wait(lambda: self._progress.is_over(layer))

    def finish(self) -> None:
        try:
            for layer in range(len(self._pool)):
                for payload, block_id in self._copies:
                    self._pool.scatter(payload, block_id, layer)
                self._progress.advance()
        finally:
            self._progress.end()
