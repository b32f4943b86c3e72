"""What a pool's planes and a model's layers are to attention: typed rows, tables of turns, kinds of layers.

Owns the tables of turns. It never computes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore_engine.kernels.cuda.rope import turns
from kvstore_engine.kernels.layout import LayerAttention
from kvstore_engine.model.config import ModelConfig
from kvstore_engine.model.frequencies import rotation
from kvstore_engine.pool import BlockPool
from kvstore_engine.torch_executor.library import torch_library

_TYPES = {"f16": "float16", "bf16": "bfloat16", "f32": "float32"}


class Cache:
    """`planes`: the pool's memory, a uint8 tensor [planes, blocks, block_bytes]."""

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
        shape = pool.blocks * pool.block_tokens, config.kv_heads, config.head_dim
        self.planes = planes
        self._rows = [plane.view(getattr(torch, _TYPES[pool.kv_dtype])).view(shape) for plane in planes.unbind()]
        self._turns = {
            rope: torch.tensor(turns(max_context, *rotation(rope, factors)), device=planes.device)
            for rope in set(self.ropes)
        }

    def rows(self, layer: int) -> tuple[Any, Any]:
        """The layer's K and V, [slots, kv_heads, head_dim] of the pool's type."""
        return self._rows[2 * layer], self._rows[2 * layer + 1]

    def turns(self, layer: int) -> Any:
        """Cosines and sines, float32 [positions, pairs, 2]."""
        return self._turns[self.ropes[layer]]
