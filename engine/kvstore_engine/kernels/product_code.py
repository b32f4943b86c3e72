"""The common code of products with quantised matrices: product.h for machines without a C++ compiler, by numba.

Owns rows quantised as ggml quantises them, and columns divided among threads. For x86 with AVX2 (`usable`);
`VECTORS_MULTIPLY`: with AVX512-VNNI or AVX-VNNI as well.
"""

import platform
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core.codegen import get_host_cpu_features

from kvstore_engine.kernels import vector_code as code
from kvstore_engine.kernels.vector_code import FLOAT, FLOATS, LANES, WORDS, Builder, Value

CUSTOM_OPERATION = types.void(types.voidptr, types.int32, types.int32, types.voidptr)  # ggml_custom_op_t
BLOCK = 32  # elements that share a scale
BYTE, HALF = ir.IntType(8), ir.HalfType()
BYTES, SHORTS = ir.VectorType(BYTE, 32), ir.VectorType(ir.IntType(16), 16)
_DATA_OFFSET, _SOURCE_OFFSET, _EXTENT_OFFSET, _NEXT_COLUMN, _FINISHED = range(5)  # layout.h, in 64-bit words
_PRODUCT_WORDS, _TENSOR_WORDS = 5, 42
_PEAK, _SUM = "llvm.vector.reduce.fmax.v8f32", "llvm.vector.reduce.add.v8i32"


def _features() -> set[str]:
    """What numba compiles for: this processor, or what $NUMBA_CPU_FEATURES says."""
    given = numba.config.CPU_FEATURES  # type: ignore[attr-defined]
    listed = get_host_cpu_features() if given is None else given  # type: ignore[no-untyped-call]
    return {name[1:] for name in listed.split(",") if name.startswith("+")}


_FEATURES = _features()
VECTORS_MULTIPLY = "avxvnni" in _FEATURES or {"avx512vnni", "avx512vl"} <= _FEATURES


def usable() -> bool:
    """Whether the products can be compiled for this processor."""
    return platform.machine() in ("x86_64", "AMD64") and {"avx2", "fma", "f16c"} <= _FEATURES


def bytes_of(number: int) -> Value:
    """`number` 32 times."""
    return ir.Constant(BYTES, [number] * 32)


def dot_of_fours(b: Builder, total: Value, unsigned: Value, signed: Value) -> Value:
    """total, and in lane i the sum of products of elements 4 * i to 4 * i + 3. Needs `VECTORS_MULTIPLY`."""
    factors = (b.bitcast(factor, WORDS) for factor in (unsigned, signed))
    return code.call(b, "llvm.x86.avx512.vpdpbusd.256", WORDS, total, *factors)


def dot_of_pairs(b: Builder, unsigned: Value, signed: Value) -> Value:
    """Lane i of 16: the sum of products of elements 2 * i and 2 * i + 1, which 16 bits must hold."""
    return code.call(b, "llvm.x86.avx2.pmadd.ub.sw", SHORTS, unsigned, signed)


def sum_of_pairs(b: Builder, pairs: Value, each: int = 1) -> Value:
    """Lane i: the sum of numbers 2 * i and 2 * i + 1, times `each`."""
    return code.call(b, "llvm.x86.avx2.pmadd.wd", WORDS, pairs, ir.Constant(SHORTS, [each] * 16))


def sum_of_bytes(b: Builder, signed: Value) -> Value:
    """All of 32, as a 32-bit integer."""
    return code.call(b, _SUM, code.WORD, sum_of_pairs(b, dot_of_pairs(b, bytes_of(1), signed)))


def quantised(b: Builder, values: Value) -> tuple[Value, Value]:
    """32 floats at an address as int8, and their scale: as quantize_row_q8_0."""
    parts = [code.load(b, FLOATS, values, code.long(4 * first)) for first in range(0, BLOCK, LANES)]
    largest = code.floats(0.0)
    for part in parts:
        magnitude = code.call(b, "llvm.fabs.v8f32", FLOATS, part)
        largest = b.select(b.fcmp_ordered(">", magnitude, largest), magnitude, largest)
    peak = code.call(b, _PEAK, FLOAT, largest)
    none, most = ir.Constant(FLOAT, 0.0), ir.Constant(FLOAT, 127.0)
    inverse = code.splat(b, b.select(b.fcmp_unordered("!=", peak, none), b.fdiv(most, peak), none))
    rounded = [code.call(b, "llvm.rint.v8f32", FLOATS, b.fmul(part, inverse)) for part in parts]
    whole = [b.trunc(b.fptosi(part, WORDS), ir.VectorType(BYTE, LANES)) for part in rounded]
    halves = [_joined(b, whole[0], whole[1]), _joined(b, whole[2], whole[3])]
    return _joined(b, *halves), b.fpext(b.fptrunc(b.fdiv(peak, most), HALF), FLOAT)


def _joined(b: Builder, left: Value, right: Value) -> Value:
    lanes = 2 * left.type.count
    return b.shuffle_vector(left, right, ir.Constant(ir.VectorType(code.WORD, lanes), list(range(lanes))))


carray: Any = numba.carray  # type: ignore[attr-defined]
jit: Any = numba.njit(error_model="numpy")
inline: Any = numba.njit(error_model="numpy", forceinline=True)
_pointer, _add_to, _count_in = code.pointer, code.add_to, code.count_in_long


def _operands(destination: Any, product: Any) -> Any:
    """`Operands` of product.h: the addresses of values, matrix and output; count, elements, columns."""
    offsets = carray(product, (_PRODUCT_WORDS,), np.int64)
    data, extent, source = offsets[_DATA_OFFSET] // 8, offsets[_EXTENT_OFFSET] // 8, offsets[_SOURCE_OFFSET] // 8
    target = carray(destination, (_TENSOR_WORDS,), np.int64)
    rows = carray(_pointer(target[source]), (_TENSOR_WORDS,), np.int64)
    matrix = carray(_pointer(target[source + 1]), (_TENSOR_WORDS,), np.int64)
    return rows[data], matrix[data], target[data], rows[extent + 1], matrix[extent], matrix[extent + 1]


def _laid(row: Any, count: Any, blocks: Any, most: Any) -> Any:
    """`lay_together` of product.h: the place of a row's first block, and how far it is from one to the next."""
    first = row // most * most
    return first * blocks + row - first, min(most, count - first)


def _take(product: Any, portion: Any) -> Any:
    """The first of `portion` columns that no other thread has. `product` is its address."""
    return _add_to(product + 8 * _NEXT_COLUMN, portion)


def _leave(product: Any, threads: Any) -> None:
    """The last thread resets the counters for the next product, which starts behind a barrier."""
    if _count_in(product + 8 * _FINISHED) == threads:
        counters = carray(_pointer(product), (_PRODUCT_WORDS,), np.int64)
        counters[_NEXT_COLUMN] = 0
        counters[_FINISHED] = 0


operands: Any = jit(_operands)
laid: Any = jit(_laid)
take: Any = jit(_take)
leave: Any = jit(_leave)
