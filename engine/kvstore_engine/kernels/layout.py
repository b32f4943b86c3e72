"""The structs through which a step reaches the attention kernels (layout.h, field by field).

Owns the memory that the pointers point to: `StepMemory` outlives every graph that refers to it, so a graph
can be kept and only its inputs rewritten. It never computes.
"""

import ctypes as ct
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvstore_engine.ggml.structs import DATA_OFFSET_BYTES, SOURCES_OFFSET_BYTES
from kvstore_engine.kernels.foreign import array_at

Int32Array = npt.NDArray[np.int32]


class Step(ct.Structure):
    """`struct Step` of layout.h: constant for all layers of one step."""

    _fields_ = (
        ("query_heads", ct.c_int64),
        ("kv_heads", ct.c_int64),
        ("head_dim", ct.c_int64),
        ("block_tokens", ct.c_int64),
        ("table_stride", ct.c_int64),
        ("element_bytes", ct.c_int64),
        ("row_bytes", ct.c_int64),
        ("data_offset", ct.c_int64),
        ("source_offset", ct.c_int64),
        ("sequences", ct.c_void_p),
        ("tables", ct.c_void_p),
        ("item_count", ct.c_int64),
        ("items", ct.c_void_p),
    )


class Layer(ct.Structure):
    """`struct Layer` of layout.h: where one layer's K and V lie, and its work counter."""

    _fields_ = (
        ("keys", ct.c_void_p),
        ("values", ct.c_void_p),
        ("step", ct.c_void_p),
        ("next_item", ct.c_int64),
    )


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What the kernels need to know of model and pool."""

    query_heads: int
    kv_heads: int
    head_dim: int
    block_tokens: int
    element_bytes: int

    @property
    def group(self) -> int:
        """Query heads that share one K/V head."""
        return self.query_heads // self.kv_heads


ROWS_PER_ITEM = 48  # kRows of paged_attention.cpp: one pass of the kernel


class StepMemory:
    """The step's arrays at fixed addresses, and one `Layer` record per layer.

    `sequences` int32 [max_sequences, 4], `tables` int32 [max_sequences, max_blocks]; work items are derived.
    """

    def __init__(
        self,
        shape: AttentionShape,
        planes: list[tuple[int, int]],
        *,
        max_sequences: int,
        max_blocks: int,
        max_tokens: int,
    ) -> None:
        """`planes`: for each layer the addresses of its K and V planes."""
        self.shape = shape
        self.queries_per_item = max(1, ROWS_PER_ITEM // shape.group)
        max_items = (max_tokens // self.queries_per_item + max_sequences) * shape.kv_heads
        self.sequences = np.zeros((max_sequences, 4), np.int32)
        self.tables = np.zeros((max_sequences, max_blocks), np.int32)
        self.items = np.zeros((max_items, 4), np.int32)
        self.step = Step(
            query_heads=shape.query_heads,
            kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            block_tokens=shape.block_tokens,
            table_stride=max_blocks,
            element_bytes=shape.element_bytes,
            row_bytes=shape.kv_heads * shape.head_dim * shape.element_bytes,
            data_offset=DATA_OFFSET_BYTES,
            source_offset=SOURCES_OFFSET_BYTES,
            sequences=self.sequences.ctypes.data,
            tables=self.tables.ctypes.data,
            items=self.items.ctypes.data,
        )
        self.layers = (Layer * len(planes))(*(Layer(keys=k, values=v, step=ct.addressof(self.step)) for k, v in planes))
        fields = len(Layer._fields_)
        self._counters = array_at(ct.addressof(self.layers), np.int64, len(planes), fields)[:, -1]

    def layer_address(self, index: int) -> int:
        """Address of layer `index`'s record: the custom operation's user data."""
        return ct.addressof(self.layers[index])

    def begin(self, count: int) -> None:
        """Make the first `count` rows of `sequences` (and `tables`) the step's work; resets the counters."""
        items = work_items(self.sequences[:count], self.queries_per_item, self.shape.kv_heads)
        self.items[: len(items)] = items
        self.step.item_count = len(items)
        self._counters[:] = 0


def work_items(sequences: Int32Array, queries_per_item: int, kv_heads: int) -> Int32Array:
    """Cut each sequence's queries into tiles, for each K/V head: int32 [n, 4], the costliest first.

    Longest-first keeps the threads level at the end of a layer: a causal tile's cost is the context it sees.
    """
    tiles = [
        (index, first, min(queries_per_item, rows - first), context - rows + first)
        for index, (_, rows, context, _) in enumerate(sequences.tolist())
        for first in range(0, rows, queries_per_item)
    ]
    tiles.sort(key=lambda tile: -tile[3])
    items = [(index, head, first, n) for index, first, n, _ in tiles for head in range(kv_heads)]
    return np.array(items, np.int32).reshape(-1, 4)
