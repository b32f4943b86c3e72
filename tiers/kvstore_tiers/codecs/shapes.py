"""The shape of a payload: the tensors of each of its layers, for codecs.

The module finds the shape in a fingerprint, and writes shapes in the bytes of a codec's frame. A payload is `layers`
pieces of `layer_bytes` bytes with equal tensors. Invariant: the tensors of a shape lie in the layer, do not overlap,
and cover all of its bytes; a shape that was read from damaged bytes lies in the layer at least.
"""

from __future__ import annotations

import struct
from functools import lru_cache
from math import prod
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from kvstore_proto.errors import InvalidValue
from kvstore_proto.fingerprint import Fingerprint
from kvstore_proto.kv_layout import KVLayout, Numbers
from kvstore_proto.number_types import NUMBER_TYPES, NumberType

K, V, STATE = 1, 2, 0  # kinds of tensors; STATE is any other part of a layer
MAX_LAYERS, MAX_TENSORS, MAX_LAYER_BYTES = 4096, 16, 1 << 29
ALL_BITS = 0
_RECORD: Final = struct.Struct("<BBHIIIIII")  # kind, type, 0, offset, tokens, heads, width, strides of token and head
RECORD_BYTES: Final = _RECORD.size
_TYPES: Final[dict[int, NumberType]] = {
    code: NUMBER_TYPES[name]
    for code, name in enumerate(("u8", "f16", "bf16", "f32", "i8", "fp8_e4m3", "fp8_e5m2"))  # the order is the format
}
_CODES: Final = {kind: code for code, kind in _TYPES.items()}
_KINDS: Final = {"k": K, "v": V}


class ShapeError(ValueError):
    """Raised for bytes that are no shape. The message says why."""


class Tensor(NamedTuple):
    """One tensor of a layer: [tokens, heads, width] numbers of `type`. `offset` is the byte of the first one in the
    layer; the strides are bytes; the numbers of a head are side by side."""

    kind: int
    type: NumberType
    offset: int
    tokens: int
    heads: int
    width: int
    token_stride: int
    head_stride: int

    @property
    def nbytes(self) -> int:
        return self.tokens * self.heads * self.width * self.type.nbytes

    @property
    def end(self) -> int:
        """Return the offset behind its last byte."""
        last = (self.tokens - 1) * self.token_stride + (self.heads - 1) * self.head_stride
        return self.offset + last + self.width * self.type.nbytes

    def of(self, layers: npt.NDArray[np.uint8]) -> npt.NDArray[np.generic]:
        """Return its numbers in `layers`, an array [layer, byte], as a view [layer, token, head, number]."""
        return np.ndarray(
            (len(layers), self.tokens, self.heads, self.width),
            self.type.typestr,
            layers,
            self.offset,
            (layers.strides[0], self.token_stride, self.head_stride, self.type.nbytes),
        )


class PayloadShape(NamedTuple):
    """The shape of a payload of `layers` times `layer_bytes` bytes. `bears` says how few bits a number may keep under a
    lossy codec, by the profile of the model: a byte for each tensor of each layer, `ALL_BITS` where nothing may be
    lost; nothing while there is no profile."""

    layers: int
    layer_bytes: int
    tensors: tuple[Tensor, ...]
    bears: bytes = b""

    @property
    def nbytes(self) -> int:
        return self.layers * self.layer_bytes

    def pack(self) -> bytes:
        """Return the records of the tensors."""
        return b"".join(
            _RECORD.pack(each.kind, _CODES[each.type], 0, *each[2:6], each.token_stride, each.head_stride)
            for each in self.tensors
        )


@lru_cache(maxsize=256)
def read_shape(layers: int, layer_bytes: int, records: bytes) -> PayloadShape:
    """Return the shape whose `pack` gave `records`. Raises ShapeError."""
    if not (1 <= layers <= MAX_LAYERS and 1 <= layer_bytes <= MAX_LAYER_BYTES):
        raise ShapeError(f"{layers} layers of {layer_bytes} bytes are no payload")
    tensors = []
    for kind, code, _zero, offset, tokens, heads, width, token_stride, head_stride in _RECORD.iter_unpack(records):
        if code not in _TYPES or min(tokens, heads, width, token_stride, head_stride) < 1:
            raise ShapeError("a tensor has no size, or numbers of no known type")
        tensors.append(Tensor(kind, _TYPES[code], offset, tokens, heads, width, token_stride, head_stride))
    if any(each.end > layer_bytes for each in tensors) or sum(each.nbytes for each in tensors) != layer_bytes:
        raise ShapeError("its tensors do not fill its layers")
    return PayloadShape(layers, layer_bytes, tuple(tensors))


@lru_cache(maxsize=256)
def payload_shape(fingerprint: Fingerprint, group_id: int, payload_bytes: int) -> PayloadShape | None:
    """Return the shape of the payloads of a layer group; None when the fingerprint does not say it, or says it for
    another number of bytes."""
    group = fingerprint.group(group_id)
    if group is None or not group.layers or not payload_bytes:
        return None
    layout = KVLayout(fingerprint, group)
    names = [part.name for part in group.parts] or ["k", "v"]
    try:
        found = [_tensor(name, layout.numbers(payload_bytes, 0, name), group.kind) for name in names]
    except InvalidValue:
        return None
    layer_bytes = payload_bytes // len(group.layers)
    tensors = tuple(each for each in found if each is not None)
    is_whole = len(tensors) == len(names) and sum(each.nbytes for each in tensors) == layer_bytes
    if not is_whole or len(tensors) > MAX_TENSORS or len(group.layers) > MAX_LAYERS or layer_bytes > MAX_LAYER_BYTES:
        return None
    return PayloadShape(len(group.layers), layer_bytes, tensors)


def _tensor(name: str, found: Numbers, group_kind: str) -> Tensor | None:
    """Return a part of a layer as a tensor; None when its numbers are not side by side in each head."""
    shape, strides = found.shape, found.strides
    if group_kind == "recurrent":  # one state, no tokens
        shape, strides = (1, *shape), (found.type.nbytes, *strides)
    heads, head_stride = (shape[1], strides[1]) if len(shape) > 2 else (1, found.type.nbytes)
    width = prod(shape[2:] if len(shape) > 2 else shape[1:])
    if strides[-1] != found.type.nbytes or found.type not in _CODES:
        return None
    kind = _KINDS.get(name, STATE) if group_kind in ("full", "sliding") else STATE
    return Tensor(kind, found.type, found.offset, shape[0], heads, width, strides[0], head_stride)
