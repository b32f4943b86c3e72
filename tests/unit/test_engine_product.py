"""Few rows times a q8_0 matrix: against the definition, and to the bit against ggml's own product."""

import ctypes as ct
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pytest

from kvstore_engine.ggml import Library, load_library, tensor_at
from kvstore_engine.ggml.structs import InitParams
from kvstore_engine.gguf.tensor_types import F32, Q8_0, TENSOR_TYPES
from kvstore_engine.graph.decoder import ProductOperation
from kvstore_engine.kernels import Kernels, select_kernels
from kvstore_engine.kernels.build import build_kernels
from kvstore_engine.kernels.foreign import array_at
from kvstore_engine.kernels.layout import Product
from kvstore_engine.kernels.native import NativeKernels
from kvstore_engine.kernels.reference import product_q8

FloatArray = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]
_LIBRARY = build_kernels()


@pytest.fixture(params=[*NativeKernels(_LIBRARY).isas, "numba"])
def kernels(request: pytest.FixtureRequest) -> Iterator[Kernels]:
    made = select_kernels("numba") if request.param == "numba" else NativeKernels(_LIBRARY, request.param)
    if not made.product_address:
        pytest.skip(f"{request.param} leaves the product to ggml")
    yield made


class _Graph:
    """One product in a ggml context with memory."""

    def __init__(self, rows: FloatArray, matrix: Bytes) -> None:
        self.ggml: Library = load_library()
        columns = len(matrix)
        size_bytes = matrix.nbytes + rows.nbytes + 4 * len(rows) * columns + (1 << 20)
        self.context = self.ggml.init(InitParams(size_bytes, None, False))
        self.matrix = self.ggml.new_tensor_2d(self.context, Q8_0, rows.shape[1], columns)
        self.rows = self.ggml.new_tensor_2d(self.context, F32, rows.shape[1], len(rows))
        array_at(tensor_at(self.matrix).data, np.uint8, *matrix.shape)[:] = matrix
        array_at(tensor_at(self.rows).data, np.float32, *rows.shape)[:] = rows
        self.shape = len(rows), columns

    def ggmls(self) -> FloatArray:
        return self._compute(self.ggml.mul_mat(self.context, self.matrix, self.rows), 1)

    def ours(self, kernels: Kernels, product: Product, threads: int) -> FloatArray:
        sources = (ct.c_void_p * 2)(self.rows, self.matrix)
        count, columns = self.shape
        address = kernels.product_address
        node = self.ggml.custom_4d(
            self.context, F32, columns, count, 1, 1, sources, 2, address, -1, ct.addressof(product)
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


def _matrix(random: np.random.Generator, columns: int, elements: int) -> Bytes:
    made = random.integers(-127, 128, (columns, elements // 32, 34), np.int8).view(np.uint8)
    made[:, :, :2] = random.uniform(1e-3, 1e-2, (columns, elements // 32, 1)).astype(np.float16).view(np.uint8)
    return made.reshape(columns, -1)


@pytest.mark.parametrize(("columns", "elements"), [(1, 32), (31, 64), (33, 96), (100, 576), (257, 1536)])
def test_products_have_ggmls_bits(kernels: Kernels, columns: int, elements: int) -> None:
    """For every number of rows that a step may have; the counters are ready for the next product each time."""
    random, product = np.random.default_rng(columns), Product.new()
    matrix = _matrix(random, columns, elements)
    for count in range(1, 18):
        rows = random.standard_normal((count, elements), dtype=np.float32)
        rows[count // 2, :32] = 0  # a block without a scale
        graph = _Graph(rows, matrix)
        try:
            ours = graph.ours(kernels, product, threads=1 + count % 3)
            np.testing.assert_allclose(ours, product_q8(rows, matrix), rtol=1e-4, atol=1e-3)
            np.testing.assert_array_equal(ours, graph.ggmls())
        finally:
            graph.close()
        assert (product.next_column, product.finished) == (0, 0)


def test_few_rows_are_taken() -> None:
    product, elements = ProductOperation(1, 1), 1024
    matrix = np.zeros((64, TENSOR_TYPES[Q8_0].row_bytes(elements)), np.uint8)
    for count, taken in ((1, False), (2, True), (128, True), (129, False)):
        graph = _Graph(np.zeros((count, elements), np.float32), matrix)
        assert product.takes(graph.matrix, graph.rows) is taken
        assert not product.takes(graph.rows, graph.rows)
        graph.close()
