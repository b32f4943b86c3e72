"""q4_product.cpp for machines without a C++ compiler: some rows times an interleaved q4_0 matrix, compiled by numba.

The same sums in the same order, so the same bits. For what `product_code` needs.
"""

from typing import Any

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
_SIZES, _multiply_rows = (_form.tile_bytes, _form.block_bytes), common.multiply_rows


def multiply(destination: Any, thread: int, threads: int, userdata: Any) -> None:
    """`ggml_custom_op_t`, see q4_product.cpp."""
    _multiply_rows(destination, threads, userdata, _quantise, _multiply_eight, _SIZES)
