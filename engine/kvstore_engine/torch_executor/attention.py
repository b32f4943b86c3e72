"""Attention over the paged cache: its contract, the engine's CUDA kernels, and plain torch on the processor.

The caller guarantees that positions are below the longest context, and that slots and block ids are inside the pool.
The implementation MUST NOT let keys or values past a row's own position change that row, and MUST NOT store rows whose
slot is negative. Work is queued on torch's current stream.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore_engine.kernels.cuda.attention import AttentionCrossover, KernelRows, PagedAttention
from kvstore_engine.kernels.cuda.crossover import measured, pass_ratios, settled
from kvstore_engine.kernels.cuda.device import Device
from kvstore_engine.kernels.cuda.program import CacheShape, Launcher, address_of
from kvstore_engine.kernels.cuda.rope import NewTokens, RopeCache
from kvstore_engine.kernels.layout import LayerAttention
from kvstore_engine.model.config import ModelConfig
from kvstore_engine.model.metadata import UnsupportedModel
from kvstore_engine.torch_executor.cache import Cache
from kvstore_engine.torch_executor.library import torch_library
from kvstore_engine.torch_executor.prefix_window import PrefixWindow
from kvstore_engine.torch_executor.recordings import BUCKETS


@dataclass(frozen=True, slots=True)
class StepRows:
    """The rows (tokens) of a step as int32 tensors on the device: positions, slots (places in the pool), the line of
    `tables` with the blocks of the row's sequence, and contexts (the number of tokens up to the row's own). Padding
    rows have slot -1 and context 0. No context exceeds `longest_context`.
    """

    count: int
    positions: Any
    slots: Any
    sequences: Any
    contexts: Any
    tables: Any
    longest_context: int

    def select(self, rows: Any) -> StepRows:
        """Return only the rows whose numbers are in the integer tensor `rows`, to compute attention for them alone.
        Their K and V must have been written.
        """
        return replace(self, count=len(rows), sequences=self.sequences[rows], contexts=self.contexts[rows])


class AttentionBackend(ABC):
    """An object that writes K and V to one pool and computes attention over it, layer by layer. `layer` is the number
    of a layer.
    """

    def begin(self, tables: Iterable[npt.NDArray[np.int32]]) -> Hashable:
        """Prepare a step that is about to be queued. `tables` has for each sequence the numbers of the whole blocks
        before its new tokens. Return a value: a recorded step may be replayed for this step only if `begin` returned an
        equal value when it was recorded.
        """
        return None

    @abstractmethod
    def write(self, layer: int, queries: Any, keys: Any, values: Any, rows: StepRows) -> Any:
        """Rotate `queries` and `keys` by the rows' positions, and write keys and values to the cache. All are bf16
        [rows, heads, head_dim]. Return the rotated queries.
        """

    @abstractmethod
    def attend(self, layer: int, queries: Any, rows: StepRows) -> Any:
        """Return the result of attention for the rotated `queries`, bf16 [rows, heads, head_dim], over the cached K and
        V. It has the shape of the queries.
        """


class KernelAttention(AttentionBackend):
    """Attention by the engine's CUDA kernels. `stream()` returns the address of the stream on which the step is queued.
    `window`, if not None, chooses a shared prefix to keep in the L2 cache.
    """

    def __init__(
        self, cache: Cache, launcher: Launcher, stream: Callable[[], int], window: PrefixWindow | None = None,
        crossover: AttentionCrossover | None = None,
    ) -> None:  # fmt: skip
        """Make the attention over `cache`. Raises UnsupportedModel if the kernels do not support the model's heads."""
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


def crossover_on(device: Device, cache: Cache) -> AttentionCrossover:
    """Return the load, in CUDA thread blocks for each multiprocessor, from which on attention over `cache` on `device`
    runs in one pass instead of in partitions. An earlier measurement is used, or one is made in the memory of the first
    layer, which must not be in use yet. Raises UnsupportedModel.
    """
    attention = PagedAttention(device, kernel_shape(cache.config, cache.block_tokens, cache.kv_dtype))
    planes = cache.planes

    def place(array: npt.NDArray[np.generic]) -> Any:
        return torch_library().from_numpy(array).to(planes.device)

    def measure() -> AttentionCrossover:
        ratios = pass_ratios(
            attention, (planes[0], planes[1]), place, device.seconds, blocks=planes.shape[1], rows=BUCKETS
        )
        return measured(attention, ratios)

    return settled(attention, device.architecture, f"{device.name}, {device.multiprocessors}", measure)


def kernel_shape(config: ModelConfig, block_tokens: int, kv_dtype: str) -> CacheShape:
    """Return the shape of a model's K/V cache for the CUDA kernels. Raises UnsupportedModel if the kernels do not
    support the model's heads.
    """
    try:
        return CacheShape(config.heads, config.kv_heads, config.head_dim, block_tokens, cache=kv_dtype)
    except ValueError as error:
        raise UnsupportedModel(f"the CUDA kernels cannot run this model: {error}") from None


class ReferenceAttention(AttentionBackend):
    """Attention in plain torch over `cache`, with which tests compare the CUDA kernels. It is slow, computes in
    float32, and gives zeros for padding rows.
    """

    def __init__(self, cache: Cache) -> None:
        self._cache, self._torch = cache, torch_library()

    def write(self, layer: int, queries: Any, keys: Any, values: Any, rows: StepRows) -> Any:
        cache = self._cache
        turned = cache.turns(layer)[rows.positions.long()].unsqueeze(1)
        kept = (rows.slots >= 0).nonzero().flatten()
        slots = rows.slots[kept].long()
        for plane, new in zip(cache.rows(layer), (self._rotated(layer, keys, turned), values), strict=True):
            plane.store(slots, new[kept])
        return self._rotated(layer, queries, turned).to(queries.dtype)

    def attend(self, layer: int, queries: Any, rows: StepRows) -> Any:
        self._cache.arrivals.wait(layer)
        output = self._torch.zeros_like(queries)
        sequences, contexts = rows.sequences.tolist(), rows.contexts.tolist()
        for sequence in sorted(set(sequences)):
            own = [row for row, each in enumerate(sequences) if each == sequence and contexts[row]]
            if own:
                seen = rows.contexts[own].long()
                output[own] = self._sequence(layer, queries[own], rows.tables[sequence], seen).to(output.dtype)
        return output

    def _sequence(self, layer: int, queries: Any, table: Any, contexts: Any) -> Any:
        """Return float32 [rows, heads, head_dim] of one sequence's rows."""
        torch, cache = self._torch, self._cache
        kind: LayerAttention = cache.kinds[layer]
        positions = torch.arange(int(contexts.max()))
        slots = table.long()[positions // cache.block_tokens] * cache.block_tokens + positions % cache.block_tokens
        group = cache.config.heads // cache.config.kv_heads
        keys, values = (plane.load(slots).repeat_interleave(group, 1) for plane in cache.rows(layer))
        scores = torch.einsum("rhd,thd->rht", queries.float(), keys) * (kind.scale or queries.shape[2] ** -0.5)
        if kind.softcap:
            scores = kind.softcap * torch.tanh(scores / kind.softcap)
        last = contexts[:, None]
        visible = (positions >= last - kind.window) | (positions < kind.sink_tokens) if kind.window else True
        hidden = ~((positions < last) & visible)
        weights = torch.softmax(scores.masked_fill(hidden[:, None], float("-inf")), -1)
        return torch.einsum("rht,thd->rhd", weights, values)

    def _rotated(self, layer: int, heads: Any, turned: Any) -> Any:
        """Return the rotated heads, float32; `turned`: [rows, 1, pairs, 2] of cosines and sines."""
        torch, result = self._torch, heads.float().clone()
        rope = self._cache.ropes[layer]
        half = rope.dimensions // 2
        pairs = (slice(0, half), slice(half, 2 * half)) if rope.neox else (slice(0, 2 * half, 2), slice(1, 2 * half, 2))
        x, y = heads[..., pairs[0]].float(), heads[..., pairs[1]].float()
        cosine, sine = torch.unbind(turned, -1)
        result[..., pairs[0]], result[..., pairs[1]] = x * cosine - y * sine, y * cosine + x * sine
        return result
