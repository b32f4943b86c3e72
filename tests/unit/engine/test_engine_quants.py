"""Quantised blocks are read and written as they are defined: by hand-made blocks."""

import numpy as np
import numpy.typing as npt
import pytest

from kvstore_engine.ggml import load_library
from kvstore_engine.ggml.tensor_values import dequantised, quantised
from kvstore_engine.gguf import TENSOR_TYPES
from tests.reference.skips import skip_without_ggml

BLOCK = 32
_NUMBERS = {kind.name: number for number, kind in TENSOR_TYPES.items()}


@pytest.fixture(autouse=True)
def _needs_ggml() -> None:
    skip_without_ggml()


def dequantise(name: str, raw: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    return dequantised(load_library(), _NUMBERS[name], raw)


def quantise(name: str, values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint8]:
    return quantised(load_library(), _NUMBERS[name], values)


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
