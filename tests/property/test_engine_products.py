"""Products with interleaved q8_0 and q4_0 matrices: the definition, the same bits by either compiler, and sums with
other rows.
"""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore_engine.kernels import Kernels
from kvstore_engine.kernels.layout import Product
from kvstore_proto.ggml_types import Q4_0, Q8_0
from tests.reference.compilers import Compiler, native_kernels
from tests.reference.examples import examples
from tests.reference.product_graph import ProductGraph, random_matrix
from tests.reference.quantised_product import quantised_product


def _address(kernels: Kernels, matrix_type: int) -> int:
    return kernels.q8_product_address if matrix_type == Q8_0 else kernels.q4_product_address


@pytest.mark.parametrize("compiler", ["system", pytest.param("zig", marks=pytest.mark.slow)])
@pytest.mark.parametrize("matrix_type", [Q4_0, Q8_0])
@settings(max_examples=examples(40))
@given(
    groups=st.integers(1, 12),
    blocks=st.integers(1, 20),
    count=st.one_of(st.integers(1, 20), st.integers(1, 128)),
    threads=st.integers(1, 3),
    magnitude=st.sampled_from([1e-3, 1.0, 1e4]),
    seed=st.integers(0, 99),
)
def test_a_product_is_the_definitions_and_the_system_compilers(
    compiler: Compiler,
    matrix_type: int,
    groups: int,
    blocks: int,
    count: int,
    threads: int,
    magnitude: float,
    seed: int,
) -> None:
    system, tried = native_kernels("system"), native_kernels(compiler)
    if not _address(system, matrix_type):
        pytest.skip("this processor leaves the product to ggml")
    random = np.random.default_rng(seed)
    matrix = random_matrix(random, 8 * groups, 32 * blocks, matrix_type)
    rows = random.standard_normal((count, 32 * blocks), dtype=np.float32) * np.float32(magnitude)
    rows[random.integers(count), :32] = 0  # a block without a scale
    graph = ProductGraph(rows, matrix, matrix_type)
    addend = random.standard_normal((count, 8 * groups), dtype=np.float32) * np.float32(magnitude)
    try:
        theirs, ours = (
            graph.ours(_address(kernels, matrix_type), Product.new(), threads) for kernels in (system, tried)
        )
        added = graph.ours(_address(tried, matrix_type), Product.new(), threads, addend)
    finally:
        graph.close()
    np.testing.assert_array_equal(ours, theirs)
    np.testing.assert_array_equal(added, ours + addend)
    expected = quantised_product(rows, matrix, matrix_type)
    np.testing.assert_allclose(ours, expected, rtol=1e-4, atol=1e-3 * magnitude)
