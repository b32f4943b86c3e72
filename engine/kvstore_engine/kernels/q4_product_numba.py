"""q4_product.cpp for machines without a C++ compiler: some rows times an interleaved q4_0 matrix, compiled by numba.

The same sums in the same order, so the same bits. For what `product_code` needs.
"""

from typing import Any

import numba
import numpy as np
from llvmlite import ir

from kvstore_engine.kernels import interleaved_code as common
from kvstore_engine.kernels import product_code as shared
from kvstore_engine.kernels import vector_code as code
from kvstore_engine.kernels.vector_code import FLOATS, LANES, WORDS, Builder, Value

_EVEN, _ODD = (0, 8, 2, 10, 4, 12, 6, 14), (1, 9, 3, 11, 5, 13, 7, 15)
_WIDENED = (0, 4, 1, 5, 2, 6, 3, 7)  # the order of columns in a widened tile
_BACK = (0, 2, 4, 6, 1, 3, 5, 7)


class _Nibbles(common.TileFormat):
    """Of a tile eight scales, then nibbles, as ggml's repacking leaves them."""

    tile_bytes = 16 + 16 * LANES
    ahead_bytes = 2048
    factor_bytes = shared.BLOCK
    excess = 8

    def take(self, b: Builder, values: Value, target: Value) -> None:
        code.store(b, values, target, code.long(0))

    def load(self, b: Builder, tile: Value) -> tuple[list[Value], Value]:
        widened: list[Value] = [None] * 8
        for half in range(2):
            left, right = (
                b.xor(code.load(b, WORDS, tile, code.long(16 + 64 * half + 32 * side), 1), code.words(0x88888888))
                for side in range(2)
            )
            for odd, order in enumerate((_EVEN, _ODD)):
                both = b.shuffle_vector(left, right, ir.Constant(WORDS, order))
                widened[2 * half + odd] = b.and_(both, code.words(0x0F0F0F0F))
                widened[2 * half + odd + 4] = b.and_(b.lshr(both, code.words(4)), code.words(0x0F0F0F0F))
        halves = code.load(b, ir.VectorType(shared.HALF, LANES), tile, code.long(0), 2)
        scales = b.shuffle_vector(halves, halves, ir.Constant(WORDS, _WIDENED))
        return [b.bitcast(four, shared.BYTES) for four in widened], b.fpext(scales, FLOATS)

    def add_products(self, b: Builder, total: Value, weights: list[Value], factors: Value) -> Value:
        pairs = ir.Constant(shared.SHORTS, [0] * 16)
        for weight, four in zip(weights, common.fours(b, factors), strict=True):
            if shared.VECTORS_MULTIPLY:
                total = shared.dot_of_fours(b, total, weight, four)
            else:  # eight of at most 2 * 15 * 128: 16 bits hold them
                pairs = b.add(pairs, shared.dot_of_pairs(b, weight, four))
        return total if shared.VECTORS_MULTIPLY else b.add(total, shared.sum_of_pairs(b, pairs))

    def ordered(self, b: Builder, total: Value) -> Value:
        return b.shuffle_vector(total, total, ir.Constant(WORDS, _BACK))


_form = _Nibbles()
_quantise, _multiply_eight = common.quantiser(_form), common.multiplier(_form)
_BLOCK, _TILE_BYTES, _BLOCK_BYTES = shared.BLOCK, _form.tile_bytes, _form.block_bytes
_ROWS, _PORTION, _LANES = common.ROWS, common.PORTION, code.LANES
_address, _operands, _laid = code.address_of, shared.operands, shared.laid
_take, _leave = shared.take, shared.leave


def _multiply(destination: Any, thread: int, threads: int, userdata: Any) -> None:
    """`ggml_custom_op_t`, see q4_product.cpp."""
    values, matrix, output, count, elements, columns = _operands(destination, userdata)
    blocks, product = elements // _BLOCK, _address(userdata)
    # numba frees an array after its last use, which must therefore be in the loop that multiplies.
    quantised, sums = np.empty(count * blocks * _BLOCK_BYTES, np.uint8), np.empty(_ROWS * _LANES, np.float32)
    for row in range(count):
        place, stride = _laid(row, count, blocks, _ROWS)
        target = quantised.ctypes.data + place * _BLOCK_BYTES
        _quantise(values + 4 * row * elements, target, stride * _BLOCK_BYTES, blocks)
    while True:
        begin = _take(product, _PORTION)
        if begin >= columns:
            break
        for row in range(0, count, _ROWS):
            for column in range(begin, min(begin + _PORTION, columns), _LANES):
                _multiply_eight(
                    matrix + column // _LANES * blocks * _TILE_BYTES,
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
