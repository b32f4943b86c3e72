"""Rows times interleaved matrices: q4_0 to the bit as ggml's own products, q8_0 as its own order of sums says."""

import platform
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvstore_cuda.native_build import AVX2, FLAGS
from kvstore_engine.ggml import load_library, tensor_at
from kvstore_engine.graph.products import ProductOperations
from kvstore_engine.kernels import Kernels, build
from kvstore_engine.kernels.build import build_kernels
from kvstore_engine.kernels.foreign import array_at
from kvstore_engine.kernels.layout import Product
from kvstore_engine.kernels.selection import NativeKernels
from kvstore_engine.model.interleaved_layout import (
    ROWS_TOGETHER,
    interleave_q4_0,
    interleave_q8_0,
    is_interleaved_q4_0,
)
from kvstore_engine.model.weights import Linear
from kvstore_proto.ggml_types import Q4_0, Q8_0, TENSOR_TYPES
from tests.reference.examples import each_nth
from tests.reference.product_graph import Bytes, FloatArray, ProductGraph, product_in_order, random_matrix
from tests.reference.quantised_product import quantised_product

_LIBRARY = build_kernels()
_KERNELS = NativeKernels(_LIBRARY).isas


def _operation(name: str, matrix_type: int) -> tuple[Kernels, int]:
    """The kernels, which own the operation, and its address."""
    kernels = NativeKernels(_LIBRARY, name)
    address = kernels.q8_product_address if matrix_type == Q8_0 else kernels.q4_product_address
    if not address:
        pytest.skip(f"{name} leaves the product to ggml")
    return kernels, address


def _exact(graph: ProductGraph, rows: FloatArray, matrix: Bytes, matrix_type: int) -> FloatArray:
    """Return what the sums must be to the bit: q4_0's as ggml forms them, q8_0's block by block."""
    return product_in_order(rows, matrix) if matrix_type == Q8_0 else graph.ggmls()


@pytest.fixture
def graphs() -> Iterator[list[ProductGraph]]:
    """The fixture closes each graph that a test puts here."""
    made: list[ProductGraph] = []
    yield made
    for graph in made:
        graph.close()


@pytest.mark.parametrize("name", _KERNELS)
@pytest.mark.parametrize(
    ("matrix_type", "columns", "elements"),
    each_nth(
        [
            (matrix_type, *shape)
            for matrix_type in (Q8_0, Q4_0)
            for shape in [(8, 32), (32, 64), (40, 96), (200, 576), (264, 1536), (1992, 64)]
        ],
        5,
    ),
)
def test_products_have_the_bits_that_their_order_gives(
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
        np.testing.assert_array_equal(ours, _exact(graphs[-1], rows, matrix, matrix_type))
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
    low, high = (0x00, 0xFF) if matrix_type == Q4_0 else (0x80, 0x7F)  # -8 and 7 in each nibble; -128 and 127
    matrix[::2, :, 2:], matrix[1::2, :, 2:] = low, high
    matrix = matrix.reshape(16, -1)
    rows = np.array([[1e3], [-1e3], [1e-3]], np.float32) * np.ones((3, elements), np.float32)
    graphs.append(ProductGraph(rows, matrix, matrix_type))
    ours = graphs[0].ours(address, Product.new(), 1)
    np.testing.assert_allclose(ours, quantised_product(rows, matrix, matrix_type), rtol=1e-3)
    np.testing.assert_array_equal(ours, _exact(graphs[0], rows, matrix, matrix_type))
    assert kernels.name


def test_which_products_are_taken(graphs: list[ProductGraph]) -> None:
    operations, elements = ProductOperations(q4_0=4, q8_0=8, userdata=1), 1024
    rows = np.zeros((1, elements), np.float32)
    for kind, ours in ((Q4_0, 4), (Q8_0, 8)):
        graphs.append(ProductGraph(rows, np.zeros((64, TENSOR_TYPES[kind].row_bytes(elements)), np.uint8), kind))
        matrix = graphs[-1].matrix
        assert operations.operation(Linear(matrix, interleaved=True)) == ours
        assert operations.operation(Linear(matrix)) == 0  # in place, or repacked otherwise
    assert ProductOperations(0, 8, 1).operation(Linear(graphs[0].matrix, interleaved=True)) == 0  # ggml knows its own


def test_ggmls_repacking_is_recognised(graphs: list[ProductGraph]) -> None:
    matrix = random_matrix(np.random.default_rng(3), 24, 96, Q4_0)
    graphs.append(ProductGraph(np.zeros((1, 96), np.float32), matrix, Q4_0))
    packed = array_at(tensor_at(graphs[0].matrix).data, np.uint8, 3, ROWS_TOGETHER * matrix.shape[1])
    if not load_library().describe()["cpu_features"].count("avx2"):
        pytest.skip("other processors have other layouts")
    np.testing.assert_array_equal(interleave_q4_0(matrix), packed)
    assert is_interleaved_q4_0(matrix, packed[0])
    assert not is_interleaved_q4_0(matrix, matrix[:ROWS_TOGETHER].reshape(-1))


def test_eight_rows_of_q8_0_are_interleaved() -> None:
    """Byte by byte: of each block the scales of eight rows, then four values of each row in turn."""
    rows, blocks = 24, 3
    matrix = random_matrix(np.random.default_rng(4), rows, 32 * blocks, Q8_0)
    packed = np.empty(matrix.size, np.uint8)
    interleave_q8_0(matrix, packed)
    tiles, source = packed.reshape(rows // 8, blocks, 8 * 34), matrix.reshape(rows, blocks, 34)
    for row, block in np.ndindex(rows, blocks):
        tile, lane = tiles[row // 8, block], row % 8
        np.testing.assert_array_equal(tile[2 * lane : 2 * lane + 2], source[row, block, :2])
        for four in range(8):
            begin = 16 + 32 * four + 4 * lane
            np.testing.assert_array_equal(tile[begin : begin + 4], source[row, block, 2 + 4 * four : 6 + 4 * four])


@pytest.mark.skipif(not shutil.which("g++"), reason="needs g++")
@pytest.mark.skipif(platform.machine() != "x86_64", reason="the products are for x86")
def test_a_product_without_memory_ends_with_a_message(tmp_path: Path) -> None:
    kernels, program, source = Path(build.__file__).parent, tmp_path / "probe", tmp_path / "probe.cpp"
    source.write_text(
        '#include "product.h"\nint main(int, char** words) { *(char*)workspace(std::strtoull(words[1], 0, 10)) = 1; }'
    )
    command = ["g++", *FLAGS, *AVX2, "-O1", "-fno-builtin-malloc", f"-I{kernels}", "-o", str(program)]
    subprocess.run([*command, str(source)], check=True, timeout=120)
    assert subprocess.run([str(program), "4096"]).returncode == 0
    ended = subprocess.run([str(program), str(1 << 62)], capture_output=True, text=True)
    assert ended.returncode == -signal.SIGABRT
    assert ended.stderr == f"kvengine: no memory for {1 << 62} bytes of a product's rows\n"
