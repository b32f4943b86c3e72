"""Attention in plain torch, for tensors on the processor: what the CUDA kernels must agree with. Slow.

It computes in float32 what `kernels.reference.paged_attention` defines. Padding rows give zeros.
"""

from __future__ import annotations

from typing import Any

from kvstore_engine.kernels.layout import LayerAttention
from kvstore_engine.torch_executor.attention import AttentionBackend, StepRows
from kvstore_engine.torch_executor.cache import Cache
from kvstore_engine.torch_executor.library import torch_library


class ReferenceAttention(AttentionBackend):
    """Over `cache`, whose `turns` are on the processor."""

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
        """float32 [rows, heads, head_dim] of one sequence's rows."""
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
        """float32; `turned`: [rows, 1, pairs, 2] of cosines and sines."""
        torch, result = self._torch, heads.float().clone()
        rope = self._cache.ropes[layer]
        half = rope.dimensions // 2
        pairs = (slice(0, half), slice(half, 2 * half)) if rope.neox else (slice(0, 2 * half, 2), slice(1, 2 * half, 2))
        x, y = heads[..., pairs[0]].float(), heads[..., pairs[1]].float()
        cosine, sine = torch.unbind(turned, -1)
        result[..., pairs[0]], result[..., pairs[1]] = x * cosine - y * sine, y * cosine + x * sine
        return result
