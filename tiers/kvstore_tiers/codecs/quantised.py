"""`int8` and `int4` keep K and V as small whole numbers and their scales.

K has a scale for each channel of a group of tokens, 64 for `int8` and 32 for `int4`: its channels differ in size by a
factor of 3 to 33, while V's do not. V has a scale for each token (`int8`), or for each 32 numbers of a token (`int4`).
`int8` numbers are symmetric around 0; `int4` has the smallest number of each group too.

A coded layer is its tensors one after the other: the scales, the smallest numbers (`int4`), then the numbers token by
token, two to a byte for `int4`, the first of them in the low half. Scales have the type of the numbers, rounded
up, so that no number is clipped. A layer with a number that is not finite, or over 1e18, or with tiny ones alone,
and a layer that loses a larger part of its RMS than the codec may, are stored as they are. The compiled code and
NumPy's give the same bytes.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from kvstore_proto.number_types import NUMBER_TYPES
from kvstore_tiers.codecs import CodingError, Undecodable
from kvstore_tiers.codecs.frames import Bytes, CodedLayers, Frame, LayeredCodec
from kvstore_tiers.codecs.native import address_of, library
from kvstore_tiers.codecs.quantised_arrays import dequantise, quantise
from kvstore_tiers.codecs.shapes import K, PayloadShape, Tensor, V

TYPES: Final = {NUMBER_TYPES["f16"]: 1, NUMBER_TYPES["bf16"]: 2, NUMBER_TYPES["f32"]: 3}


class QuantisedCodec(LayeredCodec):
    """A codec that keeps each number as `bits` bits, 8 or 4. Coded layers of one shape have one length. A layer whose
    error has a relative RMS above `most_error` is stored exact.
    """

    is_lossy = True

    def __init__(self, name: str, number: int, bits: int, most_error: float) -> None:
        self.name, self.number, self.bits, self.most_error = name, number, bits, most_error

    def takes(self, shape: PayloadShape) -> bool:
        return plan_of(self.bits, shape) is not None

    def encode_layers(self, shape: PayloadShape, layers: Bytes, room: Bytes) -> CodedLayers | None:
        plan, native = plan_of(self.bits, shape), library()
        assert plan is not None
        sums, as_they_are = np.zeros(3), np.zeros(shape.layers, np.uint8)  # squares, those of errors, largest error
        copied: int
        if native is None:
            copied = quantise(self.bits, shape, layers, plan.coded_bytes, room, self.most_error, as_they_are, sums)
        else:
            copied = native.kv_quantise(
                self.bits, plan.address, len(shape.tensors), address_of(layers), shape.layers, shape.layer_bytes,
                plan.coded_bytes, address_of(room), room.nbytes, self.most_error, address_of(as_they_are),
                address_of(sums),
            )  # fmt: skip
        if copied < 0:
            return None
        whole, lost, worst = sums.tolist()
        error = CodingError(float(np.float32(math.sqrt(lost / whole))) if whole else 0.0, worst)
        if not copied:
            return CodedLayers([plan.coded_bytes] * shape.layers, [False] * shape.layers, error)
        lengths = np.where(as_they_are, shape.layer_bytes, plan.coded_bytes).tolist()
        return CodedLayers(lengths, as_they_are.astype(bool).tolist(), error)

    def decode_layers(self, frame: Frame, stored: memoryview, numbers: range, layers: Bytes) -> None:
        plan, native = plan_of(self.bits, frame.shape), library()
        assert plan is not None
        begin, end = frame.places[numbers.start], frame.places[numbers.stop]
        if end - begin != plan.coded_bytes * len(numbers):
            raise Undecodable(f"{end - begin} bytes are not {len(numbers)} layers of {plan.coded_bytes}")
        coded = np.frombuffer(stored, np.uint8, end - begin, begin)
        if native is None:
            dequantise(self.bits, frame.shape, coded.reshape(len(numbers), plan.coded_bytes), layers)
        elif native.kv_dequantise(
            self.bits, plan.address, len(frame.shape.tensors), address_of(coded), len(numbers), plan.coded_bytes,
            address_of(layers), frame.shape.layer_bytes,
        ):  # fmt: skip
            raise MemoryError("no memory to decode")


class Plan(NamedTuple):
    """The tensors of a shape as the compiled code reads them, and the length of a coded layer in bytes."""

    described: npt.NDArray[np.int64]
    address: int
    coded_bytes: int


@lru_cache(maxsize=256)
def plan_of(bits: int, shape: PayloadShape) -> Plan | None:
    """Return how a shape is coded; None for a shape that has other tensors than K and V of 16 or 32 bits."""
    if not shape.tensors or any(each.kind not in (K, V) or each.type not in TYPES for each in shape.tensors):
        return None
    described = np.array([[each.kind, TYPES[each.type], *each[2:]] for each in shape.tensors], np.int64)
    return Plan(described, described.ctypes.data, sum(_coded_bytes(bits, each) for each in shape.tensors))


def int8() -> QuantisedCodec:
    """Return the codec `int8`, which halves 16-bit numbers. K and V of models lose 0.004 to 0.01 of their RMS."""
    return QuantisedCodec("int8", 3, 8, most_error=0.03)


def int4() -> QuantisedCodec:
    """Return the codec `int4`, which makes less than a third of 16-bit numbers. K and V of models lose 0.04 to 0.09 of
    their RMS.
    """
    return QuantisedCodec("int4", 4, 4, most_error=0.2)


def _coded_bytes(bits: int, tensor: Tensor) -> int:
    channels = tensor.heads * tensor.width
    if tensor.kind == K:
        scales = -(-tensor.tokens // (64 if bits == 8 else 32)) * channels
    else:
        scales = tensor.tokens * (1 if bits == 8 else -(-channels // 32))
    row_bytes = channels if bits == 8 else (channels + 1) // 2
    return scales * tensor.type.nbytes * (1 if bits == 8 else 2) + tensor.tokens * row_bytes
