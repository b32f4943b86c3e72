"""A pool's planes and a model's layers as attention sees them: stored rows, tables of turns, kinds of layers, arrivals.

The module owns the tables of turns and the list of loads under way: before a step reads a layer, its stream waits until
that layer has come. It does not compute, nor wait itself for a copy. Stored rows are the slow twins of csrc/elements.h
and csrc/cache_layout.h, for attention in plain torch. A slot is a token's place in a plane: block id * block_tokens +
place in the block.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore_engine.devices import SCALED_KV_TYPES
from kvstore_engine.kernels.cuda.rope import turns
from kvstore_engine.kernels.layout import LayerAttention
from kvstore_engine.model.config import ModelConfig
from kvstore_engine.model.frequencies import rotation
from kvstore_engine.pool import BlockPool
from kvstore_engine.torch_executor.library import torch_library

WaitFor = Callable[[int], None]
_TYPES = {"f16": "float16", "bf16": "bfloat16", "f32": "float32"}
_SCALED = {"int8": ("int8", 127.0), "fp8": ("float8_e4m3fn", 448.0)}  # and the greatest element
_ZERO = 1e-34  # a row whose greatest element is below is stored as zeros


class Arrivals:
    """The list of running loads of K/V into a pool of `layers` layers. A load is a function: called with a layer's
    number, it makes work that is queued later wait until this layer is loaded. Only the engine's thread may use the
    list.
    """

    def __init__(self, layers: int) -> None:
        self._layers = layers
        self._loads: list[WaitFor] = []

    def add(self, load: WaitFor) -> None:
        self._loads.append(load)

    def remove(self, load: WaitFor) -> None:
        """Remove `load`, which has finished or failed, from the list. An unknown load is ignored."""
        self._loads = [each for each in self._loads if each != load]

    def wait(self, layer: int) -> None:
        """Make work that is queued after this call wait until every running load has loaded `layer`."""
        for load in self._loads:
            load(layer)

    def wait_all(self) -> None:
        """Make work that is queued after this call wait until every running load has loaded all layers, and empty the
        list. A recorded step needs this, because its replay waits for nothing.
        """
        loads, self._loads = self._loads, []
        for load in loads:
            for layer in range(self._layers):
                load(layer)


class StoredRows(ABC):
    """The memory with the K, or the V, of one layer: [kv_heads, head_dim] numbers for each slot (the place of one
    token).
    """

    @abstractmethod
    def store(self, slots: Any, rows: Any) -> None:
        """Write `rows`, float [n, kv_heads, head_dim], to the slots with the numbers `slots`, int64 [n]."""

    @abstractmethod
    def load(self, slots: Any) -> Any:
        """Return the rows in the slots with the numbers `slots` as float32 [n, kv_heads, head_dim]."""


class PlainRows(StoredRows):
    """Rows that are stored as plain floating-point numbers (f16, bf16 or f32)."""

    def __init__(self, plane: Any, kv_dtype: str, kv_heads: int, head_dim: int) -> None:
        """Make rows over the memory `plane`, uint8 [blocks, block_bytes], stored as `kv_dtype`."""
        torch = torch_library()
        self._rows = plane.view(getattr(torch, _TYPES[kv_dtype])).view(-1, kv_heads, head_dim)

    def store(self, slots: Any, rows: Any) -> None:
        self._rows[slots] = rows.to(self._rows.dtype)

    def load(self, slots: Any) -> Any:
        return self._rows[slots].float()


class ScaledRows(StoredRows):
    """Rows that are stored as int8 or fp8 numbers, with a float scale for each token and head behind the block's
    numbers. An int8 number is off by at most 1/254 of its row's largest; an fp8 number by at most 1/16 of itself,
    unless it is below 1/28,672 of the largest.
    """

    def __init__(self, plane: Any, kv_dtype: str, block_tokens: int, kv_heads: int, head_dim: int) -> None:
        """Make rows over the memory `plane`, uint8 [blocks, block_bytes], stored as `kv_dtype`."""
        self._torch = torch = torch_library()
        name, self._greatest = _SCALED[kv_dtype]
        self._type, self._block_tokens = getattr(torch, name), block_tokens
        elements = block_tokens * kv_heads * head_dim
        self._elements = plane[:, :elements].view(self._type).view(-1, block_tokens, kv_heads, head_dim)
        self._scales = plane[:, elements:].view(torch.float32).view(-1, block_tokens, kv_heads)

    def store(self, slots: Any, rows: Any) -> None:
        torch, places = self._torch, self._places(slots)
        rows = rows.float()
        greatest = rows.abs().amax(-1)
        is_zero = greatest < _ZERO
        by = torch.where(is_zero, 0.0, self._greatest / torch.where(is_zero, 1.0, greatest))
        scaled = rows * by[..., None]
        if not self._type.is_floating_point:
            scaled = torch.round(scaled)
        self._elements[places] = scaled.to(self._type)
        self._scales[places] = torch.where(is_zero, 0.0, greatest / self._greatest)

    def load(self, slots: Any) -> Any:
        places = self._places(slots)
        return self._elements[places].float() * self._scales[places][..., None]

    def _places(self, slots: Any) -> tuple[Any, Any]:
        return slots // self._block_tokens, slots % self._block_tokens


class Cache:
    """The memory of a K/V pool as attention uses it. `planes` is that memory, uint8 [planes, blocks, block_bytes]: K
    and V of each layer in turn. `factors` are the model's rotary scaling factors, or None. `arrivals` lists the running
    loads into the pool.
    """

    def __init__(
        self,
        config: ModelConfig,
        pool: BlockPool,
        planes: Any,
        max_context: int,
        factors: npt.NDArray[np.float32] | None,
    ) -> None:
        torch = torch_library()
        self.config, self.block_tokens, self.kv_dtype = config, pool.block_tokens, pool.kv_dtype
        self.ropes = [config.layer_rope(layer) for layer in range(config.layers)]
        self.kinds = [
            LayerAttention(config.window(layer), config.attention_softcap, config.attention_scale)
            for layer in range(config.layers)
        ]
        self.planes, self.arrivals = planes, Arrivals(config.layers)
        self._rows = [self._stored(plane) for plane in planes.unbind()]
        self._turns = {
            rope: torch.tensor(turns(max_context, *rotation(rope, factors)), device=planes.device)
            for rope in set(self.ropes)
        }

    def rows(self, layer: int) -> tuple[StoredRows, StoredRows]:
        """Return two objects that read and write the stored K and the stored V of `layer`."""
        return self._rows[2 * layer], self._rows[2 * layer + 1]

    def turns(self, layer: int) -> Any:
        """Return the table of the rotary embedding of `layer`: the cosine and the sine for each position and pair of
        channels, float32 [positions, pairs, 2].
        """
        return self._turns[self.ropes[layer]]

    def _stored(self, plane: Any) -> StoredRows:
        config = self.config
        if self.kv_dtype in SCALED_KV_TYPES:
            return ScaledRows(plane, self.kv_dtype, self.block_tokens, config.kv_heads, config.head_dim)
        return PlainRows(plane, self.kv_dtype, config.kv_heads, config.head_dim)
