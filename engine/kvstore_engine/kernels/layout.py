"""The structs through which a step reaches the attention kernels (layout.h, field by field).

The module owns the memory that the pointers point to: `StepMemory` outlives every graph that refers to it, so a graph
can be kept and only its inputs rewritten. It does not compute. It cuts a step's attention into work items that threads
take one by one; no result depends on the cut: kernels merge the parts of a context in an order that positions alone
fix.
"""

import ctypes as ct
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np

from kvstore_engine.ggml.structs import DATA_OFFSET_BYTES, EXTENTS_OFFSET_BYTES, SOURCES_OFFSET_BYTES
from kvstore_engine.kernels.base import Int32Array
from kvstore_engine.kernels.foreign import array_at
from kvstore_engine.kernels.page_bounds import PageBounds
from kvstore_proto.ggml_types import TENSOR_TYPES

ROWS_PER_ITEM = 48  # kRows of paged_attention.cpp: one pass of the kernel
SPAN_TOKENS = 256  # kSpanKeys of layout.h: the least that a context is cut into
PAGE_TOKENS = 32  # kPageKeys of layout.h: the least of a context that a row reads or leaves out
ITEM_FIELDS = 12  # struct Item of layout.h
_ITEMS_PER_THREAD = 4  # a tile that is more than this part of a thread's share is worth cutting
_JOINED_SHARES = 2  # heads are joined to items of up to so many such parts
_WIDEST_LANES = 16  # kLanes of simd.h with AVX-512


class WorkPlan(NamedTuple):
    """The pieces of work into which the attention of a step is divided, the costliest first: `items` is int32 [n,
    ITEM_FIELDS], a record `Item` of layout.h in each row. An item may cover only a part of a context: `split_tiles`
    counts the results that are merged from several items, `partial_rows` the rows of memory for the unmerged parts.
    """

    items: Int32Array
    split_tiles: int
    partial_rows: int


def plan_work(sequences: Int32Array, *, kv_heads: int, group: int, threads: int) -> WorkPlan:
    """Return the attention of a step divided into items for `threads` threads. `sequences` is int32 [n, 4], for each
    sequence: its first row in the step, its number of rows, the tokens of its context including these rows, and the
    pages that its row may read (0: all). `group` is the number of query heads for each of the `kv_heads` K/V heads.
    Large items are split, so that no thread waits long for another; small ones have several K/V heads, whose keys lie
    side by side.
    """
    per_tile = max(1, ROWS_PER_ITEM // group)
    tiles = [
        (index, first, min(per_tile, rows - first), min(context, context - rows + first + per_tile))
        for index, (_, rows, context, _) in enumerate(sequences.tolist())
        for first in range(0, rows, per_tile)
    ]
    costs = [queries * seen for _, _, queries, seen in tiles]
    share = max(1, sum(costs) * kv_heads // (threads * _ITEMS_PER_THREAD))
    items: list[tuple[int, ...]] = []
    split_tiles = partial_rows = 0
    for (index, first, queries, seen), cost in zip(tiles, costs, strict=True):
        spans = -(-seen // SPAN_TOKENS)
        parts = min(spans, -(-cost // share)) if threads > 1 else 1
        length = -(-spans // parts)
        starts = range(0, spans, length)
        together = min(kv_heads, ROWS_PER_ITEM // (queries * group), _JOINED_SHARES * share * len(starts) // cost)
        if sequences[index, 3]:  # each head has pages of its own
            together = 1
        for head in range(0, kv_heads, max(1, together)):
            heads = min(max(1, together), kv_heads - head)
            if len(starts) == 1:
                items.append((cost * heads, index, head, first, queries, 0, 0, 0, 0, 0, 0, heads))
                continue
            for start in starts:
                end = min(start + length, spans)
                part = (start, end, len(starts), split_tiles, partial_rows, spans, heads)
                items.append((cost * heads * (end - start) // spans, index, head, first, queries, *part))
            split_tiles += 1
            partial_rows += spans * queries * group * heads
    items.sort(key=lambda item: -item[0])
    table = np.zeros((len(items), ITEM_FIELDS), np.int32)
    table[:, : len(items[0]) - 1] = [item[1:] for item in items]
    return WorkPlan(table, split_tiles, partial_rows)


class KernelStep(ct.Structure):
    """The C structure `Step` of layout.h: the sizes and addresses that all layers of one step share."""

    _fields_ = (
        ("query_heads", ct.c_int64),
        ("kv_heads", ct.c_int64),
        ("head_dim", ct.c_int64),
        ("block_tokens", ct.c_int64),
        ("table_stride", ct.c_int64),
        ("kv_type", ct.c_int64),
        ("row_bytes", ct.c_int64),
        ("data_offset", ct.c_int64),
        ("source_offset", ct.c_int64),
        ("sequences", ct.c_void_p),
        ("tables", ct.c_void_p),
        ("item_count", ct.c_int64),
        ("items", ct.c_void_p),
        ("partials", ct.c_void_p),
        ("pending", ct.c_void_p),
        ("sequence_count", ct.c_int64),
        ("page_stride", ct.c_int64),
        ("chosen", ct.c_void_p),
        ("page_scores", ct.c_void_p),
    )


class Layer(ct.Structure):
    """The C structure `Layer` of layout.h: the addresses of one layer's K and V, its attention settings, the bounds
    of its pages if rows may leave pages out, and the counters by which threads take items of work.
    """

    _fields_ = (
        ("keys", ct.c_void_p),
        ("values", ct.c_void_p),
        ("step", ct.c_void_p),
        ("window", ct.c_int64),
        ("sink_tokens", ct.c_int64),
        ("scale", ct.c_double),
        ("softcap", ct.c_double),
        ("bounds", ct.c_void_p),
        ("known", ct.c_void_p),
        ("known_stride", ct.c_int64),
        ("next_choice", ct.c_int64),
        ("next_item", ct.c_int64),
    )


class Product(ct.Structure):
    """The C structure `Product` of layout.h. It says where ggml's tensors keep the operands of a matrix product, and
    has the counters by which threads share out the work.
    """

    _fields_ = (
        ("data_offset", ct.c_int64),
        ("source_offset", ct.c_int64),
        ("extent_offset", ct.c_int64),
        ("next_column", ct.c_int64),
        ("finished", ct.c_int64),
    )

    @classmethod
    def new(cls) -> Self:
        return cls(DATA_OFFSET_BYTES, SOURCES_OFFSET_BYTES, EXTENTS_OFFSET_BYTES)


@dataclass(frozen=True, slots=True)
class LayerAttention:
    """The attention settings of one layer, for the kernels. The defaults are plain causal attention.

    window: a token sees itself and the `window` - 1 tokens before it; 0: everything before it. sink_tokens: the number
    of tokens at the start of a sequence that stay visible outside the window. scale: the factor of scores; 0: 1 /
    sqrt(head_dim). softcap: scores become cap * tanh(score / cap) (Gemma 2); 0: no cap.
    """

    window: int = 0
    softcap: float = 0.0
    scale: float = 0.0
    sink_tokens: int = 0


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """The shape of a K/V cache for the processor's attention kernel. `kv_type` is ggml's number of the type in which K
    and V are stored.
    """

    query_heads: int
    kv_heads: int
    head_dim: int
    block_tokens: int
    kv_type: int

    @property
    def group(self) -> int:
        """The number of query heads that share one K/V head."""
        return self.query_heads // self.kv_heads

    @property
    def row_bytes(self) -> int:
        """The bytes that the K, or the V, of one token takes in one layer."""
        return TENSOR_TYPES[self.kv_type].row_bytes(self.kv_heads * self.head_dim)


class StepMemory:
    """The arrays that the native attention kernel reads, at addresses that never change: `sequences` int32
    [max_sequences, 4] (see `plan_work`), `tables` int32 [max_sequences, max_blocks] (the pool blocks of each sequence),
    and a record `Layer` for each layer. Layers that keep only a window of tokens in blocks of their own use
    `window_tables` in place of `tables`.
    """

    def __init__(
        self,
        shape: AttentionShape,
        planes: list[tuple[int, int]],
        *,
        max_sequences: int,
        max_blocks: int,
        attention: Sequence[LayerAttention] | None = None,
        own_blocks: Collection[int] = (),
        bounds: PageBounds | None = None,
    ) -> None:
        """Allocate the arrays. `planes` has for each layer the addresses of its K and V planes, `attention` its
        settings (None: plain causal attention in all layers). `own_blocks` are the numbers of the layers that use
        `window_tables`. `bounds` has a place for each layer without a window; None: rows read all pages.
        """
        self.shape = shape
        self.sequences = np.zeros((max_sequences, 4), np.int32)
        self.tables = np.zeros((max_sequences, max_blocks), np.int32)
        self.window_tables = np.zeros((max_sequences, max_blocks if own_blocks else 0), np.int32)
        self.step = self._step(self.tables)
        self._window_step = self._step(self.window_tables) if own_blocks else None
        kinds = attention or [LayerAttention()] * len(planes)
        self.layers = (Layer * len(planes))(
            *(
                self._layer(*pair, self._window_step if layer in own_blocks else self.step)
                for layer, pair in enumerate(zip(planes, kinds, strict=True))
            )
        )
        fields = len(Layer._fields_)
        self._counters = array_at(ct.addressof(self.layers), np.int64, len(planes), fields)[:, -2:]
        self.selecting: tuple[int, ...] = ()
        if bounds is not None:
            self.selecting = tuple(layer for layer, kind in enumerate(kinds) if not kind.window)
            self._add_choices(bounds, max_sequences, -(-max_blocks * shape.block_tokens // PAGE_TOKENS))
        self._planned: tuple[bytes, int] | None = None
        self._partials = np.empty(0, np.float32)
        self._pending = np.zeros(0, np.int32)

    def _step(self, tables: Int32Array) -> KernelStep:
        shape = self.shape
        return KernelStep(
            query_heads=shape.query_heads,
            kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            block_tokens=shape.block_tokens,
            table_stride=tables.shape[1],
            kv_type=shape.kv_type,
            row_bytes=shape.row_bytes,
            data_offset=DATA_OFFSET_BYTES,
            source_offset=SOURCES_OFFSET_BYTES,
            sequences=self.sequences.ctypes.data,
            tables=tables.ctypes.data,
        )

    def _layer(self, planes: tuple[int, int], kind: LayerAttention, step: KernelStep | None) -> Layer:
        assert step is not None
        if kind.window < 0 or kind.sink_tokens < 0 or kind.softcap < 0:
            raise ValueError(f"window, sink_tokens and softcap must not be negative: {kind}")
        return Layer(
            keys=planes[0],
            values=planes[1],
            step=ct.addressof(step),
            window=kind.window,
            sink_tokens=kind.sink_tokens,
            scale=kind.scale or self.shape.head_dim**-0.5,
            softcap=kind.softcap,
        )

    def _add_choices(self, bounds: PageBounds, max_sequences: int, max_pages: int) -> None:
        """Allocate what the choice of pages needs, for sequences of up to `max_pages` pages."""
        if PAGE_TOKENS % self.shape.block_tokens:
            raise ValueError(f"pages of {PAGE_TOKENS} tokens are not whole blocks of {self.shape.block_tokens}")
        self.chosen = np.zeros((max_sequences, self.shape.kv_heads, max_pages), np.uint8)
        self._page_scores = np.zeros((max_sequences, self.shape.kv_heads, 2, max_pages), np.float32)
        self.step.page_stride = max_pages
        self.step.chosen, self.step.page_scores = self.chosen.ctypes.data, self._page_scores.ctypes.data
        for place, index in enumerate(self.selecting):
            layer = self.layers[index]
            layer.bounds, layer.known, layer.known_stride = bounds.addresses(place)

    def layer_address(self, index: int) -> int:
        """Return the address of the record of layer number `index`, which is the data of its native attention
        function.
        """
        return ct.addressof(self.layers[index])

    def begin(self, count: int, threads: int = 1) -> None:
        """Divide the attention of the first `count` sequences of `sequences` into items for `threads` threads. Call it
        before each step. A step of the same sizes as the last one reuses its items.
        """
        self._counters[:] = 0
        self.step.sequence_count = count
        _, rows, context, pages = self.sequences[:count].T
        key = np.stack((rows, np.where(rows == 1, -(-context // SPAN_TOKENS), context), pages != 0)).tobytes(), threads
        if key == self._planned:
            return
        plan = plan_work(self.sequences[:count], kv_heads=self.shape.kv_heads, group=self.shape.group, threads=threads)
        self._items = plan.items
        self._reserve(plan)
        self.step.items, self.step.item_count = plan.items.ctypes.data, len(plan.items)
        if self._window_step is not None:  # layers follow one another: they share items and counters
            for name in ("items", "item_count", "partials", "pending"):
                setattr(self._window_step, name, getattr(self.step, name))
        self._planned = key

    def _reserve(self, plan: WorkPlan) -> None:
        row = -(-self.shape.head_dim // _WIDEST_LANES) * _WIDEST_LANES + _WIDEST_LANES
        if plan.partial_rows * row > self._partials.size:
            self._partials = np.empty(plan.partial_rows * row, np.float32)
            self.step.partials = self._partials.ctypes.data
        if plan.split_tiles > self._pending.size:
            self._pending = np.zeros(plan.split_tiles, np.int32)
            self.step.pending = self._pending.ctypes.data
