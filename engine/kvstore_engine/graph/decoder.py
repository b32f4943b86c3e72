"""Builds the ggml graph of one decoder step: embedding, layers, head, or of a range of layers of it.

The module owns the order of operations, which is llama.cpp's (src/models/*.cpp), so that logits agree to rounding. The
differences between architectures are data (`model.architecture`): a norm, a bias, a cap or a scale that a model does
not have adds no node. Attention is one custom operation per layer that reads the paged cache through the step's block
tables, and handles windows, caps and scales of scores. A graph depends only on a step's token and output counts, not on
its content, so a graph can be kept and refilled. Graphs of consecutive ranges compute, one after the other, the bits of
the whole one: they pass on the hidden states, float32 rows before a layer's first norm.
"""

import ctypes as ct
from collections.abc import Collection
from dataclasses import dataclass

from kvstore_engine.ggml.structs import InitParams, tensor_at
from kvstore_engine.graph.products import ProductOperations
from kvstore_engine.model.weights import LayerWeights, Linear, Model
from kvstore_proto.ggml_types import F32, I32, I64

_NODES_PER_LAYER = 48
_NODES_AROUND = 64
_ALL_THREADS = -1  # GGML_N_TASKS_MAX: run the custom operation on every thread
_ROPE_NORMAL, _ROPE_NEOX = 0, 2  # GGML_ROPE_TYPE_*
_F32_BYTES = 4


@dataclass(frozen=True, slots=True)
class StepGraph:
    """A ggml graph that computes a step of `tokens` rows (tokens) through some layers. It starts from token ids or
    hidden states, and ends in the logits of `outputs` rows or in hidden states; the last layer's are normed. Its other
    fields are addresses of ggml objects, 0 for objects that this graph does not have.
    """

    context: int
    graph: int
    tokens: int
    outputs: int
    token_input: int
    hidden_input: int
    position_input: int
    slot_input: int
    window_slot_input: int
    output_input: int
    logits: int
    hidden: int


@dataclass(frozen=True, slots=True)
class PoolTensors:
    """The K/V pool as ggml tensors, [slots, kv_heads * head_dim] for each layer; a slot is the place of one token.
    `own_blocks` are the numbers of the layers that have a pool of their own.
    """

    keys: tuple[int, ...]
    values: tuple[int, ...]
    own_blocks: Collection[int] = ()


@dataclass(frozen=True, slots=True)
class AttentionOperation:
    """The address of the native attention function, and for each layer the address of the data that it gets. Before it,
    the layers `selecting` call the function `choice` with these data, which chooses the pages that are read.
    """

    function: int
    layers: tuple[int, ...]
    choice: int = 0
    selecting: Collection[int] = ()


class GraphBuilder:
    """A builder of the ggml graph for a step of `tokens` rows (tokens) through `layers`. Logits are computed for
    `outputs` of the rows, or with `states` the states of all rows behind the last norm.
    """

    def __init__(
        self,
        model: Model,
        cache: PoolTensors,
        attention: AttentionOperation,
        products: ProductOperations,
        *,
        layers: range,
        tokens: int,
        outputs: int,
        states: bool = False,
    ) -> None:
        self.states = states
        self.model, self.cache, self.attention, self.products = model, cache, attention, products
        self.layers, self.tokens, self.outputs = layers, tokens, outputs
        ggml = self.ggml = model.library
        nodes = _NODES_PER_LAYER * len(layers) + _NODES_AROUND
        size_bytes = ggml.tensor_overhead() * nodes + ggml.graph_overhead_custom(nodes, False)
        self.context = ggml.init(InitParams(size_bytes, None, True))
        self.graph = ggml.new_graph_custom(self.context, nodes, False)
        self.positions = self._input(I32, tokens)
        self.slots = self._input(I64, tokens)
        self.window_slots = self._input(I64, tokens) if cache.own_blocks else 0

    def build(self) -> StepGraph:
        """Build the graph and return it. The caller frees the ggml context that it is in. Its tensors have no memory
        yet.
        """
        ggml, config = self.ggml, self.model.config
        is_last = self.layers.stop == config.layers
        token_input = hidden_input = output_input = logits = hidden = 0
        if self.layers.start:
            rows = hidden_input = ggml.new_tensor_2d(self.context, F32, config.width, self.tokens)
            ggml.set_input(hidden_input)
        else:
            token_input = self._input(I32, self.tokens)
            rows = self._embedded(token_input)
        for index in self.layers[:-1] if is_last else self.layers:
            rows = self._feed_forward(index, self._project(index, self._attend(index, rows), rows))
        if not is_last:
            hidden = self._output(rows)
        elif self.states:
            hidden = self._output(self._last_states(self.layers[-1], rows, 0))
        elif self.outputs:
            output_input = self._input(I32, self.outputs) if self.outputs < self.tokens else 0
            logits = self._output(self._finish(self.layers[-1], rows, output_input))
        else:
            self._finish_cache(self.layers[-1], rows)
        inputs = token_input, hidden_input, self.positions, self.slots, self.window_slots, output_input
        return StepGraph(self.context, self.graph, self.tokens, self.outputs, *inputs, logits, hidden)

    # ---- where a range begins and ends -------------------------------------------------------------------------

    def _embedded(self, token_input: int) -> int:
        ggml, config = self.ggml, self.model.config
        hidden: int = ggml.get_rows(self.context, self.model.token_embedding, token_input)
        return ggml.scale(self.context, hidden, config.width**0.5) if config.family.scaled_embedding else hidden

    def _output(self, tensor: int) -> int:
        self.ggml.set_output(tensor)
        self.ggml.build_forward_expand(self.graph, tensor)
        return tensor

    # ---- parts that a model may lack ---------------------------------------------------------------------------

    def _norm(self, hidden: int, weight: int) -> int:
        """Return RMSNorm over the contiguous dimension, or `hidden` itself if there is no weight."""
        if not weight:
            return hidden
        ggml = self.ggml
        normed: int = ggml.mul(self.context, ggml.rms_norm(self.context, hidden, self.model.config.rms_epsilon), weight)
        return normed

    def linear(self, linear: Linear, rows: int) -> int:
        """Return the product of `rows` with the matrix `linear`, and its bias if there is one."""
        product: int
        if operation := self.products.operation(linear):
            product = self._own_product(operation, linear.weight, rows)
        else:
            product = self.ggml.mul_mat(self.context, linear.weight, rows)
        if linear.bias:
            product = self.ggml.add(self.context, product, linear.bias)
        return product

    def _added(self, linear: Linear, rows: int, norm: int, hidden: int) -> int:
        """Return `hidden` plus the product of `rows` with the matrix `linear`, normed if `norm` is a weight: of our own
        products in one node, since threads wait for one another behind each.
        """
        operation = self.products.operation(linear)
        if operation and not linear.bias and not norm:
            return self._own_product(operation, linear.weight, rows, hidden)
        added: int = self.ggml.add(self.context, self._norm(self.linear(linear, rows), norm), hidden)
        return added

    def _own_product(self, operation: int, weight: int, *rows: int) -> int:
        """Return the product by the engine's own operation: `mul_mat`, but with other last bits for q8_0. `rows` are
        its factor, and what is added if anything is. Raises ValueError for other rows.
        """
        for each in map(tensor_at, rows):
            if (each.type, *each.nb[:2]) != (F32, _F32_BYTES, _F32_BYTES * each.ne[0]) or each.ne[2] != 1:
                raise ValueError("our own products need contiguous rows of float32")
        multiplied: int = self.ggml.custom_4d(
            self.context,
            F32,
            tensor_at(weight).ne[1],
            tensor_at(rows[0]).ne[1],
            1,
            1,
            (ct.c_void_p * (1 + len(rows)))(rows[0], weight, *rows[1:]),
            1 + len(rows),
            operation,
            _ALL_THREADS,
            self.products.userdata,
        )
        return multiplied

    def _capped(self, values: int, cap: float) -> int:
        """Return cap * tanh(values / cap), or `values` itself without a cap."""
        if not cap:
            return values
        ggml, context = self.ggml, self.context
        capped: int = ggml.scale(context, ggml.tanh(context, ggml.scale(context, values, 1.0 / cap)), cap)
        return capped

    # ---- attention ---------------------------------------------------------------------------------------------

    def _input(self, ggml_type: int, count: int) -> int:
        tensor: int = self.ggml.new_tensor_1d(self.context, ggml_type, count)
        self.ggml.set_input(tensor)
        return tensor

    def _queries_keys_values(self, layer: LayerWeights, normed: int) -> tuple[int, int, int]:
        """Return [head_dim, heads, tokens] of queries and of keys, [kv_width, tokens] of values."""
        ggml, context, config = self.ggml, self.context, self.model.config
        if not layer.attn_qkv.weight:
            query = self.linear(layer.attn_q, normed)
            key = self.linear(layer.attn_k, normed)
            return (
                ggml.reshape_3d(context, query, config.head_dim, config.heads, self.tokens),
                ggml.reshape_3d(context, key, config.head_dim, config.kv_heads, self.tokens),
                self.linear(layer.attn_v, normed),
            )
        fused = self.linear(layer.attn_qkv, normed)
        head, queries = config.head_dim * _F32_BYTES, config.heads * config.head_dim * _F32_BYTES
        keys = config.kv_width * _F32_BYTES
        row = queries + 2 * keys
        return (
            ggml.view_3d(context, fused, config.head_dim, config.heads, self.tokens, head, row, 0),
            ggml.view_3d(context, fused, config.head_dim, config.kv_heads, self.tokens, head, row, queries),
            ggml.view_2d(context, fused, config.kv_width, self.tokens, row, queries + keys),
        )

    def _rotated(self, index: int, heads: int) -> int:
        """Return [head_dim, heads, tokens] rotated by position."""
        rope = self.model.config.layer_rope(index)
        rotated: int = self.ggml.rope_ext(
            self.context,
            heads,
            self.positions,
            self.model.rope_factors or None,
            rope.dimensions,
            _ROPE_NEOX if rope.neox else _ROPE_NORMAL,
            rope.original_context,
            rope.frequency_base,
            rope.frequency_scale,
            rope.yarn_extrapolation,
            rope.attention_factor,
            rope.yarn_beta_fast,
            rope.yarn_beta_slow,
        )
        return rotated

    def _write_cache(self, index: int, normed: int) -> tuple[int, int, int]:
        """Return the layer's queries, before norm and rotation, and the planes into which its K and V have been
        written.
        """
        ggml, context, config = self.ggml, self.context, self.model.config
        layer = self.model.layers[index]
        query, key, value = self._queries_keys_values(layer, normed)
        key = self._rotated(index, self._norm(key, layer.attn_k_norm))
        key = ggml.reshape_2d(context, key, config.kv_width, self.tokens)
        place = index - self.layers.start
        slots = self.window_slots if place in self.cache.own_blocks else self.slots
        written = (
            ggml.set_rows(context, self.cache.keys[place], key, slots),
            ggml.set_rows(context, self.cache.values[place], value, slots),
        )
        for tensor in written:
            ggml.build_forward_expand(self.graph, tensor)
        return query, *written

    def _attend(self, index: int, hidden: int) -> int:
        """Return the heads' outputs before projection, [heads * head_dim, tokens]."""
        config, layer = self.model.config, self.model.layers[index]
        query, keys, values = self._write_cache(index, self._norm(hidden, layer.attn_norm))
        query = self._rotated(index, self._norm(query, layer.attn_q_norm))
        # The planes are sources only so that the graph runs the writes first: the kernel reads by block
        # table.
        sources, place = [query, keys, values], index - self.layers.start
        if place in self.attention.selecting:
            sources.append(self._custom(1, 1, [query, keys], self.attention.choice, place))
        return self._custom(config.heads * config.head_dim, self.tokens, sources, self.attention.function, place)

    def _custom(self, columns: int, rows: int, sources: list[int], function: int, place: int) -> int:
        """Return the result of our own `function` on the data of the layer at `place`, float32 [rows, columns]."""
        result: int = self.ggml.custom_4d(
            self.context,
            F32,
            columns,
            rows,
            1,
            1,
            (ct.c_void_p * len(sources))(*sources),
            len(sources),
            function,
            _ALL_THREADS,
            self.attention.layers[place],
        )
        return result

    def _project(self, index: int, attended: int, hidden: int) -> int:
        layer = self.model.layers[index]
        return self._added(layer.attn_output, attended, layer.post_attention_norm, hidden)

    # ---- feed forward and head ---------------------------------------------------------------------------------

    def _feed_forward(self, index: int, hidden: int) -> int:
        layer = self.model.layers[index]
        gated = self._gated(layer, self._norm(hidden, layer.ffn_norm))
        return self._added(layer.ffn_down, gated, layer.post_ffw_norm, hidden)

    def _gated(self, layer: LayerWeights, normed: int) -> int:
        activation = self.model.config.family.activation
        gated: int
        if not layer.ffn_gate.weight:
            gated = self.ggml.swiglu(self.context, self.linear(layer.ffn_up, normed))
        else:
            split = {"swiglu": self.ggml.swiglu_split, "geglu": self.ggml.geglu_split}[activation]
            gated = split(self.context, self.linear(layer.ffn_gate, normed), self.linear(layer.ffn_up, normed))
        return gated

    def _finish(self, index: int, hidden: int, output_input: int) -> int:
        """Return the result of the last layer and the head, after attention for the output rows only."""
        logits = self.linear(self.model.output, self._last_states(index, hidden, output_input))
        return self._capped(logits, self.model.config.output_softcap)

    def _last_states(self, index: int, hidden: int, output_input: int) -> int:
        ggml, context = self.ggml, self.context
        attended = self._attend(index, hidden)
        if output_input:
            attended = ggml.get_rows(context, attended, output_input)
            hidden = ggml.get_rows(context, hidden, output_input)
        return self._norm(self._feed_forward(index, self._project(index, attended, hidden)), self.model.output_norm)

    def _finish_cache(self, index: int, hidden: int) -> None:
        """Build the last layer without logits: it only writes its K and V into the cache."""
        self._write_cache(index, self._norm(hidden, self.model.layers[index].attn_norm))
