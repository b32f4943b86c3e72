"""q8_product.cpp for machines without a C++ compiler: some rows times a q8_0 matrix, compiled by numba.

The same sums in the same order, so the same bits. For what `product_code` needs.
"""

from typing import Any

import numba
import numpy as np
from llvmlite import ir

from kvstore_engine.kernels import product_code as shared
from kvstore_engine.kernels import vector_code as code
from kvstore_engine.kernels.vector_code import FLOAT, FLOATS, LANES, WORD, Builder, Value

_BLOCK, _COLUMN_BLOCK_BYTES = shared.BLOCK, 34
_PORTION = 32
_ROWS = 16  # for which a block of the matrix is made ready once
_COLUMNS = 4  # multiplied together
_SUM_BYTES = 4 * LANES
_SCALE, _BLOCK_BYTES = _BLOCK, _BLOCK + 4  # a row's block: 32 values and their scale


def _emit_quantise(b: Builder, values: Value, target: Value, stride: Value, blocks: Value) -> None:
    """One row's floats at `values`, a block every `stride` bytes from `target` on."""

    def body(block: Value, _: list[Value]) -> list[Value]:
        made, scale = shared.quantised(b, b.add(values, b.mul(block, code.long(4 * _BLOCK))))
        at = b.mul(block, stride)
        if shared.VECTORS_MULTIPLY:
            made = b.xor(made, shared.bytes_of(0x80))  # plus 128: one factor must be unsigned
        code.store(b, made, target, at)
        code.store(b, scale, target, b.add(at, code.long(_SCALE)))
        return []

    code.loop(b, blocks, [], body)


class _Weights:
    """One column's block at an address, ready to be multiplied with the same block of several rows."""

    def __init__(self, b: Builder, at: Value) -> None:
        self._b = b
        self._values = code.load(b, shared.BYTES, at, code.long(2), 1)
        self.scale = code.splat(b, b.fpext(code.load(b, shared.HALF, at, code.long(0), 2), FLOAT))
        if shared.VECTORS_MULTIPLY:
            excess = shared.dot_of_fours(b, code.words(0), shared.bytes_of(128), self._values)
            self._correction = b.sub(code.words(0), excess)
        else:
            self._magnitude = _signed(b, self._values, self._values)

    def times(self, row: Value) -> Value:
        """Lane i: the sum of products of elements 4 * i to 4 * i + 3."""
        b = self._b
        theirs = code.load(b, shared.BYTES, row, code.long(0), 1)
        if shared.VECTORS_MULTIPLY:
            total = shared.dot_of_fours(b, self._correction, theirs, self._values)
        else:
            total = shared.sum_of_pairs(b, shared.dot_of_pairs(b, self._magnitude, _signed(b, theirs, self._values)))
        return b.sitofp(total, FLOATS)


def _signed(b: Builder, values: Value, signs: Value) -> Value:
    return code.call(b, "llvm.x86.avx2.psign.b", shared.BYTES, values, signs)


def _sum_of_lanes(b: Builder, total: Value) -> Value:
    lanes = [b.extract_element(total, ir.Constant(WORD, lane)) for lane in range(LANES)]
    halves = [b.fadd(lanes[i + 4], lanes[i]) for i in range(4)]
    return b.fadd(b.fadd(halves[0], halves[2]), b.fadd(halves[1], halves[3]))


def _emit_multiply(columns: int) -> Any:
    """`columns` rows of the matrix times `count` rows of which each block's lie together.

    `sums`: room for as many vectors of each.
    """

    def emit(
        b: Builder, matrix: Value, rows: Value, count: Value, blocks: Value, output: Value, stride: Value, sums: Value
    ) -> None:
        row_bytes = b.mul(blocks, code.long(_COLUMN_BLOCK_BYTES))

        def place(row: Value, column: int) -> Value:
            return b.mul(b.add(b.mul(row, code.long(columns)), code.long(column)), code.long(_SUM_BYTES))

        def clear(row: Value, _: list[Value]) -> list[Value]:
            for column in range(columns):
                code.store(b, code.floats(0.0), sums, place(row, column))
            return []

        def add_block(block: Value, _: list[Value]) -> list[Value]:
            at = b.add(matrix, b.mul(block, code.long(_COLUMN_BLOCK_BYTES)))
            places = [b.add(at, b.mul(row_bytes, code.long(column))) for column in range(columns)]
            ahead = b.mul(row_bytes, code.long(2 * columns))
            for where in places:
                code.emit_prefetch(b, b.add(where, ahead), code.long(1))
            weights = [_Weights(b, where) for where in places]
            first = b.add(rows, b.mul(b.mul(block, count), code.long(_BLOCK_BYTES)))

            def add_row(row: Value, _: list[Value]) -> list[Value]:
                mine = b.add(first, b.mul(row, code.long(_BLOCK_BYTES)))
                scale = code.splat(b, code.load(b, FLOAT, mine, code.long(_SCALE)))
                for column, weight in enumerate(weights):
                    total = code.load(b, FLOATS, sums, place(row, column))
                    made = code.fma(b, b.fmul(weight.scale, scale), weight.times(mine), total)
                    code.store(b, made, sums, place(row, column))
                return []

            code.loop(b, count, [], add_row)
            return []

        def give(row: Value, _: list[Value]) -> list[Value]:
            for column in range(columns):
                total = _sum_of_lanes(b, code.load(b, FLOATS, sums, place(row, column)))
                code.store(b, total, output, b.add(b.mul(row, stride), code.long(4 * column)))
            return []

        code.loop(b, count, [], clear)
        code.loop(b, blocks, [], add_block)
        code.loop(b, count, [], give)

    return emit


_quantise = code.operation(4, _emit_quantise)
_multiply_four, _multiply_one = (code.operation(7, _emit_multiply(columns)) for columns in (_COLUMNS, 1))
_address, _operands, _laid = code.address_of, shared.operands, shared.laid
_take, _leave = shared.take, shared.leave


def _multiply(destination: Any, thread: int, threads: int, userdata: Any) -> None:
    """`ggml_custom_op_t`, see q8_product.cpp."""
    values, matrix, output, count, elements, columns = _operands(destination, userdata)
    blocks, product = elements // _BLOCK, _address(userdata)
    # numba frees an array after its last use, which must therefore be in the loop that multiplies.
    quantised, sums = np.empty(count * blocks * _BLOCK_BYTES, np.uint8), np.empty(_ROWS * _COLUMNS * LANES, np.float32)
    for row in range(count):
        place, stride = _laid(row, count, blocks, _ROWS)
        target = quantised.ctypes.data + place * _BLOCK_BYTES
        _quantise(values + 4 * row * elements, target, stride * _BLOCK_BYTES, blocks)
    while True:
        column = _take(product, _PORTION)
        if column >= columns:
            break
        end = min(column + _PORTION, columns)
        while column < end:
            weights = matrix + column * blocks * _COLUMN_BLOCK_BYTES
            for row in range(0, count, _ROWS):
                mine, together = quantised.ctypes.data + row * blocks * _BLOCK_BYTES, min(_ROWS, count - row)
                out = output + 4 * (row * columns + column)
                if column + _COLUMNS <= end:
                    _multiply_four(weights, mine, together, blocks, out, 4 * columns, sums.ctypes.data)
                else:
                    _multiply_one(weights, mine, together, blocks, out, 4 * columns, sums.ctypes.data)
            column += _COLUMNS if column + _COLUMNS <= end else 1
    _leave(product, threads)


def compiled() -> Any:
    """The operation, compiled at first use; its address is valid as long as it lives."""
    return numba.cfunc(shared.CUSTOM_OPERATION, cache=True)(_multiply)
