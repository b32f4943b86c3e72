"""Quantised blocks are ggml's, bit for bit: by hand-made blocks, and against ggml itself where it is installed."""

import ctypes
from functools import cache

import numpy as np
import numpy.typing as npt
import pytest

from kvstore_engine.models.quants import BLOCK, dequantise, quantise
from tests.reference import llama_tokenize

_GGML_TYPES = {"f16": 1, "q4_0": 2, "q8_0": 8}
_BLOCK_BYTES = {"f16": 64, "q4_0": 18, "q4_1": 20, "q8_0": 34}


def _f16(value: float) -> bytes:
    return np.float16(value).tobytes()


def test_a_q4_0_block_by_hand() -> None:
    # Byte j holds value j low and value j + 16 high; 8 is zero.
    raw = _f16(0.5) + bytes([0x18] + [0x88] * 14 + [0xF8])
    values = dequantise("q4_0", np.frombuffer(raw, np.uint8))
    expected = np.zeros(BLOCK, np.float32)
    expected[16], expected[31] = (1 - 8) * 0.5, (15 - 8) * 0.5
    assert values.tolist() == expected.tolist()


def test_a_q4_1_block_by_hand() -> None:
    raw = _f16(0.25) + _f16(-1.0) + bytes([0x20] + [0x00] * 15)
    values = dequantise("q4_1", np.frombuffer(raw, np.uint8))
    assert values[0] == -1.0
    assert values[16] == 2 * 0.25 - 1.0


def test_a_q8_0_block_by_hand() -> None:
    raw = _f16(2.0) + np.arange(-16, 16, dtype=np.int8).tobytes()
    assert dequantise("q8_0", np.frombuffer(raw, np.uint8)).tolist() == [2.0 * q for q in range(-16, 16)]


def test_q4_0_spends_its_odd_code_on_the_largest_magnitude() -> None:
    values = np.zeros(BLOCK, np.float32)
    values[3], values[4] = 8.0, -7.0
    block = quantise("q4_0", values)
    assert block[:2].tobytes() == _f16(-1.0)
    back = dequantise("q4_0", block)
    assert back[3] == 8.0
    assert back[4] == -7.0


def test_q8_0_rounds_halves_away_from_zero() -> None:
    values = np.zeros(BLOCK, np.float32)
    values[:4] = 127.0, 0.5, -0.5, 2.5
    quantised = quantise("q8_0", values)[2:].view(np.int8)
    assert quantised[:4].tolist() == [127, 1, -1, 3]


def test_bf16_widens_exactly() -> None:
    raw = np.array([0x3F80, 0xC000, 0x7F80], "<u2").view(np.uint8)
    assert dequantise("bf16", raw).tolist() == [1.0, -2.0, np.inf]


@pytest.mark.parametrize("name", ["q4_0", "q8_0", "f16", "f32"])
def test_zeros_stay_zeros(name: str) -> None:
    assert not dequantise(name, quantise(name, np.zeros(4 * BLOCK, np.float32))).any()


@cache
def _ggml() -> ctypes.CDLL:
    path = llama_tokenize.library_path()
    if path is None:
        pytest.skip("xllamacpp, which carries ggml, is not installed")
    return ctypes.CDLL(str(path))


def _values() -> npt.NDArray[np.float32]:
    random = np.random.default_rng(3)
    values = random.standard_normal((2000, BLOCK)).astype(np.float32)
    values[0] = 0
    values[1] = np.arange(BLOCK) - 16
    values[2] = np.arange(BLOCK) * 0.5
    values[3] = np.tile([1.0, -1.0], 16)
    values[4] *= 1e-8
    values[5] *= 1e4
    values[6] = -3.0
    return values.reshape(-1)


@pytest.mark.parametrize("name", ["q4_0", "q8_0", "f16"])
def test_quantise_equals_ggml(name: str) -> None:
    values = _values()
    theirs = np.zeros(values.size // BLOCK * _BLOCK_BYTES[name], np.uint8)
    function = _ggml().ggml_quantize_chunk
    function.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, *[ctypes.c_int64] * 3, ctypes.c_void_p]
    function(_GGML_TYPES[name], values.ctypes.data, theirs.ctypes.data, 0, values.size // BLOCK, BLOCK, None)
    assert np.array_equal(quantise(name, values), theirs)


@pytest.mark.parametrize("name", ["q4_0", "q4_1", "q8_0"])
def test_dequantise_equals_ggml(name: str) -> None:
    raw = np.random.default_rng(4).integers(0, 256, (2000, _BLOCK_BYTES[name]), np.uint8)
    raw[:, 1] &= 0xBB  # keeps the scales finite
    raw[:, 3] &= 0xBB
    raw = raw.reshape(-1)
    theirs = np.zeros(2000 * BLOCK, np.float32)
    function = getattr(_ggml(), f"dequantize_row_{name}")
    function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]
    function(raw.ctypes.data, theirs.ctypes.data, theirs.size)
    assert np.array_equal(dequantise(name, raw).view(np.uint32), theirs.view(np.uint32))
