"""ggml's block formats in numpy: float32 to bytes and back, with ggml's exact bits.

The module owns the layout of the blocks that this engine converts between. It knows no files or tensors.
A block is 32 values with their own scale (`QK4_0 == QK4_1 == QK8_0 == 32` in ggml-common.h):

    q4_0: f16 d,         16 bytes of two 4-bit q    x = (q - 8) * d
    q4_1: f16 d, f16 m,  16 bytes of two 4-bit q    x = q * d + m
    q8_0: f16 d,         32 signed bytes q          x = q * d

Byte j of a 4-bit block holds value j in its low half and value j + 16 in its high half. The values are
rounded as in `quantize_row_*_ref` in ggml-quants.c, including where it is uneven: q4_0 maps the value of largest
magnitude to -8, so its sign decides the sign of d.
"""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

BLOCK = 32
_HALF = BLOCK // 2
_Q4_0 = np.dtype([("d", "<f2"), ("q", "u1", _HALF)])
_Q4_1 = np.dtype([("d", "<f2"), ("m", "<f2"), ("q", "u1", _HALF)])
_Q8_0 = np.dtype([("d", "<f2"), ("q", "i1", BLOCK)])


def dequantise(type_name: str, raw: Bytes) -> Floats:
    """Return the float32 values, 1-d, in `raw` (uint8, whole blocks). Raises KeyError for a type not in `READABLE`."""
    return READABLE[type_name](raw)


def quantise(type_name: str, values: Floats) -> Bytes:
    """Return `values` (float32, 1-d, a multiple of 32 for block types) as bytes. Raises KeyError if not in
    `WRITABLE`.
    """
    # Subnormal scales have infinite inverses; like ggml, this leaves the result to the hardware.
    with np.errstate(over="ignore", invalid="ignore"):
        return WRITABLE[type_name](np.ascontiguousarray(values, np.float32))


def _nibbles(packed: Bytes) -> npt.NDArray[np.uint8]:
    """Return uint8 [n, 16] of byte pairs as uint8 [n, 32] of values 0..15."""
    values = np.empty((len(packed), BLOCK), np.uint8)
    np.bitwise_and(packed, 15, out=values[:, :_HALF])
    np.right_shift(packed, 4, out=values[:, _HALF:])
    return values


def _from_f32(raw: Bytes) -> Floats:
    return raw.view("<f4")


def _from_f16(raw: Bytes) -> Floats:
    return raw.view("<f2").astype(np.float32)


def _from_bf16(raw: Bytes) -> Floats:
    return (raw.view("<u2").astype(np.uint32) << 16).view(np.float32)


def _from_q4_0(raw: Bytes) -> Floats:
    blocks = raw.view(_Q4_0)
    values = _nibbles(blocks["q"]).astype(np.float32)
    values -= 8
    values *= blocks["d"].astype(np.float32)[:, None]
    return values.reshape(-1)


def _from_q4_1(raw: Bytes) -> Floats:
    blocks = raw.view(_Q4_1)
    values = _nibbles(blocks["q"]).astype(np.float32)
    values *= blocks["d"].astype(np.float32)[:, None]
    values += blocks["m"].astype(np.float32)[:, None]
    return values.reshape(-1)


def _from_q8_0(raw: Bytes) -> Floats:
    blocks = raw.view(_Q8_0)
    values = blocks["q"].astype(np.float32)
    values *= blocks["d"].astype(np.float32)[:, None]
    return values.reshape(-1)


def _inverse(scale: Floats) -> Floats:
    """Return 1 / scale, and 0 if the scale is 0, as ggml does."""
    inverse: Floats = np.zeros_like(scale)
    np.divide(np.float32(1), scale, out=inverse, where=scale != 0)
    return inverse


def _to_f32(values: Floats) -> Bytes:
    return values.view(np.uint8)


def _to_f16(values: Floats) -> Bytes:
    return values.astype("<f2").view(np.uint8)


def _to_q4_0(values: Floats) -> Bytes:
    rows = values.reshape(-1, BLOCK)
    peak = np.take_along_axis(rows, np.abs(rows).argmax(axis=1)[:, None], axis=1)
    scale = peak / np.float32(-8)
    scaled = rows * _inverse(scale)
    scaled += np.float32(8.5)
    quantised = np.minimum(scaled.astype(np.int8), 15).view(np.uint8)
    blocks = np.empty(len(rows), _Q4_0)
    blocks["d"] = scale[:, 0]
    np.left_shift(quantised[:, _HALF:], 4, out=blocks["q"])
    blocks["q"] |= quantised[:, :_HALF]
    return blocks.view(np.uint8)


def _to_q8_0(values: Floats) -> Bytes:
    rows = values.reshape(-1, BLOCK)
    scale: Floats = np.abs(rows).max(axis=1, keepdims=True) / np.float32(127)
    scaled = rows * _inverse(scale)
    # C's roundf rounds halves away from zero; numpy's rint rounds them to even.
    whole = np.trunc(scaled)
    np.subtract(scaled, whole, out=scaled)
    np.trunc(scaled * 2, out=scaled)
    whole += scaled
    blocks = np.empty(len(rows), _Q8_0)
    blocks["d"] = scale[:, 0]
    blocks["q"] = whole
    return blocks.view(np.uint8)


READABLE: dict[str, Callable[[Bytes], Floats]] = {
    "f32": _from_f32,
    "f16": _from_f16,
    "bf16": _from_bf16,
    "q4_0": _from_q4_0,
    "q4_1": _from_q4_1,
    "q8_0": _from_q8_0,
}
WRITABLE: dict[str, Callable[[Floats], Bytes]] = {
    "f32": _to_f32,
    "f16": _to_f16,
    "q4_0": _to_q4_0,
    "q8_0": _to_q8_0,
}
