"""A product with a quantised matrix in ggml's graph, by ggml or by one of our operations."""

import ctypes as ct

import numpy as np
import numpy.typing as npt
import pytest

from kvstore_engine.ggml import Library, load_library, tensor_at
from kvstore_engine.ggml.structs import InitParams
from kvstore_engine.kernels.foreign import array_at
from kvstore_engine.kernels.layout import Product
from kvstore_engine.model.interleaved_layout import ROWS_TOGETHER, interleave_q8_0
from kvstore_proto.ggml_types import F32, Q4_0, Q8_0, TENSOR_TYPES

FloatArray = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]


class ProductGraph:
    """One product in a ggml context with memory. The matrix has the layout of the model's weights: q4_0 is repacked by
    ggml; q8_0 is interleaved, and only our operations can multiply it.
    """

    def __init__(self, rows: FloatArray, matrix: Bytes, matrix_type: int) -> None:
        self.ggml: Library = load_library()
        columns = len(matrix)
        size_bytes = rows.nbytes + 12 * len(rows) * columns + (1 << 20)
        self.context = self.ggml.init(InitParams(size_bytes, None, False))
        self.rows = self.ggml.new_tensor_2d(self.context, F32, rows.shape[1], len(rows))
        array_at(tensor_at(self.rows).data, np.float32, *rows.shape)[:] = rows
        self.shape = len(rows), columns
        self.weights = self.ggml.init(InitParams(self.ggml.tensor_overhead() + 64, None, True))
        self.matrix = self.ggml.new_tensor_2d(self.weights, matrix_type, rows.shape[1], columns)
        placed = np.ascontiguousarray(matrix)
        if matrix_type == Q8_0:
            assert columns % ROWS_TOGETHER == 0, "rows that cannot be interleaved"
            placed = np.empty(matrix.size, np.uint8)
            interleave_q8_0(np.ascontiguousarray(matrix), placed)
        self.buffer = self._place(placed, repack=matrix_type == Q4_0)

    def _place(self, matrix: Bytes, *, repack: bool) -> int:
        ggml = self.ggml
        if repack and "CPU_REPACK" not in ggml.extra_buffer_types():
            pytest.skip("this ggml repacks nothing")
        kind = ggml.extra_buffer_types()["CPU_REPACK"] if repack else ggml.backend_cpu_buffer_type()
        buffer: int = ggml.backend_buft_alloc_buffer(kind, matrix.nbytes + 64)
        ggml.backend_tensor_alloc(buffer, self.matrix, ggml.backend_buffer_get_base(buffer))
        ggml.backend_tensor_set(self.matrix, matrix.ctypes.data, 0, matrix.nbytes)
        return buffer

    def ggmls(self) -> FloatArray:
        return self._compute(self.ggml.mul_mat(self.context, self.matrix, self.rows), 1)

    def ours(self, address: int, product: Product, threads: int, addend: FloatArray | None = None) -> FloatArray:
        """Return the product, to which the operation adds `addend` if there is one."""
        count, columns = self.shape
        sources = [self.rows, self.matrix]
        if addend is not None:
            sources.append(self.ggml.new_tensor_2d(self.context, F32, columns, count))
            array_at(tensor_at(sources[-1]).data, np.float32, count, columns)[:] = addend
        listed = (ct.c_void_p * len(sources))(*sources)
        node = self.ggml.custom_4d(
            self.context, F32, columns, count, 1, 1, listed, len(listed), address, -1, ct.addressof(product)
        )
        return self._compute(node, threads)

    def _compute(self, node: int, threads: int) -> FloatArray:
        graph = self.ggml.new_graph_custom(self.context, 8, False)
        self.ggml.build_forward_expand(graph, node)
        backend = self.ggml.backend_cpu_init()
        self.ggml.backend_cpu_set_n_threads(backend, threads)
        assert self.ggml.backend_graph_compute(backend, graph) == 0
        self.ggml.backend_free(backend)
        return array_at(tensor_at(node).data, np.float32, *self.shape).copy()

    def close(self) -> None:
        self.ggml.free(self.context)
        self.ggml.free(self.weights)
        self.ggml.backend_buffer_free(self.buffer)


def random_matrix(random: np.random.Generator, columns: int, elements: int, matrix_type: int) -> Bytes:
    """uint8 [columns, row bytes], of any quantised values."""
    kind = TENSOR_TYPES[matrix_type]
    made = random.integers(0, 256, (columns, elements // 32, kind.block_bytes), np.uint8)
    made[:, :, :2] = random.uniform(-1e-2, 1e-2, (columns, elements // 32, 1)).astype(np.float16).view(np.uint8)
    return made.reshape(columns, -1)


def product_in_order(rows: FloatArray, matrix: Bytes) -> FloatArray:
    """float32 rows times a q8_0 matrix by the sums that our operations form: a block of 32 elements after another, each
    added with one rounding. Slow.
    """
    blocks = rows.reshape(len(rows), -1, 32)
    largest = np.abs(blocks).max(axis=2, keepdims=True)
    inverse = np.divide(np.float32(127), largest, out=np.zeros_like(largest), where=largest != 0)
    quantised = np.rint(blocks * inverse).astype(np.int64)
    scales = (largest / np.float32(127)).astype(np.float16).astype(np.float32)
    packed = matrix.reshape(len(matrix), -1, TENSOR_TYPES[Q8_0].block_bytes)
    weights = packed[:, :, 2:].view(np.int8).astype(np.int64)
    theirs = packed[:, :, :2].copy().view(np.float16).astype(np.float32)
    total = np.zeros((len(rows), len(matrix)), np.float32)
    for block in range(blocks.shape[1]):
        whole = quantised[:, block] @ weights[:, block].T
        both = scales[:, block] * theirs[:, block].T  # float32: one rounding
        # 48 bits of product and a sum: 64 bits hold them, but for cases too rare to meet
        total = (whole.astype(np.longdouble) * both + total).astype(np.float32)
    return total
