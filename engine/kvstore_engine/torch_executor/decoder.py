"""A decoder's forward step in torch: embedding, layers, head.

The order of operations is `graph.decoder`'s, and what differs between architectures is the same data
(`model.architecture`). Products are of bf16; the residual stream, norms and logits are float32. It never decides what
is in a step, and works without looking at the values of a tensor: a step can be captured and replayed.
"""

from __future__ import annotations

from typing import Any

from kvstore_engine.torch_executor.attention import AttentionBackend, StepRows
from kvstore_engine.torch_executor.library import torch_library
from kvstore_engine.torch_executor.weights import Linear, TorchLayer, TorchModel


class Decoder:
    """Computes steps of `model` with `attention`."""

    def __init__(self, model: TorchModel, attention: AttentionBackend) -> None:
        self._model, self._attention, self._torch = model, attention, torch_library()
        self._functional = self._torch.nn.functional

    def step(self, tokens: Any, rows: StepRows, outputs: Any = None, *, wants_logits: bool = True) -> Any:
        """Logits, float32 [outputs, vocabulary], of the rows that the integer tensor `outputs` names; None: of all.

        Without `wants_logits` only K and V are computed, and the result is None.
        """
        model, config = self._model, self._model.config
        hidden = self._functional.embedding(tokens, model.token_embedding).float()
        if config.family.scaled_embedding:
            hidden = hidden * config.width**0.5
        last = config.layers - 1
        for index, layer in enumerate(model.layers):
            queries = self._write_cache(index, layer, hidden, rows)
            if index == last:
                if not wants_logits:
                    return None
                if outputs is not None:
                    hidden, queries, rows = hidden[outputs], queries[outputs], rows.select(outputs)
            hidden = self._layer(index, layer, hidden, queries, rows)
        return self._logits(self._norm(hidden, model.output_norm))

    def _write_cache(self, index: int, layer: TorchLayer, hidden: Any, rows: StepRows) -> Any:
        """The layer's rotated queries; its K and V are in the cache."""
        config = self._model.config
        fused = self._linear(layer.qkv, self._norm(hidden, layer.attn_norm))
        heads = fused.view(rows.count, config.heads + 2 * config.kv_heads, config.head_dim)
        queries, keys, values = heads.split((config.heads, config.kv_heads, config.kv_heads), 1)
        if layer.attn_q_norm is not None:
            queries = self._norm(queries.float(), layer.attn_q_norm)
        if layer.attn_k_norm is not None:
            keys = self._norm(keys.float(), layer.attn_k_norm)
        return self._attention.write(index, queries, keys, values, rows)

    def _layer(self, index: int, layer: TorchLayer, hidden: Any, queries: Any, rows: StepRows) -> Any:
        attended = self._attention.attend(index, queries, rows).view(rows.count, -1)
        hidden = hidden + self._branch(self._linear(layer.attn_output, attended), layer.post_attention_norm)
        gate, up = self._linear(layer.gate_up, self._norm(hidden, layer.ffn_norm)).chunk(2, -1)
        if self._model.config.family.activation == "geglu":
            gated = self._functional.gelu(gate, approximate="tanh") * up
        else:
            gated = self._functional.silu(gate) * up
        return hidden + self._branch(self._linear(layer.ffn_down, gated), layer.post_ffw_norm)

    def _branch(self, values: Any, norm: Any) -> Any:
        """What is added to the residual stream, float32."""
        values = values.float()
        return values if norm is None else self._normed(values, norm)

    def _norm(self, values: Any, weight: Any) -> Any:
        """RMSNorm of float32, as bf16."""
        return self._normed(values, weight).to(self._torch.bfloat16)

    def _normed(self, values: Any, weight: Any) -> Any:
        return self._functional.rms_norm(values, weight.shape, weight, self._model.config.rms_epsilon)

    def _linear(self, linear: Linear, rows: Any) -> Any:
        return self._functional.linear(rows, linear.weight, linear.bias)

    def _logits(self, rows: Any) -> Any:
        torch, output = self._torch, self._model.output
        if output.weight.dtype == torch.float32:
            logits = rows.float() @ output.weight.t()
        else:
            logits = torch.mm(rows, output.weight.t(), out_dtype=torch.float32)
        if output.bias is not None:
            logits = logits + output.bias
        logits = logits[:, : self._model.config.vocabulary]
        cap = self._model.config.output_softcap
        return cap * torch.tanh(logits / cap) if cap else logits
