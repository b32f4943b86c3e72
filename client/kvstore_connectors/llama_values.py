"""The numbers in a plane of llama.cpp's saved state, of any type that they are stored in.

Owns the layouts of ggml's types that a K/V cache can have, for a sketch of the values. A type that is not known here is
read as bytes: a sketch of them is as good for equal bytes, and only for those.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvstore_connectors.llama_state import Bytes, Plane

Floats = npt.NDArray[np.float32]

F32, F16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, IQ4_NL, BF16 = 0, 1, 2, 3, 6, 7, 8, 20, 30
_BLOCK = 32  # numbers that share a scale
_BLOCK_BYTES = {Q4_0: 18, Q4_1: 20, Q5_0: 22, Q5_1: 24, Q8_0: 34, IQ4_NL: 18}
_IQ4_NL_VALUES = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32
)  # fmt: skip


def plane_values(plane: Plane, region: Bytes, tokens: int) -> Floats:
    """Return the numbers of a plane's `region`: f32 [tokens, numbers of a token]."""
    if plane.element_bytes:
        elements = plane.of(region, tokens).reshape(-1, tokens, plane.element_bytes)
        region = np.ascontiguousarray(elements.transpose(1, 0, 2)).reshape(-1)
    return _values(plane.ggml_type, np.ascontiguousarray(region)).reshape(tokens, -1)


def _values(ggml_type: int, raw: Bytes) -> Floats:
    if ggml_type == F32:
        return raw.view("<f4").astype(np.float32)
    if ggml_type == F16:
        return raw.view("<f2").astype(np.float32)
    if ggml_type == BF16:
        return (raw.view("<u2").astype(np.uint32) << 16).view(np.float32)
    size = _BLOCK_BYTES.get(ggml_type)
    if size is None or len(raw) % size:
        return raw.astype(np.float32) - 127.5
    blocks = raw.reshape(-1, size)
    scale = blocks[:, :2].copy().view("<f2").astype(np.float32)
    if ggml_type == Q8_0:
        return (scale * blocks[:, 2:].view(np.int8)).reshape(-1)
    at, least = 2, np.zeros((1, 1), np.float32)
    if ggml_type in (Q4_1, Q5_1):
        at, least = 4, blocks[:, 2:4].copy().view("<f2").astype(np.float32)
    high = np.zeros((len(blocks), _BLOCK), np.uint8)
    if ggml_type in (Q5_0, Q5_1):
        high = np.unpackbits(blocks[:, at : at + 4], axis=1, bitorder="little") * np.uint8(16)
        at += 4
    packed = blocks[:, at:]
    codes = np.concatenate([packed & 15, packed >> 4], axis=1) | high
    if ggml_type == IQ4_NL:
        return (scale * _IQ4_NL_VALUES[codes]).reshape(-1)
    middle = {Q4_0: 8.0, Q5_0: 16.0}.get(ggml_type, 0.0)
    return (scale * (codes.astype(np.float32) - np.float32(middle)) + least).reshape(-1)
