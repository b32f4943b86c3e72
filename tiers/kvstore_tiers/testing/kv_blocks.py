"""Blocks of K and V for the tests of codecs: numbers as models give them, and numbers that no model should give."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from kvstore_proto.arena import BlockHeader
from kvstore_proto.fingerprint import Fingerprint, LayerGroup
from kvstore_proto.kv_layout import ENGINE_ORDER, HEADS_ORDER, PAIRS_ORDER
from kvstore_proto.number_types import NUMBER_TYPES
from kvstore_tiers.codecs.shapes import K, PayloadShape, Tensor, payload_shape
from kvstore_tiers.segments import Bytes
from kvstore_tiers.testing.transfers import block

Block = tuple[BlockHeader, Bytes, PayloadShape]


def kv_shape(layers: int, tokens: int, heads: int, width: int, dtype: str, order: str = ENGINE_ORDER) -> PayloadShape:
    """Return the shape of blocks of `tokens` tokens, with `heads` heads of `width` numbers in K and in V."""
    nbytes = 2 * heads * width * NUMBER_TYPES[dtype].nbytes
    group = LayerGroup(0, layers=tuple(range(layers)), bytes_per_token_per_layer=nbytes, heads=heads)
    fingerprint = Fingerprint(
        "made", "up", kv_dtype=dtype, layout=order, block_tokens=tokens, engine_block_tokens=1, groups=(group,)
    )
    shape = payload_shape(fingerprint, 0, layers * tokens * nbytes)
    assert shape is not None
    return shape


SHAPES = (
    kv_shape(6, 64, 3, 64, "f16"),
    kv_shape(4, 64, 1, 256, "bf16"),
    kv_shape(1, 33, 3, 5, "f16"),
    kv_shape(5, 100, 2, 7, "bf16"),
    kv_shape(3, 16, 2, 8, "f32"),
    kv_shape(2, 64, 4, 16, "f16", HEADS_ORDER),
    kv_shape(2, 96, 4, 24, "bf16", PAIRS_ORDER),
    kv_shape(2, 64, 2, 32, "u8"),
)
_EXTREMES = {  # bits by the size of the exponent: f16, bf16, f32; any other type takes its own bits of the last
    "NaN": (0x7E01, 0x7FC1, 0x7FC00001),
    "infinity": (0xFC00, 0xFF80, 0xFF800000),
    "denormal": (1, 1, 1),
    "largest": (0x7BFF, 0x7F7F, 0x7F7FFFFF),
    "zero": (0x8000, 0x8000, 0x80000000),
}
_PLACES = {"float16": 0, "bfloat16": 1}


def kv_block(number: int, shape: PayloadShape) -> Block:
    """Make block `number`: each channel of K has a mean and a size of its own, and drifts from token to token."""
    chosen = np.random.default_rng([number, shape.nbytes])
    header, payload = block(number, shape.nbytes)
    layers = payload.reshape(shape.layers, shape.layer_bytes)
    for tensor in shape.tensors:
        size = (shape.layers, tensor.tokens, tensor.heads, tensor.width)
        numbers = chosen.normal(0, 1, size)
        if tensor.kind == K:
            channels = (shape.layers, 1, tensor.heads, tensor.width)
            numbers = np.cumsum(numbers, axis=1) / 8 * chosen.lognormal(0, 1, channels) + chosen.normal(0, 2, channels)
        put_numbers(tensor, layers, numbers)
    return header, payload, shape


def extreme_blocks() -> Iterator[Block]:
    """Make blocks of every shape with NaN, infinities, the smallest numbers, the largest ones, zeros, and any bits; in
    all layers, or in the last one alone."""
    for at, shape in enumerate(SHAPES):
        for number, bits in enumerate(_EXTREMES.values()):
            for where in (slice(None), slice(-1, None)):
                header, payload, _ = kv_block(100 + number, shape)
                for tensor in shape.tensors:
                    found = _bits(tensor, payload.reshape(shape.layers, -1)[where])
                    found[:, ::2] = bits[_PLACES.get(tensor.type.name, 2)] & ((1 << 8 * tensor.type.nbytes) - 1)
                yield header, payload, shape
        yield *block(at, shape.nbytes), shape


def numbers_of(tensor: Tensor, layers: Bytes) -> npt.NDArray[np.float64]:
    """Return the numbers of a tensor in `layers`, an array [layer, byte], as [layer, token, head, number]."""
    bits = _bits(tensor, layers)
    if tensor.type.name == "bfloat16":
        return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return bits.view(tensor.type.typestr).astype(np.float64)


def put_numbers(tensor: Tensor, layers: Bytes, numbers: npt.NDArray[np.float64]) -> None:
    """Write numbers to a tensor in `layers`, rounded to its type."""
    bits = _bits(tensor, layers)
    if tensor.type.name == "bfloat16":
        whole = np.ascontiguousarray(numbers, np.float32).view(np.uint32)
        bits[:] = (whole + 0x7FFF + ((whole >> 16) & 1)) >> 16
    elif tensor.type.typestr[1] == "f":
        bits[:] = numbers.astype(tensor.type.typestr).view(bits.dtype)
    else:
        bits[:] = np.clip(numbers * 16, -120, 120).astype(np.int8).view(np.uint8)


def _bits(tensor: Tensor, layers: Bytes) -> npt.NDArray[np.unsignedinteger]:
    return tensor.of(layers).view(f"<u{tensor.type.nbytes}")
