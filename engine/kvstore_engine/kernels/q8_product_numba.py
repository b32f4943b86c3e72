"""q8_product.cpp for machines without a C++ compiler: some rows times an interleaved q8_0 matrix, compiled by numba.

The same sums in the same order, so the same bits. For what `product_code` needs. Without instructions that multiply
bytes and add up fours, a row's values are split into sixteens and what is left, both from -8 to 8: eight products of
pairs with such a number fit 16 bits, so that a tile stays in registers as it is.
"""

from typing import Any

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
_SIZES, _multiply_rows = (_form.tile_bytes, _form.block_bytes), common.multiply_rows


def multiply(destination: Any, thread: int, threads: int, userdata: Any) -> None:
    """`ggml_custom_op_t`, see q8_product.cpp."""
    _multiply_rows(destination, threads, userdata, _quantise, _multiply_eight, _SIZES)
