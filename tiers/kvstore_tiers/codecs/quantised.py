"""`int8` and `int4` keep K and V as small whole numbers and their scales.

K has a scale for each channel of a group of tokens, 64 for `int8` and 32 for `int4`: its channels differ in size by a
factor of 3 to 33, while V's do not. V has a scale for each token (`int8`), or for each 32 numbers of a token (`int4`).
`int8` numbers are symmetric around 0; `int4` has the smallest number of each group too.

A coded layer is its tensors one after the other: the scales, the smallest numbers (`int4`), then the numbers token by
token, two to a byte for `int4`, the first of them in the low half. Scales have the type of the numbers, rounded
up, so that no number is clipped. A layer with a number that is not finite, or over 1e18, or with tiny ones alone,
and a layer that loses a larger part of its RMS than the codec may, are stored as they are. Where the profile of a model
wants more bits than the codec keeps, a tensor gets them: a table before the layers says how many, a byte for each
tensor of each layer, and a tensor with `ALL_BITS` is its numbers, token by token. The compiled code and NumPy's give
the same bytes.
"""

from __future__ import annotations

import ctypes as ct
import math
from functools import lru_cache
from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from kvstore_cuda.host_copies import HASHED_MIN_BYTES, address_of
from kvstore_cuda.host_copies import native as host_copies
from kvstore_proto.arena import payload_checksum
from kvstore_proto.number_types import NUMBER_TYPES
from kvstore_tiers.codecs import CodingError, Undecodable
from kvstore_tiers.codecs.frames import Bytes, CodedLayers, Frame, LayeredCodec
from kvstore_tiers.codecs.native import library
from kvstore_tiers.codecs.quantised_arrays import dequantise, quantise
from kvstore_tiers.codecs.shapes import ALL_BITS, K, PayloadShape, Tensor, V
from kvstore_tiers.segments import PIECE_BYTES

TYPES: Final = {NUMBER_TYPES["f16"]: 1, NUMBER_TYPES["bf16"]: 2, NUMBER_TYPES["f32"]: 3}
MOST_ERROR: Final = {8: 0.03, 4: 0.2}  # by bits: the part of its RMS that a layer may lose
_HASH: Final = ct.c_uint64 * 9  # of the compiled code, while it is under way
Bits = tuple[int, ...]  # of each tensor of a layer: 8, 4 or ALL_BITS
Floats = npt.NDArray[np.float64]


class QuantisedCodec(LayeredCodec):
    """A codec that keeps each number as `bits` bits, 8 or 4, or as many as the model's profile wants. A layer whose
    error has a relative RMS above `most_error` is stored exact; above the bound of `int8` where 8 bits are kept.
    """

    is_lossy = True
    form = 2

    def __init__(self, name: str, number: int, bits: int) -> None:
        self.name, self.number, self.bits, self.most_error = name, number, bits, MOST_ERROR[bits]
        self._kept = bytes(ALL_BITS if bears == ALL_BITS else max(bits, bears) for bears in range(256))

    def takes(self, shape: PayloadShape) -> bool:
        return plan_of(self._uniform(shape), shape) is not None

    def encode_layers(self, shape: PayloadShape, layers: Bytes, room: Bytes) -> CodedLayers | None:
        table = shape.bears.translate(self._kept) if shape.bears else b""
        uniform = self._uniform(shape)
        runs = _runs(table, uniform, shape.layers)
        if len(runs) == 1 and runs[0].bits == uniform:
            table = b""
        if len(table) > room.nbytes:
            return None
        room[: len(table)] = np.frombuffer(table, np.uint8)
        sums, as_they_are = np.zeros(3), np.zeros(shape.layers, np.uint8)  # squares, those of errors, largest error
        lengths: list[int] = []
        for numbers, bits in runs:
            part, into = slice(numbers.start, numbers.stop), room[len(table) + sum(lengths) :]
            made = self._encode(bits, shape, layers[part], into, as_they_are[part], sums)
            if made is None:
                return None
            lengths += made
        whole, lost, worst = sums.tolist()
        error = CodingError(float(np.float32(math.sqrt(lost / whole))) if whole else 0.0, worst)
        return CodedLayers(lengths, as_they_are.astype(bool).tolist(), error, len(table))

    def _encode(
        self, bits: Bits, shape: PayloadShape, layers: Bytes, room: Bytes, as_they_are: Bytes, sums: Floats
    ) -> list[int] | None:
        """Write layers whose tensors keep `bits`, and return their lengths; None when they do not fit."""
        count, native, most_error = len(layers), library(), MOST_ERROR[min(filter(None, bits), default=8)]
        if not any(bits):
            if layers.nbytes > room.nbytes:
                return None
            room[: layers.nbytes] = layers.reshape(-1)
            as_they_are[:] = 1
            return [shape.layer_bytes] * count
        plan = plan_of(bits, shape)
        assert plan is not None
        copied: int
        if native is None:
            copied = quantise(bits, shape, layers, plan.coded_bytes, room, most_error, as_they_are, sums)
        else:
            copied = native.kv_quantise(
                plan.address, len(shape.tensors), address_of(layers), count, shape.layer_bytes, plan.coded_bytes,
                address_of(room), room.nbytes, most_error, address_of(as_they_are), address_of(sums),
            )  # fmt: skip
        if copied <= 0:
            return None if copied else [plan.coded_bytes] * count
        lengths: list[int] = np.where(as_they_are, shape.layer_bytes, plan.coded_bytes).tolist()
        return lengths

    def decode_layers(self, frame: Frame, stored: memoryview, numbers: range, layers: Bytes) -> None:
        tensors, table = len(frame.shape.tensors), frame.common(stored).tobytes()
        if table and (len(table) != frame.shape.layers * tensors or not {*table} <= {*MOST_ERROR, ALL_BITS}):
            raise Undecodable("its table of bits is damaged")
        table = table[numbers.start * tensors : numbers.stop * tensors]
        for run, bits in _runs(table, self._uniform(frame.shape), len(numbers)):
            places = frame.places[numbers.start + run.start], frame.places[numbers.start + run.stop]
            coded = np.frombuffer(stored, np.uint8, places[1] - places[0], places[0])
            _decode(bits, frame.shape, coded, layers[run.start : run.stop])

    def decode_and_hash(self, stored: memoryview, payload: memoryview) -> int:
        frame, layers = self._begin(stored, payload)
        hashing = _hashing(frame)
        if hashing is None:
            self._decode(frame, stored, range(frame.shape.layers), layers)
            return payload_checksum(payload)
        coded = np.frombuffer(stored, np.uint8)[frame.places[0] :]
        return _decode(self._uniform(frame.shape), frame.shape, coded, layers, hashing)

    def _uniform(self, shape: PayloadShape) -> Bits:
        return (self.bits,) * len(shape.tensors)


def _decode(bits: Bits, shape: PayloadShape, coded: Bytes, layers: Bytes, hashing: ct.CDLL | None = None) -> int:
    """Fill `layers`, whose tensors have kept `bits`. Return the xxh3_64 of all by `hashing`, the library of compiled
    copies; 0 without it."""
    plan, native, count = plan_of(bits, shape), library(), len(layers)
    assert plan is not None
    if coded.nbytes != plan.coded_bytes * count:
        raise Undecodable(f"{coded.nbytes} bytes are not {count} layers of {plan.coded_bytes}")
    if native is None:
        dequantise(bits, shape, coded.reshape(count, plan.coded_bytes), layers)
        return 0
    more, words = None, _HASH()
    if hashing is not None:
        more = ct.cast(hashing.kv_hash_more, ct.c_void_p)
        hashing.kv_hash_begin(words)
    if native.kv_dequantise(
        plan.address, len(shape.tensors), address_of(coded), count, plan.coded_bytes, address_of(layers),
        shape.layer_bytes, more, words,
    ):  # fmt: skip
        raise MemoryError("no memory to decode")
    return words[0]


def _hashing(frame: Frame) -> ct.CDLL | None:
    """Return the library of compiled copies, if the layers of `frame` can be hashed in a cache of one core as they are
    decoded: all coded alike, and whole stripes of xxh3, more than its short forms are for."""
    nbytes = frame.shape.layer_bytes
    is_alike = frame.common_at == frame.places[0] and not any(frame.are_as_they_are)
    can_be = library() is not None and nbytes % 64 == 0 and HASHED_MIN_BYTES <= nbytes <= PIECE_BYTES // 2
    return host_copies.get() if is_alike and can_be else None


class Run(NamedTuple):
    """Layers whose tensors keep the same `bits`; `numbers` says which."""

    numbers: range
    bits: Bits


@lru_cache(maxsize=256)
def _runs(table: bytes, uniform: Bits, layers: int) -> list[Run]:
    """Cut a table of bits into runs of layers; without a table one run keeps `uniform`."""
    if not table:
        return [Run(range(layers), uniform)]
    rows = [tuple(table[first : first + len(uniform)]) for first in range(0, len(table), len(uniform))]
    bounds = [at for at in range(layers + 1) if at in (0, layers) or rows[at] != rows[at - 1]]
    return [Run(range(begin, end), rows[begin]) for begin, end in pairwise(bounds)]


class Plan(NamedTuple):
    """The tensors of a shape as the compiled code reads them, and the length of a coded layer in bytes."""

    described: npt.NDArray[np.int64]
    address: int
    coded_bytes: int


@lru_cache(maxsize=256)
def plan_of(bits: Bits, shape: PayloadShape) -> Plan | None:
    """Return how a layer is coded whose tensors keep `bits`; None for a shape that has other tensors than K and V of 16
    or 32 bits."""
    if not shape.tensors or any(each.kind not in (K, V) or each.type not in TYPES for each in shape.tensors):
        return None
    rows = [[each.kind, TYPES[each.type], *each[2:], kept] for each, kept in zip(shape.tensors, bits, strict=True)]
    described = np.array(rows, np.int64)
    coded_bytes = sum(_coded_bytes(kept, each) for each, kept in zip(shape.tensors, bits, strict=True))
    return Plan(described, described.ctypes.data, coded_bytes)


def int8() -> QuantisedCodec:
    """Return the codec `int8`, which halves 16-bit numbers. K and V of models lose 0.004 to 0.01 of their RMS."""
    return QuantisedCodec("int8", 3, 8)


def int4() -> QuantisedCodec:
    """Return the codec `int4`, which makes less than a third of 16-bit numbers. K and V of models lose 0.04 to 0.09 of
    their RMS.
    """
    return QuantisedCodec("int4", 4, 4)


def _coded_bytes(bits: int, tensor: Tensor) -> int:
    channels = tensor.heads * tensor.width
    if bits == ALL_BITS:
        return tensor.nbytes
    if tensor.kind == K:
        scales = -(-tensor.tokens // (64 if bits == 8 else 32)) * channels
    else:
        scales = tensor.tokens * (1 if bits == 8 else -(-channels // 32))
    row_bytes = channels if bits == 8 else (channels + 1) // 2
    return scales * tensor.type.nbytes * (1 if bits == 8 else 2) + tensor.tokens * row_bytes
