"""The numbers that are read out of llama.cpp's planes follow ggml's types."""

from __future__ import annotations

import numpy as np
import pytest

from kvstore_connectors.llama_state import BF16, F16, F32, IQ4_NL, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Plane, plane_values

TOKENS, NUMBERS = 5, 64


@pytest.mark.parametrize("ggml_type", [F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, IQ4_NL])
def test_each_type_is_read_as_ggml_reads_it(ggml_type: int) -> None:
    gguf = pytest.importorskip("gguf")
    kind = gguf.GGMLQuantizationType(ggml_type)
    values = np.random.default_rng(1).standard_normal((TOKENS, NUMBERS)).astype(np.float32)
    if ggml_type == IQ4_NL:  # the package reads this one only
        raw = np.random.default_rng(2).integers(0, 255, (TOKENS, 2 * 18), np.uint8)
        raw[:, [0, 18]], raw[:, [1, 19]] = 0, 60
    else:
        raw = np.ascontiguousarray(gguf.quants.quantize(values, kind)).view(np.uint8).reshape(TOKENS, -1)
    read = plane_values(Plane(ggml_type, raw.shape[1]), raw.reshape(-1), TOKENS)
    assert np.array_equal(read, gguf.quants.dequantize(raw, kind).reshape(TOKENS, NUMBERS))


def test_a_transposed_plane_is_read_by_tokens() -> None:
    values = np.arange(TOKENS * NUMBERS, dtype=np.float16).reshape(TOKENS, NUMBERS)
    region = np.ascontiguousarray(values.T).view(np.uint8).reshape(-1)
    assert np.array_equal(plane_values(Plane(F16, 2 * NUMBERS, 2), region, TOKENS), values)


def test_a_type_that_is_not_known_is_told_apart_by_its_bytes() -> None:
    raw = np.random.default_rng(3).integers(0, 255, 2 * TOKENS * NUMBERS, np.uint8)
    read = plane_values(Plane(99, 2 * NUMBERS), raw, TOKENS)
    assert np.array_equal(read + 127.5, raw.reshape(TOKENS, -1))
