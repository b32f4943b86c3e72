"""Attention by our CUDA kernels, on torch's current stream.

Owns no memory but what torch allocates in a step. `launcher` is the device; anything that runs the kernels over the
tensors' addresses will do.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore_engine.kernels.cuda import (
    CacheShape,
    Crossover,
    Device,
    KernelRows,
    Launcher,
    NewTokens,
    PagedAttention,
    RopeCache,
)
from kvstore_engine.kernels.cuda.crossover import measured, pass_ratios, settled
from kvstore_engine.kernels.cuda.program import address_of
from kvstore_engine.model.config import ModelConfig
from kvstore_engine.model.metadata import UnsupportedModel
from kvstore_engine.torch_executor.attention import AttentionBackend, StepRows
from kvstore_engine.torch_executor.buckets import BUCKETS
from kvstore_engine.torch_executor.cache import Cache
from kvstore_engine.torch_executor.library import torch_library
from kvstore_engine.torch_executor.prefix_window import PrefixWindow


class KernelAttention(AttentionBackend):
    """`stream()`: the address of the stream that the step's other work is queued on. `window`: of its L2 cache."""

    def __init__(
        self, cache: Cache, launcher: Launcher, stream: Callable[[], int], window: PrefixWindow | None = None,
        crossover: Crossover | None = None,
    ) -> None:  # fmt: skip
        """UnsupportedModel for heads that the kernels were not made for."""
        self._cache, self._stream, self._window, self._torch = cache, stream, window, torch_library()
        shape = kernel_shape(cache.config, cache.block_tokens, cache.kv_dtype)
        self.attention = PagedAttention(launcher, shape, crossover=crossover)
        self._ropes = {
            rope: RopeCache(launcher, shape, rotary=rope.dimensions, interleaved=not rope.neox)
            for rope in set(cache.ropes)
        }

    def begin(self, tables: Iterable[npt.NDArray[np.int32]]) -> Hashable:
        return self._window.choose(tables) if self._window else None

    def write(self, layer: int, queries: Any, keys: Any, values: Any, rows: StepRows) -> Any:
        rotated = self._torch.empty(queries.shape, dtype=queries.dtype, device=queries.device)
        strides = {"query_stride": queries.stride(0), "key_stride": keys.stride(0), "value_stride": values.stride(0)}
        tokens = NewTokens(rows.count, queries, keys, values, rows.positions, rows.slots, **strides)
        rope = self._ropes[self._cache.ropes[layer]]
        rope.write(tokens, rotated, self._planes(layer), self._cache.turns(layer), stream=self._stream())
        return rotated

    def attend(self, layer: int, queries: Any, rows: StepRows) -> Any:
        torch, kind = self._torch, self._cache.kinds[layer]
        output = torch.empty_like(queries)
        version = self.attention.version(rows.count, rows.longest_context, kind)
        scratch = None
        if version == 2:
            needed = self.attention.scratch_bytes(rows.count, rows.longest_context, kind)
            scratch = torch.empty(needed, dtype=torch.uint8, device=queries.device)
        self._cache.arrivals.wait(layer)
        described = KernelRows(
            rows.count, rows.sequences, rows.contexts, rows.tables, rows.tables.stride(0), rows.longest_context
        )
        if self._window:
            self._window.place(address_of(self._planes(layer)[0]), self._stream())
        self.attention.attend(
            queries, output, self._planes(layer), described,
            kind=kind, scratch=scratch, version=version, stream=self._stream(),
        )  # fmt: skip
        return output

    def _planes(self, layer: int) -> tuple[Any, Any]:
        return self._cache.planes[2 * layer], self._cache.planes[2 * layer + 1]


def crossover_on(device: Device, cache: Cache) -> Crossover:
    """Where attention over `cache`, which is on `device`, becomes one pass: by `crossover.settled`, measured on the
    first layer's planes with the rows that decode steps have. Before they are in use. Raises as `kernel_shape`."""
    attention = PagedAttention(device, kernel_shape(cache.config, cache.block_tokens, cache.kv_dtype))
    planes = cache.planes

    def place(array: npt.NDArray[np.generic]) -> Any:
        return torch_library().from_numpy(array).to(planes.device)

    def measure() -> Crossover:
        ratios = pass_ratios(
            attention, (planes[0], planes[1]), place, device.seconds, blocks=planes.shape[1], rows=BUCKETS
        )
        return measured(attention, ratios)

    return settled(attention, device.architecture, f"{device.name}, {device.multiprocessors}", measure)


def kernel_shape(config: ModelConfig, block_tokens: int, kv_dtype: str) -> CacheShape:
    """The kernels' shape of a model's cache. UnsupportedModel for heads that they were not made for."""
    try:
        return CacheShape(config.heads, config.kv_heads, config.head_dim, block_tokens, cache=kv_dtype)
    except ValueError as error:
        raise UnsupportedModel(f"the CUDA kernels cannot run this model: {error}") from None
