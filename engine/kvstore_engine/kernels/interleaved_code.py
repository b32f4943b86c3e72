"""Loops over a matrix of which eight columns are interleaved, compiled by numba: what q4_0 and q8_0 have in common.

Owns the order of the sums: a tile (one block of eight columns) after another, each added in one rounding. What a tile
is, and how it is multiplied, is the format's. numba keeps compiled code until the file of the compiled function
changes: after a change here, touch q4_product_numba.py and q8_product_numba.py.
"""

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
from llvmlite import ir

from kvstore_engine.kernels import product_code as shared
from kvstore_engine.kernels import vector_code as code
from kvstore_engine.kernels.vector_code import FLOAT, FLOATS, LANES, WORD, Builder, Value

ROWS = 16  # for which a tile is loaded once
PORTION = 4 * LANES
_SUM_BYTES = 4 * LANES
_SCALE, _CORRECTION, _FACTORS = 0, 4, 8  # of a row's block: where its parts begin


class TileFormat(ABC):
    """The layout of a tile, and of a row's block. Values are stored `excess` too large, to be unsigned."""

    tile_bytes: int
    ahead_bytes: int
    factor_bytes: int
    excess: int

    @property
    def block_bytes(self) -> int:
        """Of a row's block: its scale, -excess times the sum of its values, its factors."""
        return _FACTORS + self.factor_bytes

    @abstractmethod
    def take(self, b: Builder, values: Value, target: Value) -> None:
        """32 values of a row, as what tiles are multiplied with."""

    @abstractmethod
    def load(self, b: Builder, tile: Value) -> tuple[list[Value], Value]:
        """Number i has elements 4 * i to 4 * i + 3 of eight columns, unsigned bytes; the scales, in the same order."""

    @abstractmethod
    def add_products(self, b: Builder, total: Value, weights: list[Value], factors: Value) -> Value:
        """To each lane of `total` the products of a tile's column with the factors at an address."""

    def ordered(self, b: Builder, total: Value) -> Value:
        """Lanes in the order of columns."""
        return total


def fours(b: Builder, factors: Value, begin: int = 0) -> list[Value]:
    """32 bytes from `begin` on: number i has four of them in every lane."""
    return [
        b.bitcast(code.splat(b, code.load(b, WORD, factors, code.long(begin + 4 * i))), shared.BYTES) for i in range(8)
    ]


def quantiser(form: TileFormat) -> Any:
    """(values, target, stride, blocks): one row's floats, a block every `stride` bytes from `target` on."""

    def emit(b: Builder, values: Value, target: Value, stride: Value, blocks: Value) -> None:
        def body(block: Value, _: list[Value]) -> list[Value]:
            made, scale = shared.quantised(b, b.add(values, b.mul(block, code.long(4 * shared.BLOCK))))
            at = b.add(target, b.mul(block, stride))
            code.store(b, scale, at, code.long(_SCALE))
            correction = b.mul(shared.sum_of_bytes(b, made), ir.Constant(WORD, -form.excess))
            code.store(b, correction, at, code.long(_CORRECTION))
            form.take(b, made, b.add(at, code.long(_FACTORS)))
            return []

        code.loop(b, blocks, [], body)

    emitted = code.operation(4, emit)

    def quantise(values: Any, target: Any, stride: Any, blocks: Any) -> None:
        emitted(values, target, stride, blocks)

    return shared.inline(quantise)


def multiplier(form: TileFormat) -> Any:
    """(tiles, rows, count, blocks, output, stride, sums): eight columns times `count` rows, stored block by block.
    `sums`: room for `count` vectors.
    """

    def emit(
        b: Builder, tiles: Value, rows: Value, count: Value, blocks: Value, output: Value, stride: Value, sums: Value
    ) -> None:
        def clear(row: Value, _: list[Value]) -> list[Value]:
            code.store(b, code.floats(0.0), sums, b.mul(row, code.long(_SUM_BYTES)))
            return []

        def add_block(block: Value, _: list[Value]) -> list[Value]:
            tile = b.add(tiles, b.mul(block, code.long(form.tile_bytes)))
            # Columns are contiguous, but each thread skips what others multiply.
            code.emit_prefetch(b, b.add(tile, code.long(form.ahead_bytes)), code.long(form.tile_bytes))
            weights, scales = form.load(b, tile)
            first = b.add(rows, b.mul(b.mul(block, count), code.long(form.block_bytes)))

            def add_row(row: Value, _: list[Value]) -> list[Value]:
                at = b.add(first, b.mul(row, code.long(form.block_bytes)))
                both = b.fmul(scales, code.splat(b, code.load(b, FLOAT, at, code.long(_SCALE))))
                correction = code.splat(b, code.load(b, WORD, at, code.long(_CORRECTION)))
                whole = form.add_products(b, correction, weights, b.add(at, code.long(_FACTORS)))
                place = b.mul(row, code.long(_SUM_BYTES))
                total = code.fma(b, b.sitofp(whole, FLOATS), both, code.load(b, FLOATS, sums, place))
                code.store(b, total, sums, place)
                return []

            code.loop(b, count, [], add_row)
            return []

        def give(row: Value, _: list[Value]) -> list[Value]:
            total = code.load(b, FLOATS, sums, b.mul(row, code.long(_SUM_BYTES)))
            code.store(b, form.ordered(b, total), output, b.mul(row, stride))
            return []

        code.loop(b, count, [], clear)
        code.loop(b, blocks, [], add_block)
        code.loop(b, count, [], give)

    emitted = code.operation(7, emit)

    def multiply(tiles: Any, rows: Any, count: Any, blocks: Any, output: Any, stride: Any, sums: Any) -> None:
        emitted(tiles, rows, count, blocks, output, stride, sums)

    return shared.inline(multiply)


_BLOCK, _LANES = shared.BLOCK, LANES
_address, _operands, _laid = code.address_of, shared.operands, shared.laid
_take, _leave = shared.take, shared.leave


def _multiply_rows(
    destination: Any, threads: Any, userdata: Any, quantise: Any, multiply_eight: Any, sizes: Any
) -> None:
    """A whole product: quantise the rows, then multiply columns until none is left. `quantise` and `multiply_eight` are
    those of a format, `sizes` its bytes of a tile and of a row's block.
    """
    tile_bytes, block_bytes = sizes
    values, matrix, output, count, elements, columns = _operands(destination, userdata)
    blocks, product = elements // _BLOCK, _address(userdata)
    # numba frees an array after its last use, which must therefore be in the loop that multiplies.
    quantised, sums = np.empty(count * blocks * block_bytes, np.uint8), np.empty(ROWS * _LANES, np.float32)
    for row in range(count):
        place, stride = _laid(row, count, blocks, ROWS)
        target = quantised.ctypes.data + place * block_bytes
        quantise(values + 4 * row * elements, target, stride * block_bytes, blocks)
    while True:
        begin = _take(product, PORTION)
        if begin >= columns:
            break
        for row in range(0, count, ROWS):
            for column in range(begin, min(begin + PORTION, columns), _LANES):
                multiply_eight(
                    matrix + column // _LANES * blocks * tile_bytes,
                    quantised.ctypes.data + row * blocks * block_bytes,
                    min(ROWS, count - row),
                    blocks,
                    output + 4 * (row * columns + column),
                    4 * columns,
                    sums.ctypes.data,
                )
    _leave(product, threads)


multiply_rows: Any = shared.inline(_multiply_rows)
