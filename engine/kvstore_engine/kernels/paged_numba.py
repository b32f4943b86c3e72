"""The kernels for machines without a C++ compiler, compiled by numba at first use.

The algorithm of paged_attention.cpp, sum for sum: the same bits, where the processor fuses multiply-add. One variant
serves few rows and many: eight channels are the lanes of a score. `attention_code` has the inner loops.

Compilation takes several seconds, once: numba keeps the machine code beside this file or in the user's cache.
"""

from typing import Any

import numba
import numpy as np

from kvstore_engine.kernels import attention_code as inner
from kvstore_engine.kernels import product_code, q4_product_numba, q8_product_numba
from kvstore_engine.kernels import vector_code as code
from kvstore_engine.kernels.reference import ReferenceKernels
from kvstore_engine.kernels.work import ITEM_FIELDS, SPAN_TOKENS

_KEYS = inner.TILE_KEYS
_NOTHING = np.float32(-1e30)  # the peak of no scores: finite, so that differences are
_MASKED = np.float32(-np.inf)
# Positions of layout.h's fields, in 64-bit words.
_HEADS, _KV_HEADS, _HEAD_DIM, _BLOCK_TOKENS, _TABLE_STRIDE, _KV_TYPE, _ROW_BYTES = range(7)
_DATA_OFFSET, _SOURCE_OFFSET, _SEQUENCES, _TABLES, _ITEM_COUNT, _ITEMS, _PARTIALS, _PENDING = range(7, 15)
_LAYER_KEYS, _LAYER_VALUES, _LAYER_STEP, _WINDOW, _SINKS, _SCALE, _SOFTCAP, _NEXT_ITEM = range(8)
_SEQUENCE, _KV_HEAD, _FIRST_QUERY, _QUERIES, _FIRST_SPAN, _LAST_SPAN, _SPLIT, _TILE, _PARTIAL, _SPANS = range(10)
_STEP_WORDS, _LAYER_WORDS, _TENSOR_WORDS = 15, 8, 42
_UNBOUNDED = 1 << 40  # numba checks no bounds: the length of an array over foreign memory is only its type's


class NumbaKernels(ReferenceKernels):
    """Attention and products by numba; copies by numpy, as in the reference."""

    name = "numba"

    def __init__(self) -> None:
        compiled: Any = numba.cfunc(product_code.CUSTOM_OPERATION, cache=True)
        self._operation = compiled(_attend)  # an address is valid as long as its operation lives
        usable = product_code.usable()
        self._q4_product, self._q8_product = (
            compiled(module.multiply) if usable else None for module in (q4_product_numba, q8_product_numba)
        )

    @property
    def attention_address(self) -> int:
        return int(self._operation.address)

    @property
    def q4_product_address(self) -> int:
        return int(self._q4_product.address) if self._q4_product else 0

    @property
    def q8_product_address(self) -> int:
        return int(self._q8_product.address) if self._q8_product else 0


_pointer, _address = code.pointer, code.address_of
carray: Any = numba.carray  # type: ignore[attr-defined]
_jit: Any = numba.njit(error_model="numpy")
_score, _soften, _cap, _merge_row = inner.score_eight, inner.soften, inner.cap_scores, inner.merge_row
_three_by_four, _three_by_one = inner.accumulate[3, 4], inner.accumulate[3, 1]
_one_by_four, _one_by_one = inner.accumulate[1, 4], inner.accumulate[1, 1]
_half, _brain, _single = inner.widen_half, inner.widen_brain, inner.widen_single
_eight_bits, _four_bits = inner.widen_eight_bits, inner.widen_four_bits
_prefetch, _count_in, _add_to = code.prefetch, code.count_in, code.add_to


def _locate(step: Any, place: Any, first_key: Any, end: Any, offsets: Any) -> Any:
    """offsets[key] = offset of the row of key first_key + key in a plane, up to `end`; returns their number."""
    count, block_tokens = max(0, min(_KEYS, end - first_key)), step[_BLOCK_TOKENS]
    table = carray(_pointer(step[_TABLES] + 4 * place[0] * step[_TABLE_STRIDE]), (_UNBOUNDED,), np.int32)
    block, within = first_key // block_tokens, first_key % block_tokens
    for key in range(count):
        offsets[key] = (np.int64(table[block]) * block_tokens + within) * step[_ROW_BYTES]
        within += 1
        if within == block_tokens:
            block, within = block + 1, 0
    return count


locate: Any = _jit(_locate)


def _widen_tile(plane: Any, step: Any, place: Any, first_key: Any, rows: Any, seen: Any, target: Any) -> None:
    """target[key] = this head's part of the row; zeros for keys that no row sees (their memory is arbitrary).

    `rows`: offsets in the plane, and their number, of this tile and the next. Prefetches the next tile: without that, a
    context that is not in the cache takes half as long again.
    """
    kind, channels = step[_KV_TYPE], place[1] * step[_HEAD_DIM]
    head_bytes, steps = step[_ROW_BYTES] // step[_KV_HEADS], step[_HEAD_DIM] // 8
    here, count, ahead, more = rows
    for key in range(count):
        position = first_key + key
        if key < more:
            _prefetch(plane + ahead[key] + place[1] * head_bytes, head_bytes)
        if position < seen[0] and position >= seen[1]:
            target[key] = 0
            continue
        row, out = plane + here[key], target[key].ctypes.data
        if kind == 1:
            _half(out, row, channels, steps)
        elif kind == 8:
            _eight_bits(out, row, channels, steps)
        elif kind == 2:
            _four_bits(out, row, channels, steps)
        elif kind == 30:
            _brain(out, row, channels, steps)
        else:
            _single(out, row, channels, steps)


widen_tile: Any = _jit(_widen_tile)


def _accumulate(output: Any, weights: Any, rescale: Any, values: Any, count: Any) -> None:
    """output[row] = output[row] * rescale[row] + weights[row] . values, key after key."""
    rows, width = output.shape
    stride = 4 * width
    row = 0
    while row < rows:
        many = rows - row >= 3
        out, weight, scale = output[row].ctypes.data, weights[row].ctypes.data, rescale[row:].ctypes.data
        source, channel = values.ctypes.data, 0
        while channel < width:
            wide = width - channel >= 32
            if many and wide:
                _three_by_four(out, weight, scale, source, stride, count)
            elif many:
                _three_by_one(out, weight, scale, source, stride, count)
            elif wide:
                _one_by_four(out, weight, scale, source, stride, count)
            else:
                _one_by_one(out, weight, scale, source, stride, count)
            size = 32 if wide else 8
            channel, out, source = channel + size, out + 4 * size, source + 4 * size
        row += 3 if many else 1


accumulate: Any = _jit(_accumulate)


def _attend_span(
    layer: Any, step: Any, place: Any, queries: Any, work: Any, limits: Any, span: Any, softcap: Any
) -> None:
    """The state of one span into work's output, peaks and totals. `limits`: what the first and last row see."""
    keys, values, scores, output, peaks, totals, rescale = work
    rows, head_dim = queries.shape
    output[:], peaks[:], totals[:] = 0, _NOTHING, 0
    window, sinks = layer[_WINDOW], layer[_SINKS]
    before, group = place[2], place[3]
    seen = (limits[0], sinks)
    here, ahead = np.empty(_KEYS, np.int64), np.empty(_KEYS, np.int64)
    for first_key in range(span * SPAN_TOKENS, min((span + 1) * SPAN_TOKENS, limits[1]), _KEYS):
        if first_key + _KEYS <= limits[0] and first_key >= sinks:
            continue
        count = locate(step, place, first_key, limits[1], here)
        more = locate(step, place, first_key + _KEYS, limits[1], ahead)
        widen_tile(layer[_LAYER_KEYS], step, place, first_key, (here, count, ahead, more), seen, keys)
        for row in range(rows):
            mine = scores[row]
            for key in range(0, count, 8):
                _score(
                    mine[key:].ctypes.data, queries[row].ctypes.data, keys[key].ctypes.data, 4 * head_dim, head_dim // 8
                )
            if softcap[0] != 0:
                _cap(mine.ctypes.data, softcap.ctypes.data)
            last = before + row // group  # the row's own position
            start = max(0, last + 1 - window) if window else 0
            if first_key + _KEYS > last + 1 or (first_key < start and first_key + _KEYS > sinks):
                for key in range(_KEYS):
                    position = first_key + key
                    if position > last or (position < start and position >= sinks):
                        mine[key] = _MASKED
            _soften(mine.ctypes.data, peaks[row:].ctypes.data, totals[row:].ctypes.data, rescale[row:].ctypes.data)
        widen_tile(layer[_LAYER_VALUES], step, place, first_key, (here, count, ahead, more), seen, values)
        accumulate(output, scores, rescale, values, count)


attend_span: Any = _jit(_attend_span)


def _merge(output: Any, peaks: Any, totals: Any, others: Any, other_peaks: Any, other_totals: Any) -> None:
    for row in range(len(peaks)):
        _merge_row(
            output[row].ctypes.data,
            others[row].ctypes.data,
            peaks[row:].ctypes.data,
            other_peaks[row:].ctypes.data,
            totals[row:].ctypes.data,
            other_totals[row:].ctypes.data,
            output.shape[1] // 8,
        )


merge: Any = _jit(_merge)


def _run_item(layer: Any, numbers: Any, step: Any, item: Any, sequence: Any, queries: Any, output: Any) -> None:
    """One work item; `queries`, `output`: [token][head][channel] from the item's first query on."""
    head_dim, group = step[_HEAD_DIM], step[_HEADS] // step[_KV_HEADS]
    rows, kv_head = item[_QUERIES] * group, item[_KV_HEAD]
    before = sequence[2] - sequence[1] + item[_FIRST_QUERY]  # context of the first query, itself excluded
    place = (item[_SEQUENCE], kv_head, before, group)
    end = before + item[_QUERIES]
    start = max(0, before + 1 - layer[_WINDOW]) if layer[_WINDOW] else 0
    limits = (start, end)
    scaled = np.empty((rows, head_dim), np.float32)
    scale, softcap = np.float32(numbers[_SCALE]), np.empty(1, np.float32)
    softcap[0] = numbers[_SOFTCAP]
    for row in range(rows):
        for d in range(head_dim):
            scaled[row, d] = queries[row // group, kv_head * group + row % group, d] * scale
    keys, values = np.zeros((_KEYS, head_dim), np.float32), np.empty((_KEYS, head_dim), np.float32)
    scores, rescale = np.zeros((rows, _KEYS), np.float32), np.empty(rows, np.float32)
    sums, peaks, totals = np.empty((rows, head_dim), np.float32), np.empty(rows, np.float32), np.empty(rows, np.float32)
    work = (keys, values, scores, sums, peaks, totals, rescale)
    spans = (end + SPAN_TOKENS - 1) // SPAN_TOKENS
    first, last = (item[_FIRST_SPAN], item[_LAST_SPAN]) if item[_SPLIT] else (0, spans)
    merged, merged_peaks = np.zeros((rows, head_dim), np.float32), np.full(rows, _NOTHING, np.float32)
    merged_totals = np.zeros(rows, np.float32)
    record = rows * (head_dim + 2)
    shared = carray(
        _pointer(step[_PARTIALS] + 4 * item[_PARTIAL] * (head_dim + 16)), (_UNBOUNDED,), np.float32
    )  # record of span s: sums, peaks, totals from s * rows * (head_dim + 16) on
    for span in range(first, last):
        if (span + 1) * SPAN_TOKENS <= start and span * SPAN_TOKENS >= layer[_SINKS]:
            continue
        attend_span(layer, step, place, scaled, work, limits, span, softcap)
        if item[_SPLIT]:
            target = shared[span * rows * (head_dim + 16) :]
            target[: rows * head_dim] = sums.reshape(-1)
            target[rows * head_dim : rows * (head_dim + 1)] = peaks
            target[rows * (head_dim + 1) : record] = totals
        else:
            merge(merged, merged_peaks, merged_totals, sums, peaks, totals)
    if item[_SPLIT]:
        pending = step[_PENDING] + 4 * item[_TILE]
        if _count_in(pending) < item[_SPLIT]:
            return
        carray(_pointer(pending), (1,), np.int32)[0] = 0  # for the next layer, which starts behind a barrier
        for span in range(item[_SPANS]):
            if (span + 1) * SPAN_TOKENS <= start and span * SPAN_TOKENS >= layer[_SINKS]:
                continue
            source = shared[span * rows * (head_dim + 16) :]
            others = source[: rows * head_dim].reshape((rows, head_dim))
            merge(
                merged,
                merged_peaks,
                merged_totals,
                others,
                source[rows * head_dim : rows * (head_dim + 1)],
                source[rows * (head_dim + 1) : record],
            )
    for row in range(rows):
        inverse = np.float32(1) / merged_totals[row]
        for d in range(head_dim):
            output[row // group, kv_head * group + row % group, d] = merged[row, d] * inverse


run_item: Any = _jit(_run_item)


def _attend(destination: Any, thread: int, threads: int, userdata: Any) -> None:
    """Threads take the items one by one."""
    layer = carray(userdata, (_LAYER_WORDS,), np.int64)
    numbers = carray(userdata, (_LAYER_WORDS,), np.float64)
    counter = _address(userdata) + 8 * _NEXT_ITEM
    step = carray(_pointer(layer[_LAYER_STEP]), (_STEP_WORDS,), np.int64)
    tensor = carray(destination, (_TENSOR_WORDS,), np.int64)
    source = carray(_pointer(tensor[step[_SOURCE_OFFSET] // 8]), (_TENSOR_WORDS,), np.int64)
    rows = (_UNBOUNDED, step[_HEADS], step[_HEAD_DIM])
    queries = carray(_pointer(source[step[_DATA_OFFSET] // 8]), rows, np.float32)
    output = carray(_pointer(tensor[step[_DATA_OFFSET] // 8]), rows, np.float32)
    items = carray(_pointer(step[_ITEMS]), (_UNBOUNDED, ITEM_FIELDS), np.int32)
    sequences = carray(_pointer(step[_SEQUENCES]), (_UNBOUNDED, 4), np.int32)
    while True:
        index = _add_to(counter, 1)
        if index >= step[_ITEM_COUNT]:
            return
        item = items[index].astype(np.int64)
        sequence = sequences[item[_SEQUENCE]].astype(np.int64)
        start = sequence[0] + item[_FIRST_QUERY]
        run_item(layer, numbers, step, item, sequence, queries[start:], output[start:])
