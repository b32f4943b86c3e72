"""q4_product.cpp for machines without a C++ compiler: some rows times an interleaved q4_0 matrix, compiled by numba.

The same sums in the same order, so the same bits. For what `product_code` needs.
"""

from typing import Any

import numba
import numpy as np
from llvmlite import ir

from kvstore_engine.kernels import product_code as shared
from kvstore_engine.kernels import vector_code as code
from kvstore_engine.kernels.vector_code import FLOAT, FLOATS, LANES, WORD, WORDS, Builder, Value

_BLOCK = shared.BLOCK
_TILE_BYTES = 16 + 16 * LANES  # eight columns' scales and nibbles: one block of each
_ROWS = 16  # for which a tile is widened once
_PORTION = 4 * LANES
_AHEAD_BYTES = 2048
_SUM_BYTES = 4 * LANES
# A row's block: 32 values, their scale, and -8 times their sum: nibbles are 8 too large.
_SCALE, _CORRECTION, _BLOCK_BYTES = _BLOCK, _BLOCK + 4, _BLOCK + 8
_EVEN, _ODD = (0, 8, 2, 10, 4, 12, 6, 14), (1, 9, 3, 11, 5, 13, 7, 15)
_WIDENED = (0, 4, 1, 5, 2, 6, 3, 7)  # the order of columns in a widened tile
_BACK = (0, 2, 4, 6, 1, 3, 5, 7)


def _emit_quantise(b: Builder, values: Value, target: Value, stride: Value, blocks: Value) -> None:
    """One row's floats at `values`, a block every `stride` bytes from `target` on."""

    def body(block: Value, _: list[Value]) -> list[Value]:
        made, scale = shared.quantised(b, b.add(values, b.mul(block, code.long(4 * _BLOCK))))
        at = b.mul(block, stride)
        code.store(b, made, target, at)
        code.store(b, scale, target, b.add(at, code.long(_SCALE)))
        correction = b.mul(shared.sum_of_bytes(b, made), ir.Constant(WORD, -8))
        code.store(b, correction, target, b.add(at, code.long(_CORRECTION)))
        return []

    code.loop(b, blocks, [], body)


def _widened(b: Builder, tile: Value) -> tuple[list[Value], Value]:
    """`Tile` of q4_product.cpp: number i has elements 4 * i to 4 * i + 3 of eight columns; their scales."""
    fours: list[Value] = [None] * 8
    for half in range(2):
        left, right = (
            b.xor(code.load(b, WORDS, tile, code.long(16 + 64 * half + 32 * side), 1), code.words(0x88888888))
            for side in range(2)
        )
        for odd, order in enumerate((_EVEN, _ODD)):
            both = b.shuffle_vector(left, right, ir.Constant(WORDS, order))
            fours[2 * half + odd] = b.and_(both, code.words(0x0F0F0F0F))
            fours[2 * half + odd + 4] = b.and_(b.lshr(both, code.words(4)), code.words(0x0F0F0F0F))
    halves = code.load(b, ir.VectorType(shared.HALF, LANES), tile, code.long(0), 2)
    scales = b.shuffle_vector(halves, halves, ir.Constant(WORDS, _WIDENED))
    return [b.bitcast(four, shared.BYTES) for four in fours], b.fpext(scales, FLOATS)


def _times(b: Builder, fours: list[Value], row: Value) -> Value:
    """The sums of a tile's products with one row's block, a lane for each column."""
    factors = [b.bitcast(code.splat(b, code.load(b, WORD, row, code.long(4 * i))), shared.BYTES) for i in range(8)]
    total = code.splat(b, code.load(b, WORD, row, code.long(_CORRECTION)))
    if shared.VECTORS_MULTIPLY:
        for four, factor in zip(fours, factors, strict=True):
            total = shared.dot_of_fours(b, total, four, factor)
    else:
        pairs = shared.dot_of_pairs(b, fours[0], factors[0])  # eight of at most 2 * 15 * 128: 16 bits hold them
        for four, factor in zip(fours[1:], factors[1:], strict=True):
            pairs = b.add(pairs, shared.dot_of_pairs(b, four, factor))
        total = b.add(shared.sum_of_pairs(b, pairs), total)
    return b.sitofp(total, FLOATS)


def _emit_multiply(
    b: Builder, tiles: Value, rows: Value, count: Value, blocks: Value, output: Value, stride: Value, sums: Value
) -> None:
    """Eight columns times `count` rows of which each block's lie together. `sums`: room for as many vectors."""

    def clear(row: Value, _: list[Value]) -> list[Value]:
        code.store(b, code.floats(0.0), sums, b.mul(row, code.long(_SUM_BYTES)))
        return []

    def add_block(block: Value, _: list[Value]) -> list[Value]:
        tile = b.add(tiles, b.mul(block, code.long(_TILE_BYTES)))
        # The columns lie one after another, but each thread leaves out what others multiply.
        code.emit_prefetch(b, b.add(tile, code.long(_AHEAD_BYTES)), code.long(_TILE_BYTES))
        fours, scales = _widened(b, tile)
        first = b.add(rows, b.mul(b.mul(block, count), code.long(_BLOCK_BYTES)))

        def add_row(row: Value, _: list[Value]) -> list[Value]:
            at = b.add(first, b.mul(row, code.long(_BLOCK_BYTES)))
            both = b.fmul(scales, code.splat(b, code.load(b, FLOAT, at, code.long(_SCALE))))
            place = b.mul(row, code.long(_SUM_BYTES))
            code.store(b, code.fma(b, _times(b, fours, at), both, code.load(b, FLOATS, sums, place)), sums, place)
            return []

        code.loop(b, count, [], add_row)
        return []

    def give(row: Value, _: list[Value]) -> list[Value]:
        total = code.load(b, FLOATS, sums, b.mul(row, code.long(_SUM_BYTES)))
        code.store(b, b.shuffle_vector(total, total, ir.Constant(WORDS, _BACK)), output, b.mul(row, stride))
        return []

    code.loop(b, count, [], clear)
    code.loop(b, blocks, [], add_block)
    code.loop(b, count, [], give)


_quantise, _multiply_eight = code.operation(4, _emit_quantise), code.operation(7, _emit_multiply)
_address, _operands, _laid = code.address_of, shared.operands, shared.laid
_take, _leave = shared.take, shared.leave


def _multiply(destination: Any, thread: int, threads: int, userdata: Any) -> None:
    """`ggml_custom_op_t`, see q4_product.cpp."""
    values, matrix, output, count, elements, columns = _operands(destination, userdata)
    blocks, product = elements // _BLOCK, _address(userdata)
    # numba frees an array after its last use, which must therefore be in the loop that multiplies.
    quantised, sums = np.empty(count * blocks * _BLOCK_BYTES, np.uint8), np.empty(_ROWS * LANES, np.float32)
    for row in range(count):
        place, stride = _laid(row, count, blocks, _ROWS)
        target = quantised.ctypes.data + place * _BLOCK_BYTES
        _quantise(values + 4 * row * elements, target, stride * _BLOCK_BYTES, blocks)
    while True:
        begin = _take(product, _PORTION)
        if begin >= columns:
            break
        for row in range(0, count, _ROWS):
            for column in range(begin, min(begin + _PORTION, columns), LANES):
                _multiply_eight(
                    matrix + column // LANES * blocks * _TILE_BYTES,
                    quantised.ctypes.data + row * blocks * _BLOCK_BYTES,
                    min(_ROWS, count - row),
                    blocks,
                    output + 4 * (row * columns + column),
                    4 * columns,
                    sums.ctypes.data,
                )
    _leave(product, threads)


def compiled() -> Any:
    """The operation, compiled at first use; its address is valid as long as it lives."""
    return numba.cfunc(shared.CUSTOM_OPERATION, cache=True)(_multiply)
