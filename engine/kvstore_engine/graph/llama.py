"""Builds the ggml graph of one Llama step: embedding, layers, head.

Owns the order of operations, which is llama.cpp's (src/models/llama.cpp), so that logits agree to rounding.
Attention is one custom operation per layer that reads the paged cache through the step's block tables.
Nothing in a graph depends on the step's content, only on its token and output counts: a graph can be kept
and refilled.

Touvron et al., "LLaMA" (2023): RMSNorm, rotary embedding, grouped-query attention, SwiGLU.
"""

import ctypes as ct
from dataclasses import dataclass

from kvstore_engine.ggml.structs import InitParams
from kvstore_engine.gguf.tensor_types import F32, I32, I64
from kvstore_engine.model import LayerWeights, Model

_NODES_PER_LAYER = 40
_NODES_AROUND = 64
_ALL_THREADS = -1  # GGML_N_TASKS_MAX: run the custom operation on every thread
_ROPE_NORMAL = 0  # adjacent pairs are rotated: Llama's order in GGUF


@dataclass(frozen=True, slots=True)
class LlamaGraph:
    """A graph for `tokens` rows of which `outputs` get logits. ggml handles; 0: not present."""

    context: int
    graph: int
    tokens: int
    outputs: int
    token_input: int
    position_input: int
    slot_input: int
    output_input: int
    logits: int


@dataclass(frozen=True, slots=True)
class PoolTensors:
    """The pool as ggml sees it: for each layer K and V as [slots, kv_heads * head_dim]."""

    keys: tuple[int, ...]
    values: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class AttentionOperation:
    """The native callback, and for each layer the address of its user data."""

    function: int
    layers: tuple[int, ...]


def build_graph(
    model: Model,
    cache: PoolTensors,
    attention: AttentionOperation,
    tokens: int,
    outputs: int,
) -> LlamaGraph:
    """A new graph in a context of its own, which the caller frees. Its tensors have no memory yet."""
    return _Builder(model, cache, attention, tokens, outputs).build()


class _Builder:
    def __init__(
        self,
        model: Model,
        cache: PoolTensors,
        attention: AttentionOperation,
        tokens: int,
        outputs: int,
    ) -> None:
        self.model, self.cache, self.attention = model, cache, attention
        self.tokens, self.outputs = tokens, outputs
        ggml = self.ggml = model.library
        nodes = _NODES_PER_LAYER * model.config.layers + _NODES_AROUND
        size_bytes = ggml.tensor_overhead() * nodes + ggml.graph_overhead_custom(nodes, False)
        self.context = ggml.init(InitParams(size_bytes, None, True))
        self.graph = ggml.new_graph_custom(self.context, nodes, False)
        self.positions = self._input(I32, tokens)
        self.slots = self._input(I64, tokens)

    def build(self) -> LlamaGraph:
        ggml, model = self.ggml, self.model
        token_input = self._input(I32, self.tokens)
        output_input = self._input(I32, self.outputs) if 0 < self.outputs < self.tokens else 0
        hidden = ggml.get_rows(self.context, model.token_embedding, token_input)
        last = model.config.layers - 1
        for index in range(last):
            hidden = self._feed_forward(index, self._attention(index, hidden))
        logits = self._finish(last, hidden, output_input) if self.outputs else self._finish_cache(last, hidden)
        return LlamaGraph(
            self.context,
            self.graph,
            self.tokens,
            self.outputs,
            token_input,
            self.positions,
            self.slots,
            output_input,
            logits,
        )

    def _input(self, ggml_type: int, count: int) -> int:
        tensor: int = self.ggml.new_tensor_1d(self.context, ggml_type, count)
        self.ggml.set_input(tensor)
        return tensor

    def _norm(self, hidden: int, weight: int) -> int:
        ggml = self.ggml
        normed: int = ggml.mul(self.context, ggml.rms_norm(self.context, hidden, self.model.config.rms_epsilon), weight)
        return normed

    def _heads(self, projected: int, heads: int) -> int:
        """[heads * head_dim, tokens] as [head_dim, heads, tokens], rotated by position."""
        config, rope = self.model.config, self.model.config.rope
        split = self.ggml.reshape_3d(self.context, projected, config.head_dim, heads, self.tokens)
        rotated: int = self.ggml.rope_ext(
            self.context,
            split,
            self.positions,
            self.model.rope_factors,
            rope.dimensions,
            _ROPE_NORMAL,
            rope.original_context,
            rope.frequency_base,
            rope.frequency_scale,
            rope.yarn_extrapolation,
            rope.yarn_attention_factor,
            rope.yarn_beta_fast,
            rope.yarn_beta_slow,
        )
        return rotated

    def _write_cache(self, index: int, normed: int) -> tuple[int, int]:
        """Compute K and V of layer `index` and store them in the pool; returns the written planes."""
        ggml, context, config = self.ggml, self.context, self.model.config
        layer = self.model.layers[index]
        key = self._heads(ggml.mul_mat(context, layer.attn_k, normed), config.kv_heads)
        key = ggml.reshape_2d(context, key, config.kv_width, self.tokens)
        value = ggml.mul_mat(context, layer.attn_v, normed)
        written = (
            ggml.set_rows(context, self.cache.keys[index], key, self.slots),
            ggml.set_rows(context, self.cache.values[index], value, self.slots),
        )
        for tensor in written:
            ggml.build_forward_expand(self.graph, tensor)
        return written

    def _attention(self, index: int, hidden: int) -> int:
        """hidden + attention(norm(hidden)), all rows."""
        return self._project(index, *self._attend(index, hidden))

    def _attend(self, index: int, hidden: int) -> tuple[int, int]:
        """(heads' outputs before projection [heads * head_dim, tokens], hidden)."""
        ggml, config = self.ggml, self.model.config
        normed = self._norm(hidden, self.model.layers[index].attn_norm)
        query = self._heads(ggml.mul_mat(self.context, self.model.layers[index].attn_q, normed), config.heads)
        keys, values = self._write_cache(index, normed)
        # The planes are sources only so that the graph runs the writes first: the kernel reads by block
        # table.
        sources = (ct.c_void_p * 3)(query, keys, values)
        attended: int = ggml.custom_4d(
            self.context,
            F32,
            config.heads * config.head_dim,
            self.tokens,
            1,
            1,
            sources,
            len(sources),
            self.attention.function,
            _ALL_THREADS,
            self.attention.layers[index],
        )
        return attended, hidden

    def _project(self, index: int, attended: int, hidden: int) -> int:
        ggml = self.ggml
        projected = ggml.mul_mat(self.context, self.model.layers[index].attn_output, attended)
        added: int = ggml.add(self.context, projected, hidden)
        return added

    def _feed_forward(self, index: int, hidden: int) -> int:
        ggml, context = self.ggml, self.context
        layer: LayerWeights = self.model.layers[index]
        normed = self._norm(hidden, layer.ffn_norm)
        gate = ggml.mul_mat(context, layer.ffn_gate, normed)
        up = ggml.mul_mat(context, layer.ffn_up, normed)
        down = ggml.mul_mat(context, layer.ffn_down, ggml.swiglu_split(context, gate, up))
        added: int = ggml.add(context, down, hidden)
        return added

    def _finish(self, index: int, hidden: int, output_input: int) -> int:
        """The last layer and the head, after attention for the output rows only."""
        ggml, context = self.ggml, self.context
        attended, hidden = self._attend(index, hidden)
        if output_input:
            attended = ggml.get_rows(context, attended, output_input)
            hidden = ggml.get_rows(context, hidden, output_input)
        hidden = self._feed_forward(index, self._project(index, attended, hidden))
        logits: int = ggml.mul_mat(context, self.model.output, self._norm(hidden, self.model.output_norm))
        ggml.set_output(logits)
        ggml.build_forward_expand(self.graph, logits)
        return logits

    def _finish_cache(self, index: int, hidden: int) -> int:
        """No logits wanted: the last layer need only leave its K and V in the cache."""
        self._write_cache(index, self._norm(hidden, self.model.layers[index].attn_norm))
        return 0
