"""Pages of one of SGLang's device pools (a DevicePoolEntry), as the pool that `DeviceTransfers` copies to and from.

A payload has the model's layers one after another, in each the buffers of that layer (K, V, states) in SGLang's order.
Owns nothing: the memory is SGLang's. Imports neither SGLang nor torch.
Invariant: a pool of which a buffer would not be copied, or of which a page has gaps, is refused.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from kvstore_client.device import DevicePool, PoolPart
from kvstore_connectors.sglang.pages import BackendMisconfigured


class DevicePages:
    """`layers[i]` is the model's layer of the pool's layer i, ascending. `form` names what its bytes mean: kind, layout
    and types of its buffers, and the `draft` model that has layers there. Raises BackendMisconfigured."""

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
        """The pages of these token indices, a tensor on device or host. ValueError for what are no whole pages."""
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
