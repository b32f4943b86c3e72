"""ggml's own quantisers, for the tensor types whose formats the tests do not spell out themselves.

Owns the binding of `ggml_quantize_chunk` in the loaded library that the engine uses.
The quantisers of six types take half a minute, most of it to build tables. What is tested is multiplication,
so matrices of those are random blocks of the same spread, which both sides read alike.
"""

import ctypes as ct
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore_engine.ggml import load_library

# fmt: off
TYPE_NUMBERS = {
    "q5_0": 6, "q5_1": 7, "q2_k": 10, "q3_k": 11, "q4_k": 12, "q5_k": 13, "q6_k": 14,
    "iq2_xxs": 16, "iq2_xs": 17, "iq3_xxs": 18, "iq1_s": 19, "iq4_nl": 20, "iq3_s": 21, "iq2_s": 22, "iq4_xs": 23,
    "iq1_m": 29, "tq1_0": 34, "tq2_0": 35, "mxfp4": 39, "nvfp4": 40, "q1_0": 41, "q2_0": 42,
}
# fmt: on
_BLOCK_ELEMENTS = 256
# How many bytes a block has, and what its values' spread is in units of its scale.
_RANDOM_BLOCKS = {
    "iq2_xxs": (66, 40.0),
    "iq2_xs": (74, 40.0),
    "iq2_s": (82, 40.0),
    "iq3_s": (110, 130.0),
    "iq1_s": (50, 6.0),
    "iq1_m": (56, 6.0),
}


def quantise(values: npt.NDArray[np.float32], kind: str) -> bytes:
    """The bytes of `values`, float32 [rows, columns], as ggml type `kind`; every value is equally important."""
    if kind in _RANDOM_BLOCKS:
        return _random_blocks(values, kind)
    number = TYPE_NUMBERS[kind]
    values = np.ascontiguousarray(values, np.float32)
    rows, columns = values.shape
    importance = np.ones(columns, np.float32)
    row_size = _function("ggml_row_size", ct.c_size_t, ct.c_int, ct.c_int64)
    chunk = _function("ggml_quantize_chunk", ct.c_size_t, ct.c_int, *[ct.c_void_p] * 2, *[ct.c_int64] * 3, ct.c_void_p)
    result = np.zeros(rows * int(row_size(number, columns)), np.uint8)
    written = chunk(number, values.ctypes.data, result.ctypes.data, 0, rows, columns, importance.ctypes.data)
    assert written == result.size
    return result.tobytes()


def _random_blocks(values: npt.NDArray[np.float32], kind: str) -> bytes:
    """Blocks of any bits, but with scales that give them about the spread of `values`."""
    block_bytes, spread = _RANDOM_BLOCKS[kind]
    random = np.random.default_rng(values.size)
    count = values.size // _BLOCK_ELEMENTS
    blocks = random.integers(0, 256, (count, block_bytes), np.uint8)
    scales = random.uniform(0.8, 1.2, count) * float(values.std()) / spread
    halves = scales.astype("<f2").view("<u2")
    if kind == "iq1_m":  # the scale's four digits are the high ones of the last four words
        words = blocks[:, -8:].view("<u2")
        for digit in range(4):
            words[:, digit] = words[:, digit] & 0x0FFF | (halves >> 4 * digit & 15) << 12
    else:
        blocks[:, :2] = halves[:, None].view(np.uint8)
    return blocks.tobytes()


@cache
def _function(name: str, result: Any, *arguments: Any) -> Any:
    function = load_library()._symbol(name)
    function.restype, function.argtypes = result, list(arguments)
    return function
