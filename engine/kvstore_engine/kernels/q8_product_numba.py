"""q8_product.cpp for machines without a C++ compiler: some rows times an interleaved q8_0 matrix, compiled by numba.

The same sums in the same order, so the same bits. For what `product_code` needs. Without instructions that multiply
bytes and add up fours, a row's values are split into sixteens and what is left, both from -8 to 8: eight products of
pairs with such a number fit 16 bits, so that a tile stays in registers as it is.
"""

from typing import Any

import numba
import numpy as np
from llvmlite import ir

from kvstore_engine.kernels import interleaved_code as common
from kvstore_engine.kernels import product_code as shared
from kvstore_engine.kernels import vector_code as code
from kvstore_engine.kernels.vector_code import FLOATS, LANES, WORDS, Builder, Value

_SCALES_BYTES = 2 * LANES
_PARTS = ((0, 16), (shared.BLOCK, 1))  # a row's sixteens and what is left: where they begin, and what they count


class _Bytes(common.TileFormat):
    """Of a tile eight scales, then four bytes of each column in turn, as `interleave_q8_0` has it."""

    tile_bytes = _SCALES_BYTES + shared.BLOCK * LANES
    ahead_bytes = 4096
    factor_bytes = shared.BLOCK if shared.VECTORS_MULTIPLY else 2 * shared.BLOCK
    excess = 128

    def take(self, b: Builder, values: Value, target: Value) -> None:
        if shared.VECTORS_MULTIPLY:
            code.store(b, values, target, code.long(0))
            return
        halves = b.ashr(values, shared.bytes_of(1))  # lest what follows overflow a byte
        sixteens = b.ashr(b.add(halves, shared.bytes_of(4)), shared.bytes_of(3))
        code.store(b, sixteens, target, code.long(_PARTS[0][0]))
        left = b.sub(values, b.shl(sixteens, shared.bytes_of(4)))
        code.store(b, left, target, code.long(_PARTS[1][0]))

    def load(self, b: Builder, tile: Value) -> tuple[list[Value], Value]:
        loaded = [code.load(b, WORDS, tile, code.long(_SCALES_BYTES + 32 * i), 1) for i in range(8)]
        scales = code.load(b, ir.VectorType(shared.HALF, LANES), tile, code.long(0), 2)
        return [b.bitcast(b.xor(four, code.words(0x80808080)), shared.BYTES) for four in loaded], b.fpext(
            scales, FLOATS
        )

    def add_products(self, b: Builder, total: Value, weights: list[Value], factors: Value) -> Value:
        if shared.VECTORS_MULTIPLY:
            for weight, four in zip(weights, common.fours(b, factors), strict=True):
                total = shared.dot_of_fours(b, total, weight, four)
            return total
        for begin, each in _PARTS:
            pairs = ir.Constant(shared.SHORTS, [0] * 16)
            for weight, four in zip(weights, common.fours(b, factors, begin), strict=True):
                pairs = b.add(pairs, shared.dot_of_pairs(b, weight, four))  # eight of at most 2 * 255 * 8
            total = b.add(total, shared.sum_of_pairs(b, pairs, each))
        return total


_form = _Bytes()
_quantise, _multiply_eight = common.quantiser(_form), common.multiplier(_form)
_BLOCK, _TILE_BYTES, _BLOCK_BYTES = shared.BLOCK, _form.tile_bytes, _form.block_bytes
_ROWS, _PORTION, _LANES = common.ROWS, common.PORTION, code.LANES
_address, _operands, _laid = code.address_of, shared.operands, shared.laid
_take, _leave = shared.take, shared.leave


def _multiply(destination: Any, thread: int, threads: int, userdata: Any) -> None:
    """`ggml_custom_op_t`, see q8_product.cpp."""
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
