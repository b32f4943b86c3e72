"""What a pool's planes and a model's layers are to attention: stored rows, tables of turns, kinds of layers.

Owns the tables of turns. It never computes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore_engine.devices import SCALED_KV_TYPES
from kvstore_engine.kernels.cuda.rope import turns
from kvstore_engine.kernels.layout import LayerAttention
from kvstore_engine.model.config import ModelConfig
from kvstore_engine.model.frequencies import rotation
from kvstore_engine.pool import BlockPool
from kvstore_engine.torch_executor.arrivals import Arrivals
from kvstore_engine.torch_executor.library import torch_library
from kvstore_engine.torch_executor.stored_rows import PlainRows, ScaledRows, StoredRows


class Cache:
    """`planes`: the pool's memory, a uint8 tensor [planes, blocks, block_bytes]. `arrivals`: loads on their way
    there."""

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
        """The layer's K and V."""
        return self._rows[2 * layer], self._rows[2 * layer + 1]

    def turns(self, layer: int) -> Any:
        """Cosines and sines, float32 [positions, pairs, 2]."""
        return self._turns[self.ropes[layer]]

    def _stored(self, plane: Any) -> StoredRows:
        config = self.config
        if self.kv_dtype in SCALED_KV_TYPES:
            return ScaledRows(plane, self.kv_dtype, self.block_tokens, config.kv_heads, config.head_dim)
        return PlainRows(plane, self.kv_dtype, config.kv_heads, config.head_dim)
