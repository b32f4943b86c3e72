"""The inner loops of `paged_numba`: scores, softmax, sums of values, and the widening of stored elements.

Owns the order of their sums, which is that of paged_attention.cpp and simd.h: the same bits.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir

from kvstore_engine.kernels.vector_code import (
    FLOAT,
    FLOATS,
    LANES,
    WORD,
    WORDS,
    Builder,
    Value,
    call,
    floats,
    fma,
    load,
    long,
    loop,
    operation,
    splat,
    store,
    words,
)

TILE_KEYS = 32
_LARGEST = "llvm.vector.reduce.fmax.v8f32"


def _shuffled(b: Builder, left: Value, right: Value, lanes: tuple[int, ...]) -> Value:
    return b.shuffle_vector(left, right, ir.Constant(WORDS, list(lanes)))


_LOW, _HIGH = (0, 8, 1, 9, 4, 12, 5, 13), (2, 10, 3, 11, 6, 14, 7, 15)
_FRONT, _BACK = (0, 1, 8, 9, 4, 5, 12, 13), (2, 3, 10, 11, 6, 7, 14, 15)
_FIRST, _SECOND = (0, 1, 2, 3, 8, 9, 10, 11), (4, 5, 6, 7, 12, 13, 14, 15)


def _sums_of_lanes(b: Builder, rows: list[Value]) -> Value:
    """Lane i: the lanes of rows[i], added one after another."""
    pairs = [_shuffled(b, rows[i], rows[i + 1], mask) for i in range(0, 8, 2) for mask in (_LOW, _HIGH)]
    fours = [
        _shuffled(b, pairs[i + j], pairs[i + j + 2], mask) for i in (0, 4) for j in (0, 1) for mask in (_FRONT, _BACK)
    ]
    turned = [_shuffled(b, fours[i], fours[i + 4], mask) for mask in (_FIRST, _SECOND) for i in range(4)]
    total = floats(0.0)
    for row in turned:
        total = b.fadd(total, row)
    return total


def _emit_score(b: Builder, scores: Value, query: Value, keys: Value, stride: Value, steps: Value) -> None:
    def body(index: Value, sums: list[Value]) -> list[Value]:
        channels = b.shl(index, long(5))
        part = load(b, FLOATS, query, channels)
        return [
            fma(b, part, load(b, FLOATS, keys, b.add(channels, b.mul(stride, long(key)))), total)
            for key, total in enumerate(sums)
        ]

    sums = loop(b, steps, [floats(0.0)] * LANES, body)
    store(b, _sums_of_lanes(b, sums), scores, long(0))


def _emit_accumulate(rows: int, vectors: int) -> Callable[..., None]:
    def emit(
        b: Builder, output: Value, weights: Value, rescale: Value, values: Value, stride: Value, count: Value
    ) -> None:
        def place(row: int, vector: int) -> Value:
            return b.add(b.mul(stride, long(row)), long(4 * LANES * vector))

        places = [place(row, vector) for row in range(rows) for vector in range(vectors)]
        scales = [splat(b, load(b, FLOAT, rescale, long(4 * row))) for row in range(rows)]
        start = [b.fmul(load(b, FLOATS, output, where), scales[index // vectors]) for index, where in enumerate(places)]

        def body(key: Value, sums: list[Value]) -> list[Value]:
            at = b.mul(key, stride)
            loaded = [load(b, FLOATS, values, b.add(at, long(4 * LANES * vector))) for vector in range(vectors)]
            offset = b.shl(key, long(2))
            weight = [
                splat(b, load(b, FLOAT, weights, b.add(offset, long(4 * TILE_KEYS * row)))) for row in range(rows)
            ]
            return [
                fma(b, weight[index // vectors], loaded[index % vectors], total) for index, total in enumerate(sums)
            ]

        for where, total in zip(places, loop(b, count, start, body), strict=True):
            store(b, total, output, where)

    return emit


def _exponential(b: Builder, x: Value) -> Value:
    """`exponential` of simd.h."""
    lowest = floats(-87.0)
    clamped = b.select(b.fcmp_ordered(">", x, lowest), x, lowest)
    power = b.fptosi(fma(b, clamped, floats(1.4426950216293335), floats(-0.5)), WORDS)
    n = b.sitofp(power, FLOATS)
    r = fma(b, n, floats(_f32(2.12194440e-4)), fma(b, n, floats(-0.693359375), clamped))
    p = fma(b, r, floats(_f32(1.9875691500e-4)), floats(_f32(1.3981999507e-3)))
    for coefficient in (8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        p = fma(b, p, r, floats(_f32(coefficient)))
    value = b.fadd(fma(b, p, b.fmul(r, r), r), floats(1.0))
    scale = b.bitcast(b.shl(b.add(power, words(127)), words(23)), FLOATS)
    return b.select(b.fcmp_ordered(">=", x, lowest), b.fmul(value, scale), floats(0.0))


def _f32(number: float) -> float:
    return float(np.float32(number))


def _emit_soften(b: Builder, scores: Value, peak: Value, total: Value, rescale: Value) -> None:
    """One row's 32 scores to weights; its peak, total and rescale (addresses) follow."""
    before = load(b, FLOAT, peak, long(0))
    vectors = [load(b, FLOATS, scores, long(4 * first)) for first in range(0, TILE_KEYS, LANES)]
    largest = splat(b, before)
    for vector in vectors:
        largest = b.select(b.fcmp_ordered(">", vector, largest), vector, largest)
    new = call(b, _LARGEST, FLOAT, largest)
    spread = splat(b, new)
    weights = [_exponential(b, b.fsub(vector, spread)) for vector in vectors]
    summed = weights[0]
    for weight in weights[1:]:
        summed = b.fadd(summed, weight)
    for index, weight in enumerate(weights):
        store(b, weight, scores, long(4 * LANES * index))
    lanes = [b.extract_element(summed, ir.Constant(WORD, lane)) for lane in range(LANES)]
    quarters = [b.fadd(lanes[i], lanes[i + 4]) for i in range(4)]
    tile = b.fadd(b.fadd(quarters[0], quarters[2]), b.fadd(quarters[1], quarters[3]))
    factor = _exponential(b, splat(b, b.fsub(before, new)))
    scale = b.extract_element(factor, ir.Constant(WORD, 0))
    kept = fma(b, splat(b, load(b, FLOAT, total, long(0))), factor, splat(b, tile))
    store(b, b.extract_element(kept, ir.Constant(WORD, 0)), total, long(0))
    store(b, scale, rescale, long(0))
    store(b, new, peak, long(0))


def _emit_cap(b: Builder, scores: Value, cap: Value) -> None:
    """cap * tanh(score / cap) for 32 scores; `cap` is the address of a float."""
    limit = splat(b, load(b, FLOAT, cap, long(0)))
    inverse = b.fdiv(floats(1.0), limit)
    for first in range(0, TILE_KEYS, LANES):
        x = b.fmul(load(b, FLOATS, scores, long(4 * first)), inverse)
        negative = b.fcmp_ordered("<", x, floats(0.0))
        magnitude = b.select(negative, b.fneg(x), x)
        power = _exponential(b, b.fmul(magnitude, floats(-2.0)))
        value = b.fdiv(b.fsub(floats(1.0), power), b.fadd(floats(1.0), power))
        store(b, b.fmul(b.select(negative, b.fneg(value), value), limit), scores, long(4 * first))


def _emit_merge(
    b: Builder,
    output: Value,
    other: Value,
    peaks: Value,
    other_peak: Value,
    totals: Value,
    other_total: Value,
    steps: Value,
) -> None:
    """One row's sums of the spans before (output, peak, total: addresses) joined by another span's."""
    left, right = load(b, FLOAT, peaks, long(0)), load(b, FLOAT, other_peak, long(0))
    largest = b.select(b.fcmp_ordered("<", left, right), right, left)
    before, now = (_exponential(b, splat(b, b.fsub(peak, largest))) for peak in (left, right))

    def joined(mine: Value, others: Value) -> Value:
        return fma(b, mine, before, b.fmul(others, now))

    total = joined(splat(b, load(b, FLOAT, totals, long(0))), splat(b, load(b, FLOAT, other_total, long(0))))
    store(b, b.extract_element(total, ir.Constant(WORD, 0)), totals, long(0))
    store(b, largest, peaks, long(0))

    def body(index: Value, _: list[Value]) -> list[Value]:
        at = b.shl(index, long(5))
        store(b, joined(load(b, FLOATS, output, at), load(b, FLOATS, other, at)), output, at)
        return []

    loop(b, steps, [], body)


def _widening(widen: Callable[[Builder, Value, Value], Value]) -> Callable[..., None]:
    """target[i] = widen(source, first + i) for steps * 8 elements."""

    def emit(b: Builder, target: Value, source: Value, first: Value, steps: Value) -> None:
        def body(index: Value, _: list[Value]) -> list[Value]:
            element = b.add(first, b.shl(index, long(3)))
            store(b, widen(b, source, element), target, b.shl(index, long(5)))
            return []

        loop(b, steps, [], body)

    return emit


def _half(b: Builder, source: Value, element: Value) -> Value:
    halves = load(b, ir.VectorType(ir.HalfType(), LANES), source, b.shl(element, long(1)), 2)
    return b.fpext(halves, FLOATS)


def _brain(b: Builder, source: Value, element: Value) -> Value:
    halves = load(b, ir.VectorType(ir.IntType(16), LANES), source, b.shl(element, long(1)), 2)
    return b.bitcast(b.shl(b.zext(halves, WORDS), words(16)), FLOATS)


def _single(b: Builder, source: Value, element: Value) -> Value:
    return load(b, FLOATS, source, b.shl(element, long(2)))


def _block(b: Builder, source: Value, element: Value, size_bytes: int) -> tuple[Value, Value]:
    """The address of the block of `element`, and its scale in every lane."""
    at = b.add(source, b.mul(b.lshr(element, long(5)), long(size_bytes)))
    return at, splat(b, b.fpext(load(b, ir.HalfType(), at, long(0), 2), FLOAT))


def _eight_bits(b: Builder, source: Value, element: Value) -> Value:
    at, scale = _block(b, source, element, 34)
    within = b.add(b.and_(element, long(31)), long(2))
    whole = b.sext(load(b, ir.VectorType(ir.IntType(8), LANES), at, within, 1), WORDS)
    return b.fmul(b.sitofp(whole, FLOATS), scale)


def _four_bits(b: Builder, source: Value, element: Value) -> Value:
    at, scale = _block(b, source, element, 18)
    within = b.add(b.and_(element, long(15)), long(2))
    both = b.zext(load(b, ir.VectorType(ir.IntType(8), LANES), at, within, 1), WORDS)
    upper = b.icmp_unsigned("!=", b.and_(element, long(16)), long(0))
    nibbles = b.select(upper, b.lshr(both, words(4)), b.and_(both, words(15)))
    return b.fmul(b.sitofp(b.sub(nibbles, words(8)), FLOATS), scale)


score_eight: Any = operation(5, _emit_score)
accumulate = {(rows, vectors): operation(6, _emit_accumulate(rows, vectors)) for rows in (1, 3) for vectors in (1, 4)}
soften: Any = operation(4, _emit_soften)
cap_scores: Any = operation(2, _emit_cap)
merge_row: Any = operation(7, _emit_merge)
widen_half: Any = operation(4, _widening(_half))
widen_brain: Any = operation(4, _widening(_brain))
widen_single: Any = operation(4, _widening(_single))
widen_eight_bits: Any = operation(4, _widening(_eight_bits))
widen_four_bits: Any = operation(4, _widening(_four_bits))
