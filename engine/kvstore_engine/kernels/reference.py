"""The kernels in plain numpy, which define the right results. Slow; for tests and as the last resort.

`paged_attention` is the definition, straight from the softmax; `ReferenceKernels` wraps it as a ggml operation.
"""

import ctypes as ct
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvstore_engine.kernels.base import Bytes, Int32Array, Kernels
from kvstore_engine.kernels.elements import widen_rows
from kvstore_engine.kernels.foreign import array_at, pointer_at
from kvstore_engine.kernels.layout import ITEM_FIELDS, KernelStep, Layer, LayerAttention

FloatArray = npt.NDArray[np.float32]
_PLAIN = LayerAttention()
_CALLBACK = ct.CFUNCTYPE(None, ct.c_void_p, ct.c_int, ct.c_int, ct.c_void_p)


def paged_attention(
    queries: FloatArray,
    keys: FloatArray,
    values: FloatArray,
    context: Int32Array,
    kind: LayerAttention = _PLAIN,
) -> FloatArray:
    """Return causal attention of new tokens of one sequence, whose K and V are given in the order of positions, not in
    blocks.

    queries: [rows, heads, head_dim], a row for each new token. keys, values: [tokens, kv_heads, head_dim]. All are
    float32. context: int32 [rows], the number of leading tokens up to and including each row's own. kind: the layer's
    settings. The result is float32 [rows, heads, head_dim].
    """
    rows, heads, head_dim = queries.shape
    group = heads // keys.shape[1]
    output = np.empty_like(queries)
    for row in range(rows):
        position = np.arange(int(context[row]))
        seen = position[(position < kind.sink_tokens) | (position >= context[row] - (kind.window or len(position)))]
        key = np.repeat(keys[seen].astype(np.float64), group, axis=1)
        value = np.repeat(values[seen].astype(np.float64), group, axis=1)
        scores = np.einsum("hd,thd->ht", queries[row].astype(np.float64), key) * (kind.scale or head_dim**-0.5)
        if kind.softcap:
            scores = kind.softcap * np.tanh(scores / kind.softcap)
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        weights /= weights.sum(axis=1, keepdims=True)
        output[row] = np.einsum("ht,thd->hd", weights, value)
    return output


class ReferenceKernels(Kernels):
    """Kernels in plain NumPy. They are slow; tests compare the native kernels with them."""

    name = "reference"

    def __init__(self) -> None:
        self._callback = _CALLBACK(_attend)

    @property
    def attention_address(self) -> int:
        address = ct.cast(self._callback, ct.c_void_p).value
        assert address is not None
        return address

    def copy_blocks(
        self, planes: Bytes, payloads: Sequence[Bytes], tables: Int32Array, *, into_pool: bool, threads: int = 1
    ) -> None:
        plane_count, _, block_bytes = planes.shape
        for payload, table in zip(payloads, tables, strict=True):
            packed = payload.reshape(plane_count, len(table), block_bytes)
            if into_pool:
                planes[:, table] = packed
            else:
                np.copyto(packed, planes[:, table])

    def move_blocks(self, planes: Bytes, sources: Int32Array, targets: Int32Array, *, threads: int = 1) -> None:
        planes[:, targets] = planes[:, sources]


def _attend(destination: int, thread: int, threads: int, userdata: int) -> None:
    """Compute every sequence of the step, in thread 0, as a `ggml_custom_op_t`."""
    if thread:
        return
    layer = Layer.from_address(userdata)
    step = KernelStep.from_address(layer.step)
    items = array_at(step.items, np.int32, step.item_count, ITEM_FIELDS)
    sequences = array_at(step.sequences, np.int32, 1 + int(items[:, 0].max()), 4)
    tokens = int((sequences[:, 0] + sequences[:, 1]).max())
    source = pointer_at(destination + step.source_offset)
    queries, output = (
        array_at(pointer_at(tensor + step.data_offset), np.float32, tokens, step.query_heads, step.head_dim)
        for tensor in (source, destination)
    )
    kind = LayerAttention(layer.window, layer.softcap, layer.scale, layer.sink_tokens)
    for index, (first, rows, context, _) in enumerate(sequences.tolist()):
        table = array_at(step.tables + 4 * index * step.table_stride, np.int32, step.table_stride)
        keys, values = (_gather(plane, step, table, context) for plane in (layer.keys, layer.values))
        seen = np.arange(context - rows + 1, context + 1, dtype=np.int32)
        output[first : first + rows] = paged_attention(queries[first : first + rows], keys, values, seen, kind)


def _gather(plane: int, step: KernelStep, table: Int32Array, tokens: int) -> FloatArray:
    """Return the first `tokens` rows of one plane in order, float32 [tokens, kv_heads, head_dim]."""
    blocks = table[: -(-tokens // step.block_tokens)]
    stored = array_at(plane, np.uint8, int(blocks.max()) + 1, step.block_tokens, step.row_bytes)
    rows = widen_rows(stored[blocks].reshape(-1, step.row_bytes)[:tokens], step.kv_type)
    return rows.reshape(tokens, step.kv_heads, step.head_dim)
