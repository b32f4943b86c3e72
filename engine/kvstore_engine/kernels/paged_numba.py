"""The kernels for machines without a C++ compiler, compiled by numba at first use.

The same algorithm as paged_attention.cpp, lane for lane: rows of a tile are the vector's lanes, so a row's
result does not depend on its neighbours here either. LLVM vectorises the inner loops over lanes. Slower
than the C++, since running sums go through memory, but far ahead of numpy.

Compilation takes several seconds, once: numba keeps the machine code beside this file or in the user's cache.
"""

from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from kvstore_engine.kernels.reference import ReferenceKernels

_KEYS = 32  # keys in a tile
_MASKED = np.float32(-np.inf)
# Positions of layout.h's fields, in 64-bit words.
_HEADS, _KV_HEADS, _HEAD_DIM, _BLOCK_TOKENS, _TABLE_STRIDE, _ELEMENT_BYTES, _ROW_BYTES = range(7)
_DATA_OFFSET, _SOURCE_OFFSET, _SEQUENCES, _TABLES, _ITEM_COUNT, _ITEMS = range(7, 13)
_STEP_WORDS, _LAYER_WORDS, _TENSOR_WORDS = 13, 4, 42
_UNBOUNDED = 1 << 40  # numba checks no bounds: the length of an array over foreign memory is only its type's


class NumbaKernels(ReferenceKernels):
    """Attention by numba; copies by numpy, as in the reference."""

    name = "numba"

    def __init__(self) -> None:
        signature = types.void(types.voidptr, types.int32, types.int32, types.voidptr)
        self._operation: Any = numba.cfunc(signature, cache=True)(_attend)

    @property
    def attention_address(self) -> int:
        return int(self._operation.address)


def _to_pointer(_typing: Any, _address: Any) -> Any:
    """An integer as a void pointer, which numba has no cast for."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], ir.IntType(8).as_pointer())

    return types.voidptr(types.int64), generate


def _to_float(_typing: Any, _bits: Any) -> Any:
    """IEEE half, as 16 bits, to float: one instruction on CPUs with F16C or NEON."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.fpext(builder.bitcast(arguments[0], ir.HalfType()), ir.FloatType())

    return types.float32(types.uint16), generate


# numba's own annotations describe the Python view of these, not what compiled code may do with them.
_pointer: Any = intrinsic(_to_pointer)
_half: Any = intrinsic(_to_float)
carray: Any = numba.carray  # type: ignore[attr-defined]
# `contract` allows fused multiply-add and nothing else: sums keep their order.
_jit: Any = numba.njit(error_model="numpy", fastmath={"contract"})


def _widen_row(address: int, element_bytes: int, target: Any) -> None:
    """target = the stored elements at `address`."""
    if element_bytes == 2:
        halves = carray(_pointer(address), (len(target),), np.uint16)
        for i in range(len(target)):
            target[i] = _half(halves[i])
    else:
        target[:] = carray(_pointer(address), (len(target),), np.float32)


widen_row: Any = _jit(_widen_row)


def _score(scores: Any, keys: Any, queries: Any) -> None:
    """scores[key][lane] = keys[key] . queries[:, lane], channel after channel."""
    scores[: len(keys)] = 0
    for t in range(len(keys)):
        for d in range(queries.shape[0]):
            key = keys[t, d]
            for lane in range(queries.shape[1]):
                scores[t, lane] += key * queries[d, lane]


score: Any = _jit(_score)


def _softmax(scores: Any, count: int, limits: Any, peaks: Any, totals: Any, rescale: Any) -> None:
    """Scores to weights relative to the new running maximum; keys from a lane's limit on get weight 0."""
    for lane in range(len(limits)):
        before = peaks[lane]
        seen = min(count, limits[lane])
        for t in range(seen):
            peaks[lane] = max(peaks[lane], scores[t, lane])
        rescale[lane] = np.exp(before - peaks[lane])
        total = np.float32(0)
        for t in range(seen):
            scores[t, lane] = np.exp(scores[t, lane] - peaks[lane])
            total += scores[t, lane]
        for t in range(max(seen, 0), count):
            scores[t, lane] = 0
        totals[lane] = totals[lane] * rescale[lane] + total


softmax: Any = _jit(_softmax)


def _accumulate(output: Any, scores: Any, values: Any, rescale: Any) -> None:
    """output[channel][lane] = output * rescale + values[:, channel] . scores[:, lane], key after key."""
    for d in range(output.shape[0]):
        for lane in range(output.shape[1]):
            output[d, lane] *= rescale[lane]
        for t in range(len(values)):
            value = values[t, d]
            for lane in range(output.shape[1]):
                output[d, lane] += value * scores[t, lane]


accumulate: Any = _jit(_accumulate)


def _run_item(layer: Any, step: Any, item: Any, sequence: Any, queries: Any, output: Any) -> None:
    """One work item; `queries`, `output`: [token][head][channel] from the item's first query on."""
    head_dim, group = step[_HEAD_DIM], step[_HEADS] // step[_KV_HEADS]
    kv_head, lanes = item[1], item[3] * group
    before = sequence[2] - sequence[1] + item[2]  # context of the first query, itself excluded
    table = carray(_pointer(step[_TABLES] + 4 * item[0] * step[_TABLE_STRIDE]), (_UNBOUNDED,), np.int32)
    turned, summed = np.empty((head_dim, lanes), np.float32), np.zeros((head_dim, lanes), np.float32)
    keys, values = np.empty((_KEYS, head_dim), np.float32), np.empty((_KEYS, head_dim), np.float32)
    scores = np.empty((_KEYS, lanes), np.float32)
    peaks, totals = np.full(lanes, _MASKED, np.float32), np.zeros(lanes, np.float32)
    rescale, limits = np.empty(lanes, np.float32), np.empty(lanes, np.int64)
    scale = np.float32(1 / np.sqrt(head_dim))
    for lane in range(lanes):
        for d in range(head_dim):
            turned[d, lane] = queries[lane // group, kv_head * group + lane % group, d] * scale
    end = before + item[3]
    for first in range(0, end, _KEYS):
        count = min(_KEYS, end - first)
        for t in range(count):
            position = first + t
            slot = np.int64(table[position // step[_BLOCK_TOKENS]]) * step[_BLOCK_TOKENS]
            slot += position % step[_BLOCK_TOKENS]
            offset = slot * step[_ROW_BYTES] + kv_head * head_dim * step[_ELEMENT_BYTES]
            widen_row(layer[0] + offset, step[_ELEMENT_BYTES], keys[t])
            widen_row(layer[1] + offset, step[_ELEMENT_BYTES], values[t])
        for lane in range(lanes):
            limits[lane] = before + lane // group + 1 - first
        score(scores, keys[:count], turned)
        softmax(scores, count, limits, peaks, totals, rescale)
        accumulate(summed, scores, values[:count], rescale)
    for lane in range(lanes):
        for d in range(head_dim):
            output[lane // group, kv_head * group + lane % group, d] = summed[d, lane] / totals[lane]


run_item: Any = _jit(_run_item)


def _attend(destination: Any, thread: int, threads: int, userdata: Any) -> None:
    """Items are dealt out by turn."""
    layer = carray(userdata, (_LAYER_WORDS,), np.int64)
    step = carray(_pointer(layer[2]), (_STEP_WORDS,), np.int64)
    tensor = carray(destination, (_TENSOR_WORDS,), np.int64)
    source = carray(_pointer(tensor[step[_SOURCE_OFFSET] // 8]), (_TENSOR_WORDS,), np.int64)
    rows = (_UNBOUNDED, step[_HEADS], step[_HEAD_DIM])
    queries = carray(_pointer(source[step[_DATA_OFFSET] // 8]), rows, np.float32)
    output = carray(_pointer(tensor[step[_DATA_OFFSET] // 8]), rows, np.float32)
    items = carray(_pointer(step[_ITEMS]), (_UNBOUNDED, 4), np.int32)
    sequences = carray(_pointer(step[_SEQUENCES]), (_UNBOUNDED, 4), np.int32)
    for index in range(thread, step[_ITEM_COUNT], threads):
        item = items[index].astype(np.int64)
        sequence = sequences[item[0]].astype(np.int64)
        start = sequence[0] + item[2]
        run_item(layer, step, item, sequence, queries[start:], output[start:])
