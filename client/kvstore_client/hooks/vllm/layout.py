"""vLLM's paged KV memory as bytes: one storage block is one pool block of every layer, layers in order.

Owns gathering and scattering whole blocks. Never looks inside a block: vLLM's CPU kernels pack keys and values in an
order of their own instruction set, so no slice of a block means anything elsewhere (the fingerprint names the order).
Invariant: `layers[i][b]` is contiguous; copies run without the GIL.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]


class PagedLayers:
    """`layers`: uint8[num_blocks, page_bytes] views of vLLM's tensors, all of one shape."""

    def __init__(self, layers: Sequence[Bytes]) -> None:
        if not layers or len({layer.shape for layer in layers}) != 1 or layers[0].ndim != 2:
            raise ValueError(f"layers of one shape are needed, got {sorted({layer.shape for layer in layers})}")
        self._layers = tuple(layers)
        self.blocks, self._page_bytes = layers[0].shape
        self.block_bytes = len(layers) * self._page_bytes

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

    def __len__(self) -> int:
        """Layers."""
        return len(self._layers)
