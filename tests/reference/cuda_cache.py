"""A paged cache as the CUDA kernels have it, in numpy: how values become stored elements, and where those are.

The slow twin of csrc/elements.h and csrc/cache_layout.h; e4m3 by a table of its 128 magnitudes.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvstore_engine.kernels.cuda.program import CacheShape

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]
GREATEST = {"int8": 127.0, "fp8": 448.0}
GARBAGE = 0xFF  # NaN in each type, and -1 in int8 with a NaN scale

_CODES = np.arange(127)  # 127 itself is NaN
_E4M3 = np.where(_CODES < 8, _CODES * 2.0**-9, (1 + _CODES % 8 / 8) * 2.0 ** (_CODES // 8 - 7))


def narrowed(values: Floats, kind: str) -> npt.NDArray[np.generic]:
    """Unscaled: to the type's nearest, even where two are."""
    if kind == "f32":
        return values
    if kind == "f16":
        return values.astype(np.float16)
    if kind == "bf16":
        bits = values.view(np.uint32)
        return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
    if kind == "int8":
        return np.rint(values).astype(np.int8)
    magnitude = np.abs(values).astype(np.float64)
    above = np.clip(np.searchsorted(_E4M3, magnitude), 1, 126)
    low, high = magnitude - _E4M3[above - 1], _E4M3[above] - magnitude
    is_low = (low < high) | ((low == high) & (above % 2 == 1))
    return (np.where(is_low, above - 1, above) | np.where(np.signbit(values), 0x80, 0)).astype(np.uint8)


def widened(stored: npt.NDArray[np.generic], kind: str) -> Floats:
    if kind == "bf16":
        return (stored.astype(np.uint32) << 16).view(np.float32)
    if kind == "fp8":
        codes = stored.astype(np.uint8)
        magnitude = np.append(_E4M3, np.nan)[codes & 0x7F]
        return np.where(codes & 0x80, -magnitude, magnitude).astype(np.float32)
    return stored.astype(np.float32)


def quantised(values: Floats, kind: str) -> tuple[npt.NDArray[np.generic], Floats]:
    """Elements and scales of rows [..., head_dim]; the scales of an unscaled type are 1."""
    if kind not in GREATEST:
        return narrowed(values, kind), np.ones(values.shape[:-1], np.float32)
    greatest = np.abs(values).max(axis=-1).astype(np.float32)
    limit = np.float32(GREATEST[kind])
    is_zero = greatest < np.float32(1e-34)
    by = np.where(is_zero, np.float32(0), limit / np.where(is_zero, np.float32(1), greatest))
    scales = np.where(is_zero, np.float32(0), greatest / limit).astype(np.float32)
    return narrowed(values * by[..., None].astype(np.float32), kind), scales


class Plane:
    """One plane: uint8 [blocks, block_bytes], garbage until it is written."""

    def __init__(self, shape: CacheShape, blocks: int) -> None:
        self.shape = shape
        self.memory: Bytes = np.full((blocks, shape.block_bytes), GARBAGE, np.uint8)
        assert self.memory.ctypes.data % 16 == 0

    def write(self, block: int, place: int, values: Floats) -> Floats:
        """A token's [kv_heads, head_dim]; what is read back."""
        elements, scales = quantised(values, self.shape.cache)
        row = self.shape.kv_heads * self.shape.head_dim * self.shape.element.nbytes
        self.memory[block, place * row : (place + 1) * row] = np.ascontiguousarray(elements).view(np.uint8).ravel()
        if self.shape.element.scaled:
            at = self.shape.block_tokens * row + place * self.shape.kv_heads * 4
            self.memory[block, at : at + scales.nbytes] = scales.view(np.uint8)
        return widened(elements, self.shape.cache) * scales[:, None]
