"""q8_product.cpp for machines without a C++ compiler: a few rows times a large q8_0 matrix, compiled by numba.

The same sums in the same order, so the same bits. x86 with AVX2 only: elsewhere ggml's own product is used.
"""

import platform
from typing import Any

import numba
import numpy as np
from llvmlite import binding, ir
from numba import types

from kvstore_engine.kernels import vector_code as code

_CHUNK_COLUMNS = 32
_BLOCK, _BLOCK_BYTES = 32, 34
_DATA_OFFSET, _SOURCE_OFFSET, _EXTENT_OFFSET, _NEXT_COLUMN, _FINISHED = range(5)
_PRODUCT_WORDS, _TENSOR_WORDS, _UNBOUNDED = 5, 42, 1 << 40
_BYTES, _SHORTS = ir.VectorType(ir.IntType(8), 32), ir.VectorType(ir.IntType(16), 16)


def usable() -> bool:
    """Whether this processor has what the product is made of."""
    features = binding.get_host_cpu_features()
    return platform.machine() in ("x86_64", "AMD64") and all(features.get(name) for name in ("avx2", "fma", "f16c"))


def product_address() -> int:
    """Address of the operation; compiles it at first use."""
    signature = types.void(types.voidptr, types.int32, types.int32, types.voidptr)
    operation: Any = numba.cfunc(signature, cache=True)(_multiply)
    _kept.append(operation)
    return int(operation.address)


_kept: list[Any] = []  # compiled code lives as long as its wrapper


def _emit_multiply(rows: int) -> Any:
    """output[r * stride] = the matrix's row times row r of the step, for r < rows. All are addresses and bytes."""

    def emit(
        b: Any, output: Any, stride: Any, matrix: Any, values: Any, scales: Any, blocks: Any, elements: Any
    ) -> None:
        ones = ir.Constant(_SHORTS, [1] * 16)

        def body(block: Any, sums: list[Any]) -> list[Any]:
            at = b.mul(block, code.long(_BLOCK_BYTES))
            weight = code.load(b, _BYTES, matrix, b.add(at, code.long(2)), 1)
            magnitude = code.call(b, "llvm.x86.avx2.psign.b", _BYTES, weight, weight)
            scale = code.splat(b, b.fpext(code.load(b, ir.HalfType(), matrix, at, 2), ir.FloatType()))
            made = []
            for row, total in enumerate(sums):
                place = b.mul(elements, code.long(row))
                theirs = code.load(b, _BYTES, values, b.add(place, b.shl(block, code.long(5))), 1)
                signed = code.call(b, "llvm.x86.avx2.psign.b", _BYTES, theirs, weight)
                pairs = code.call(b, "llvm.x86.avx2.pmadd.ub.sw", _SHORTS, magnitude, signed)
                fours = b.sitofp(code.call(b, "llvm.x86.avx2.pmadd.wd", code.WORDS, pairs, ones), code.FLOATS)
                offset = b.add(b.lshr(place, code.long(3)), b.shl(block, code.long(2)))  # 4 bytes for 32 elements
                other = code.splat(b, code.load(b, ir.FloatType(), scales, offset))
                made.append(code.fma(b, b.fmul(scale, other), fours, total))
            return made

        zero = ir.Constant(code.FLOATS, [0.0] * 8)
        for row, total in enumerate(code.loop(b, blocks, [zero] * rows, body)):
            lanes = [b.extract_element(total, ir.Constant(ir.IntType(32), lane)) for lane in range(8)]
            halves = [b.fadd(lanes[i + 4], lanes[i]) for i in range(4)]
            whole = b.fadd(b.fadd(halves[0], halves[2]), b.fadd(halves[1], halves[3]))
            code.store(b, whole, output, b.mul(stride, code.long(row)))

    return emit


def _emit_round(b: Any, number: Any) -> None:
    """The float at an address, rounded to what a half can hold."""
    half = b.fptrunc(code.load(b, ir.FloatType(), number, code.long(0)), ir.HalfType())
    code.store(b, b.fpext(half, ir.FloatType()), number, code.long(0))


_one, _two, _four = (code.operation(7, _emit_multiply(rows)) for rows in (1, 2, 4))
_round_to_half = code.operation(1, _emit_round)
_pointer, _address, _take, _count_in = code.pointer, code.address_of, code.add_to, code.count_in_long
carray: Any = numba.carray  # type: ignore[attr-defined]


def _quantise(rows: Any, values: Any, scales: Any) -> None:
    """As ggml's quantize_row_q8_0."""
    for row in range(rows.shape[0]):
        for block in range(rows.shape[1] // _BLOCK):
            part = rows[row, block * _BLOCK : (block + 1) * _BLOCK]
            largest = np.float32(0)
            for i in range(_BLOCK):
                largest = max(largest, abs(part[i]))
            inverse = np.float32(127) / largest if largest != 0 else np.float32(0)
            for i in range(_BLOCK):
                values[row, block * _BLOCK + i] = np.int8(np.rint(part[i] * inverse))
            scales[row, block] = largest / np.float32(127)
            _round_to_half(scales[row, block:].ctypes.data)


quantise: Any = numba.njit(error_model="numpy")(_quantise)


def _multiply(destination: Any, thread: int, threads: int, userdata: Any) -> None:
    """`ggml_custom_op_t`, see q8_product.cpp."""
    product = carray(userdata, (_PRODUCT_WORDS,), np.int64)
    data, extent = product[_DATA_OFFSET] // 8, product[_EXTENT_OFFSET] // 8
    target = carray(destination, (_TENSOR_WORDS,), np.int64)
    first = product[_SOURCE_OFFSET] // 8
    factor = carray(_pointer(target[first]), (_TENSOR_WORDS,), np.int64)
    matrix = carray(_pointer(target[first + 1]), (_TENSOR_WORDS,), np.int64)
    elements, columns, count = matrix[extent], matrix[extent + 1], factor[extent + 1]
    blocks = elements // _BLOCK
    values, scales = np.empty((count, elements), np.int8), np.empty((count, blocks), np.float32)
    quantise(carray(_pointer(factor[data]), (count, elements), np.float32), values, scales)
    while True:
        begin = _take(_address(userdata) + 8 * _NEXT_COLUMN, _CHUNK_COLUMNS)
        if begin >= columns:
            break
        for column in range(begin, min(begin + _CHUNK_COLUMNS, columns)):
            weights = matrix[data] + column * blocks * _BLOCK_BYTES
            row = 0
            while row < count:
                out = target[data] + 4 * (row * columns + column)
                mine, scale = values[row].ctypes.data, scales[row].ctypes.data
                if count - row >= 4:
                    _four(out, 4 * columns, weights, mine, scale, blocks, elements)
                    row += 4
                elif count - row >= 2:
                    _two(out, 4 * columns, weights, mine, scale, blocks, elements)
                    row += 2
                else:
                    _one(out, 4 * columns, weights, mine, scale, blocks, elements)
                    row += 1
    if _count_in(_address(userdata) + 8 * _FINISHED) == threads:
        product[_NEXT_COLUMN] = 0
        product[_FINISHED] = 0
