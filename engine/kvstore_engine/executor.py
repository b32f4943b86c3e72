"""Computes steps on the CPU: fills a graph's inputs, computes it, returns logits. It is ggml's `StepExecutor`. With a
range of the layers it is a stage of a pipeline (`stages/`).

The module owns the compute buffer, the cached graphs and the step's memory. It does not sample or schedule; callers own
sequences, block tables and the order of steps. Invariants: at most `_MAX_GRAPHS` graphs are cached; all share one
buffer, reserved for the largest step at creation, so a cached graph's addresses stay valid. One step at a time: an
executor is not thread-safe.

The GIL is released while ggml computes. ggml's threads spin at their barriers: leave cores for the daemon and for
copies, since a step on an oversubscribed machine takes many times as long.
"""

import ctypes as ct
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import astuple, dataclass

import numpy as np
import numpy.typing as npt

from kvstore_engine.executors.base import StepExecutor
from kvstore_engine.executors.logits import FloatArray
from kvstore_engine.executors.sizes import StepSizes
from kvstore_engine.ggml import Library, tensor_at
from kvstore_engine.ggml.structs import InitParams
from kvstore_engine.graph import GraphBuilder, SequenceSlice, StepGraph, StepInputs, plan_step
from kvstore_engine.graph.decoder import AttentionOperation, PoolTensors
from kvstore_engine.graph.products import ProductOperations
from kvstore_engine.kernels.foreign import array_at
from kvstore_engine.kernels.layout import AttentionShape, LayerAttention, Product, StepMemory
from kvstore_engine.model.config import ModelConfig
from kvstore_engine.model.weights import Model
from kvstore_engine.pool import BlockPool

_MAX_GRAPHS = 32


@dataclass(frozen=True, slots=True)
class _ReadyGraph:
    """A graph with memory: its inputs and its result as arrays. It begins with `tokens` or with `hidden`."""

    graph: StepGraph
    tokens: npt.NDArray[np.int32] | None
    hidden: FloatArray | None
    positions: npt.NDArray[np.int32]
    slots: npt.NDArray[np.int64]
    window_slots: npt.NDArray[np.int64] | None
    outputs: npt.NDArray[np.int32] | None
    result: FloatArray


class Executor(StepExecutor):
    """An executor that computes forward steps of `model` with ggml over the K/V in `pool`. With `layers` it computes
    only this range of the model's layers.
    """

    def __init__(
        self,
        model: Model,
        pool: BlockPool,
        sizes: StepSizes | None = None,
        *,
        layers: range | None = None,
    ) -> None:
        """Reserve memory for the largest step. Raises ValueError if the pool was made for another model, or for kernels
        that cannot multiply its weights.
        """
        config, sizes = model.config, sizes or StepSizes()
        self.layers = range(config.layers) if layers is None else layers
        _check_layers(self.layers, config.layers)
        pools = [pool] if pool.window is None else [pool, pool.window]
        if (sum(each.layers for each in pools), pool.row_elements) != (len(self.layers), config.kv_width):
            raise ValueError("the block pool was made for another model")
        _check_sizes(model, pool, sizes)
        self.model, self.config, self.pool = model, config, pool
        self.limits = sizes.limits(config.vocabulary, pool)
        ggml = self._ggml = model.library
        self._views = [_PoolView(ggml, each) for each in pools]
        places = _places(self._views)
        self._cache = PoolTensors(
            tuple(view.keys[place] for view, place in places),
            tuple(view.values[place] for view, place in places),
            frozenset(index for index, (view, _) in enumerate(places) if view is not self._views[0]),
        )
        shape = AttentionShape(config.heads, config.kv_heads, config.head_dim, pool.block_tokens, _cache_type(pool))
        self._memory = StepMemory(
            shape,
            [view.pool.plane_addresses(place) for view, place in places],
            max_sequences=sizes.max_sequences,
            max_blocks=-(-sizes.max_context // pool.block_tokens),
            attention=[_attention(config, layer) for layer in self.layers],
            own_blocks=self._cache.own_blocks,
            bounds=pool.bounds,
        )
        self._attention = AttentionOperation(
            pool.kernels.attention_address,
            tuple(self._memory.layer_address(layer) for layer in range(len(places))),
            pool.kernels.page_choice_address,
            self._memory.selecting,
        )
        self._product_memory = Product.new()
        self._products = ProductOperations(
            pool.kernels.q4_product_address,
            pool.kernels.q8_product_address,
            ct.addressof(self._product_memory),
        )
        self._backend = ggml.backend_cpu_init()
        self.threads = sizes.threads
        self._allocator = ggml.gallocr_new(ggml.backend_cpu_buffer_type())
        self._graphs: OrderedDict[tuple[int, int, bool], _ReadyGraph] = OrderedDict()
        self._reserve(sizes.max_tokens_per_step, min(sizes.max_tokens_per_step, sizes.max_sequences))

    @property
    def threads(self) -> int:
        return self._threads

    @threads.setter
    def threads(self, count: int) -> None:
        self._threads = count
        self._ggml.backend_cpu_set_n_threads(self._backend, count)

    def forward(
        self, slices: Sequence[SequenceSlice], out: FloatArray | None = None, *, hidden: FloatArray | None = None
    ) -> FloatArray:
        """Compute a step of `slices` as `StepExecutor.forward` does and return the logits, or the states if the slices
        ask for these. An executor whose layers do not begin with the first takes hidden states as input, `hidden`,
        float32 [tokens, width]. One whose layers do not end with the last returns hidden states.
        """
        if not self._backend:
            raise RuntimeError("the executor is closed")
        inputs = plan_step(slices, self.limits)
        is_last = self.layers.stop == self.config.layers
        states = {piece.outputs == "states" for piece in slices}
        if len(states) > 1:
            raise ValueError("the slices of a step ask for states all or none")
        ready = self._graph(
            len(inputs.tokens), len(inputs.outputs) if is_last else 0, states=is_last and True in states
        )
        self._begin_with(ready, inputs.tokens, hidden)
        self._fill(ready, inputs, slices)
        status = self._ggml.backend_graph_compute(self._backend, ready.graph.graph)
        if status != 0:
            raise RuntimeError(f"ggml_backend_graph_compute failed with status {status}")
        if out is None:
            return np.copy(ready.result)
        rows = out[: len(ready.result)]
        np.copyto(rows, ready.result)
        return rows

    def close(self) -> None:
        """Free the graphs and the compute memory. The model and the pool stay open."""
        if self._backend:
            self._drop_graphs()
            self._ggml.gallocr_free(self._allocator)
            self._ggml.backend_free(self._backend)
            for view in self._views:
                view.close()
            self._backend = 0

    def _build(self, tokens: int, outputs: int, *, states: bool = False) -> StepGraph:
        parts = self.model, self._cache, self._attention, self._products
        return GraphBuilder(*parts, layers=self.layers, tokens=tokens, outputs=outputs, states=states).build()

    def _reserve(self, tokens: int, outputs: int) -> None:
        graph = self._build(tokens, outputs)
        reserved = self._ggml.gallocr_reserve(self._allocator, graph.graph)
        self._ggml.free(graph.context)
        if not reserved:
            raise RuntimeError(f"cannot reserve compute memory for {tokens} tokens")

    def _graph(self, tokens: int, outputs: int, *, states: bool) -> _ReadyGraph:
        """Return a graph for these counts, cached or new."""
        key = (tokens, outputs, states)
        if ready := self._graphs.get(key):
            self._graphs.move_to_end(key)
            return ready
        if len(self._graphs) >= _MAX_GRAPHS:
            _, oldest = self._graphs.popitem(last=False)
            self._ggml.free(oldest.graph.context)
        graph = self._build(tokens, outputs, states=states)
        before = self._ggml.gallocr_get_buffer_size(self._allocator, 0)
        if not self._ggml.gallocr_alloc_graph(self._allocator, graph.graph):
            raise RuntimeError(f"cannot allocate compute memory for {tokens} tokens")
        if self._ggml.gallocr_get_buffer_size(self._allocator, 0) != before:
            # More outputs than reserved: the buffer moved, and cached graphs point to the old one.
            self._drop_graphs()
        ready = self._graphs[key] = _ready(graph, self.config)
        return ready

    def _drop_graphs(self) -> None:
        for ready in self._graphs.values():
            self._ggml.free(ready.graph.context)
        self._graphs.clear()

    def _begin_with(self, ready: _ReadyGraph, tokens: npt.NDArray[np.int32], hidden: FloatArray | None) -> None:
        if ready.tokens is not None:
            ready.tokens[:] = tokens
        if ready.hidden is not None:
            if hidden is None or hidden.shape != ready.hidden.shape or hidden.dtype != np.float32:
                raise ValueError(f"layers from {self.layers.start} on start from float32 {ready.hidden.shape}")
            np.copyto(ready.hidden, hidden)

    def _fill(self, ready: _ReadyGraph, inputs: StepInputs, slices: Sequence[SequenceSlice]) -> None:
        """Write the step's other inputs: all of them, since the allocator reuses their memory within a step."""
        ready.positions[:] = inputs.positions
        ready.slots[:] = inputs.slots
        if ready.window_slots is not None and inputs.window_slots is not None:
            ready.window_slots[:] = inputs.window_slots
        if ready.outputs is not None:
            ready.outputs[:] = inputs.outputs
        count = len(slices)
        self._memory.sequences[:count] = inputs.sequences
        for row, piece in zip(self._memory.tables, slices, strict=False):
            used = min(len(piece.block_table), len(row))
            row[:used] = piece.block_table[:used]
        for row, piece in zip(self._memory.window_tables, slices, strict=False):
            if piece.window_table is not None:
                used = min(len(piece.window_table), len(row))
                row[:used] = piece.window_table[:used]
        if self.pool.bounds is not None:
            self.pool.bounds.forget(inputs.slots // self.pool.block_tokens)
        self._memory.begin(count, self._threads)


def _check_sizes(model: Model, pool: BlockPool, sizes: StepSizes) -> None:
    """Raise ValueError for kernels that cannot multiply the model's weights, and for sizes that nothing can compute."""
    longest, most = model.config.longest_context, sizes.max_context
    if model.interleaves_q8_0 and not pool.kernels.q8_product_address:
        raise ValueError(
            "the model's q8_0 matrices are interleaved for kernels that the pool does not have: load it with "
            "`repack=False`"
        )
    if min(astuple(sizes)) < 1:
        raise ValueError("threads, tokens per step, sequences and context must all be at least 1")
    if 0 < longest < most:
        raise ValueError(
            f"the model was loaded for contexts up to {longest} tokens, not {most}: load it with `context`"
        )


def _places(views: Sequence["_PoolView"]) -> list[tuple["_PoolView", int]]:
    """Return for each layer, in the model's order, its pool and its place there."""
    places = [(view, place) for view in views for place in range(view.pool.layers)]
    if len(views) > 1:
        order = np.argsort([view.pool.model_layers[place] for view, place in places])
        places = [places[index] for index in order.tolist()]
    return places


def _attention(config: ModelConfig, layer: int) -> LayerAttention:
    return LayerAttention(config.window(layer), config.attention_softcap, config.attention_scale)


def _check_layers(layers: range, count: int) -> None:
    if layers.step != 1 or not 0 <= layers.start < layers.stop <= count:
        raise ValueError(f"{layers} are not layers of a model that has {count}")


def _cache_type(pool: BlockPool) -> int:
    """Return ggml's type of the pool's K and V. Raises ValueError if there is none."""
    if pool.ggml_type is None:
        raise ValueError(f"ggml writes no K and V of type {pool.kv_dtype}: this type is for devices of torch's")
    return pool.ggml_type


class _PoolView:
    """The pool's planes as ggml tensors, which the graph writes to."""

    def __init__(self, ggml: Library, pool: BlockPool) -> None:
        self.pool = pool
        self._ggml, self._type = ggml, _cache_type(pool)
        self._context = ggml.init(InitParams(ggml.tensor_overhead() * 2 * pool.layers + 64, None, True))
        self._buffer = ggml.backend_cpu_buffer_from_ptr(
            pool.planes.ctypes.data, pool.planes.strides[0] * pool.planes.shape[0]
        )
        addresses = [address for layer in range(pool.layers) for address in pool.plane_addresses(layer)]
        planes = [self._plane(pool, address) for address in addresses]
        self.keys, self.values = planes[::2], planes[1::2]

    def _plane(self, pool: BlockPool, address: int) -> int:
        slots = pool.blocks * pool.block_tokens
        tensor: int = self._ggml.new_tensor_2d(self._context, self._type, pool.row_elements, slots)
        self._ggml.backend_tensor_alloc(self._buffer, tensor, address)
        return tensor

    def close(self) -> None:
        self._ggml.free(self._context)
        self._ggml.backend_buffer_free(self._buffer)


def _ready(graph: StepGraph, config: ModelConfig) -> _ReadyGraph:
    def data(tensor: int) -> int:
        address: int = tensor_at(tensor).data
        return address

    rows = graph.tokens
    if graph.hidden:
        result = array_at(data(graph.hidden), np.float32, rows, config.width)
    elif graph.logits:
        padded = array_at(data(graph.logits), np.float32, graph.outputs, config.vocabulary + config.padding)
        result = padded[:, : config.vocabulary]
    else:
        result = np.empty((0, config.vocabulary), np.float32)
    return _ReadyGraph(
        graph=graph,
        tokens=array_at(data(graph.token_input), np.int32, rows) if graph.token_input else None,
        hidden=array_at(data(graph.hidden_input), np.float32, rows, config.width) if graph.hidden_input else None,
        positions=array_at(data(graph.position_input), np.int32, rows),
        slots=array_at(data(graph.slot_input), np.int64, rows),
        window_slots=array_at(data(graph.window_slot_input), np.int64, rows) if graph.window_slot_input else None,
        outputs=array_at(data(graph.output_input), np.int32, graph.outputs) if graph.output_input else None,
        result=result,
    )
