"""The definition of a product with a quantised matrix, in numpy."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvstore_engine.kernels.elements import widen_rows

FloatArray = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]


def quantised_product(rows: FloatArray, matrix: Bytes, matrix_type: int) -> npt.NDArray[np.float64]:
    """float32 rows [n, elements], quantised to q8_0 as ggml does, times a matrix, uint8 [columns, row bytes].

    `matrix_type`: ggml's number of its type, q8_0 or q4_0. Returns [n, columns].
    """
    blocks = rows.reshape(len(rows), -1, 32)
    largest = np.abs(blocks).max(axis=2, keepdims=True)
    inverse = np.divide(np.float32(127), largest, out=np.zeros_like(largest), where=largest != 0)
    scales = (largest / np.float32(127)).astype(np.float16).astype(np.float64)
    quantised = (np.rint(blocks * inverse) * scales).reshape(rows.shape)
    product: npt.NDArray[np.float64] = quantised @ widen_rows(matrix, matrix_type).astype(np.float64).T
    return product
