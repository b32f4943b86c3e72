"""Rows times q8_0 and interleaved q4_0 matrices: against the definition, and to the bit against ggml's own products."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvstore_engine.ggml import load_library, tensor_at
from kvstore_engine.gguf.tensor_types import Q4_0, Q8_0, TENSOR_TYPES
from kvstore_engine.graph.products import ProductOperations
from kvstore_engine.kernels import Kernels, select_kernels
from kvstore_engine.kernels.build import build_kernels
from kvstore_engine.kernels.foreign import array_at
from kvstore_engine.kernels.layout import Product
from kvstore_engine.kernels.native import NativeKernels
from kvstore_engine.kernels.reference import quantised_product
from kvstore_engine.model import Linear
from kvstore_engine.model.interleaving import ROWS_TOGETHER, interleave, is_interleaved
from tests.reference.product_graph import ProductGraph, random_matrix

_TIMEOUT_S = 900
_LIBRARY = build_kernels()
_KERNELS = [*NativeKernels(_LIBRARY).isas, "numba"]


def _operation(name: str, matrix_type: int) -> tuple[Kernels, int]:
    """The kernels, which own the operation, and its address."""
    kernels = select_kernels("numba") if name == "numba" else NativeKernels(_LIBRARY, name)
    address = kernels.q8_product_address if matrix_type == Q8_0 else kernels.q4_product_address
    if not address:
        pytest.skip(f"{name} leaves the product to ggml")
    return kernels, address


@pytest.fixture
def graphs() -> Iterator[list[ProductGraph]]:
    """Whatever a test puts here is closed after it."""
    made: list[ProductGraph] = []
    yield made
    for graph in made:
        graph.close()


@pytest.mark.parametrize("name", _KERNELS)
@pytest.mark.parametrize(
    ("matrix_type", "columns", "elements"),
    [
        (Q8_0, 1, 32),
        (Q8_0, 31, 64),
        (Q8_0, 33, 96),
        (Q8_0, 100, 576),
        (Q8_0, 257, 1536),
        (Q8_0, 1999, 64),
        (Q4_0, 8, 32),
        (Q4_0, 32, 64),
        (Q4_0, 40, 96),
        (Q4_0, 200, 576),
        (Q4_0, 264, 1536),
        (Q4_0, 1992, 64),
    ],
)
def test_products_have_ggmls_bits(
    name: str, matrix_type: int, columns: int, elements: int, graphs: list[ProductGraph]
) -> None:
    """For every number of rows that a decode step may have, and some chunks of prompts; the counters are ready for
    the next product each time."""
    kernels, address = _operation(name, matrix_type)
    random, product = np.random.default_rng(columns), Product.new()
    matrix = random_matrix(random, columns, elements, matrix_type)
    for count in (*range(1, 19), 33, 64, 128):
        rows = random.standard_normal((count, elements), dtype=np.float32)
        rows[count // 2, :32] = 0  # a block without a scale
        graphs.append(ProductGraph(rows, matrix, matrix_type))
        ours = graphs[-1].ours(address, product, threads=1 + count % 3)
        np.testing.assert_allclose(ours, quantised_product(rows, matrix, matrix_type), rtol=1e-4, atol=1e-3)
        np.testing.assert_array_equal(ours, graphs[-1].ggmls())
        assert (product.next_column, product.finished) == (0, 0)
    assert kernels.name


@pytest.mark.parametrize("name", _KERNELS)
@pytest.mark.parametrize("matrix_type", [Q4_0, Q8_0])
def test_extreme_values_do_not_overflow(name: str, matrix_type: int, graphs: list[ProductGraph]) -> None:
    """The greatest sums within a block, of either sign."""
    kernels, address = _operation(name, matrix_type)
    elements, kind = 64, TENSOR_TYPES[matrix_type]
    matrix = np.zeros((16, elements // 32, kind.block_bytes), np.uint8)
    matrix[:, :, :2] = np.frombuffer(np.float16(1).tobytes(), np.uint8)
    low, high = (0x00, 0xFF) if matrix_type == Q4_0 else (0x81, 0x7F)  # -8 and 7 in each nibble; -127 and 127
    matrix[::2, :, 2:], matrix[1::2, :, 2:] = low, high
    matrix = matrix.reshape(16, -1)
    rows = np.array([[1e3], [-1e3], [1e-3]], np.float32) * np.ones((3, elements), np.float32)
    graphs.append(ProductGraph(rows, matrix, matrix_type))
    ours = graphs[0].ours(address, Product.new(), 1)
    np.testing.assert_allclose(ours, quantised_product(rows, matrix, matrix_type), rtol=1e-3)
    np.testing.assert_array_equal(ours, graphs[0].ggmls())
    assert kernels.name


@pytest.mark.slow
def test_numba_has_the_same_bits_without_vnni() -> None:
    """The tests above, for numba as it compiles for a processor that has AVX2 alone."""
    from numba.core.codegen import get_host_cpu_features

    features = get_host_cpu_features().split(",")
    if "+avx2" not in features:
        pytest.skip("this processor has no AVX2")
    newer = ("avx512", "avxvnni", "avx10")
    lesser = ["-" + name[1:] if name[1:].startswith(newer) else name for name in features]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "numba and not without", __file__]
    done = subprocess.run(
        command,
        env=os.environ | {"NUMBA_CPU_FEATURES": ",".join(lesser)},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
    )
    assert done.returncode == 0, done.stdout
    assert "skipped" not in done.stdout, done.stdout


def test_which_products_are_taken(graphs: list[ProductGraph]) -> None:
    operations, elements = ProductOperations(4, 8, 1), 1024
    q8, q4 = (np.zeros((64, TENSOR_TYPES[kind].row_bytes(elements)), np.uint8) for kind in (Q8_0, Q4_0))
    for count, of_q8, of_q4 in ((1, 8, 4), (128, 8, 4), (129, 0, 4)):
        rows = np.zeros((count, elements), np.float32)
        graphs += [ProductGraph(rows, q8, Q8_0), ProductGraph(rows, q4, Q4_0)]
        eight, four = graphs[-2:]
        assert operations.faster(Linear(eight.matrix), eight.rows) == of_q8
        assert operations.faster(Linear(four.matrix, interleaved=True), four.rows) == of_q4
        assert operations.faster(Linear(four.matrix), four.rows) == 0  # repacked otherwise
        assert operations.faster(Linear(eight.rows), eight.rows) == 0


def test_ggmls_repacking_is_recognised(graphs: list[ProductGraph]) -> None:
    matrix = random_matrix(np.random.default_rng(3), 24, 96, Q4_0)
    graphs.append(ProductGraph(np.zeros((1, 96), np.float32), matrix, Q4_0))
    packed = array_at(tensor_at(graphs[0].matrix).data, np.uint8, 3, ROWS_TOGETHER * matrix.shape[1])
    if not load_library().describe()["cpu_features"].count("avx2"):
        pytest.skip("other processors have other layouts")
    np.testing.assert_array_equal(interleave(matrix), packed)
    assert is_interleaved(matrix, packed[0])
    assert not is_interleaved(matrix, matrix[:ROWS_TOGETHER].reshape(-1))
