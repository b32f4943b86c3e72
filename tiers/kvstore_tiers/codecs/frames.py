"""Frames are the stored form of codecs that work layer by layer. A frame describes itself.

Decoding needs the frame alone, and any layer can be decoded alone. Its parts are these.

    offset  size  field
    0       4     magic "KVCF"
    4       1     version of the frame
    5       1     number of the codec
    6       1     how many tensors a layer has
    7       1     1: the form is lossy
    8       4     version of the layers' form, of the codec
    12      4     number of layers;
    16      8     bytes of a layer after decoding
    24      4     relative RMS of the error, float32
    28      4     largest error, float32;
    32      4     bytes in front of the layers that all of them need
    36      28    a tensor, for each (`shapes.py`)
    ..      4     a layer, for each: its length, and in the highest bit 1 for a layer that is stored as it is
    ..            what all layers need, then the layers

All numbers are little-endian. The versions are judged before anything behind them: an unknown version is NotReadable.
Invariant: a decoder gets a layer of the right length in the frame, and room for exactly the bytes of a decoded layer.
"""

from __future__ import annotations

import struct
from abc import abstractmethod
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, ClassVar, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from kvstore_tiers.codecs import AS_IT_IS, Codec, CodingError, Encoded, NotReadable, Undecodable
from kvstore_tiers.codecs.shapes import MAX_LAYERS, MAX_TENSORS, RECORD_BYTES, PayloadShape, ShapeError, read_shape

if TYPE_CHECKING:
    from kvstore_proto.arena import BlockHeader

FRAME_VERSION: Final = 1
FRAME_VERSION_OFFSET, FORM_OFFSET = 4, 8
_MAGIC: Final = b"KVCF"
_HEAD: Final = struct.Struct("<4sBBBBIIQffI")
_AS_IT_IS: Final = 1 << 31
Bytes = npt.NDArray[np.uint8]


class CodedLayers(NamedTuple):
    """The layers that a codec wrote: their lengths in bytes, and which of them are stored as they are. The first
    `common_bytes` bytes, before the layers, are for all of them."""

    lengths: Sequence[int]
    are_as_they_are: Sequence[bool]
    error: CodingError | None = None
    common_bytes: int = 0


class Frame(NamedTuple):
    """A frame that was read. `places` has the offset of each layer in the stored bytes, and one more for the end;
    `are_as_they_are` says which layers the codec does not decode. `common_at` is the offset of what all layers need."""

    form: int
    shape: PayloadShape
    error: CodingError | None
    places: list[int]
    are_as_they_are: list[bool]
    common_at: int

    def common(self, stored: memoryview) -> Bytes:
        """Return the bytes in the frame `stored` that all layers need."""
        return np.frombuffer(stored, np.uint8)[self.common_at : self.places[0]]

    def layer(self, stored: memoryview, number: int) -> Bytes:
        """Return the bytes of a layer in the frame `stored`."""
        return np.frombuffer(stored, np.uint8)[self.places[number] : self.places[number + 1]]


class LayeredCodec(Codec):
    """A codec that writes frames. A subclass codes the layers; `form` is the version of its layers, written to the
    frame and checked before a layer is decoded."""

    form: ClassVar[int] = 1

    def bound(self, payload_bytes: int) -> int:
        return payload_bytes + self.slack_bytes

    slack_bytes: ClassVar[int] = 64  # a frame that is not smaller than the payload is of no use

    @abstractmethod
    def takes(self, shape: PayloadShape) -> bool:
        """Return whether the codec has a form for payloads of this shape."""

    @abstractmethod
    def encode_layers(self, shape: PayloadShape, layers: Bytes, room: Bytes) -> CodedLayers | None:
        """Write the coded layers to the front of `room`, one behind the other. `layers` is an array [layer, byte].
        Return None when they do not fit into `room`, so that the form is of no use."""

    @abstractmethod
    def decode_layers(self, frame: Frame, stored: memoryview, numbers: range, layers: Bytes) -> None:
        """Fill `layers`, an array [layer, byte], with the layers `numbers` of `frame`, none of which is stored as it
        is. Raises Undecodable."""

    def encode(
        self, header: BlockHeader, shape: PayloadShape | None, payload: memoryview, target: memoryview
    ) -> Encoded:
        if shape is None or shape.nbytes != len(payload) or not self.takes(shape):
            return AS_IT_IS
        head_bytes = _head_bytes(len(shape.tensors), shape.layers)
        if head_bytes >= len(target):
            return AS_IT_IS
        layers = np.frombuffer(payload, np.uint8).reshape(shape.layers, shape.layer_bytes)
        coded = self.encode_layers(shape, layers, np.frombuffer(target, np.uint8)[head_bytes:])
        if coded is None or all(coded.are_as_they_are):
            return AS_IT_IS
        index = [
            length | _AS_IT_IS if is_as_it_is else length
            for length, is_as_it_is in zip(coded.lengths, coded.are_as_they_are, strict=True)
        ]
        error = coded.error or CodingError(0.0, 0.0)
        head = _HEAD.pack(
            _MAGIC, FRAME_VERSION, self.number, len(shape.tensors), self.is_lossy, self.form, shape.layers,
            shape.layer_bytes, *error, coded.common_bytes,
        )  # fmt: skip
        written = head + shape.pack() + struct.pack(f"<{shape.layers}I", *index)
        np.frombuffer(target, np.uint8)[: len(written)] = np.frombuffer(written, np.uint8)
        return Encoded(len(written) + coded.common_bytes + sum(coded.lengths), coded.error)

    def decode(self, stored: memoryview, payload: memoryview) -> None:
        frame, layers = self._begin(stored, payload)
        self._decode(frame, stored, range(frame.shape.layers), layers)

    def layers(self, stored: memoryview) -> int:
        return self.read(stored).shape.layers

    def decode_layer(self, stored: memoryview, layer: int, target: memoryview) -> None:
        frame = self.read(stored)
        if not 0 <= layer < frame.shape.layers or frame.shape.layer_bytes != len(target):
            raise Undecodable(f"it has {frame.shape.layers} layers of {frame.shape.layer_bytes} bytes")
        self._decode(frame, stored, range(layer, layer + 1), np.frombuffer(target, np.uint8).reshape(1, -1))

    def error(self, stored: memoryview) -> CodingError | None:
        return self.read(stored).error

    def read(self, stored: memoryview) -> Frame:
        """Return the head of a frame. Raises Undecodable and NotReadable."""
        if len(stored) < _HEAD.size:
            raise Undecodable(f"{len(stored)} bytes are no frame")
        magic, version, number, tensors, is_lossy, form, layers, layer_bytes, rms, most, common_bytes = (
            _HEAD.unpack_from(stored)
        )
        if magic != _MAGIC or number != self.number:
            raise Undecodable("it is no frame of this codec")
        if version != FRAME_VERSION:
            raise NotReadable(f"frame version {version}, this code reads {FRAME_VERSION}")
        if wrong := self.judge_form(form):
            raise NotReadable(wrong)
        if tensors > MAX_TENSORS or not 0 < layers <= MAX_LAYERS or is_lossy != self.is_lossy:
            raise Undecodable(f"{tensors} tensors in {layers} layers are none of its frames")
        begin = _head_bytes(tensors, layers)
        if begin > len(stored):
            raise Undecodable("its head is cut short")
        rest = bytes(stored[_HEAD.size : begin])
        shape, places, are_as_they_are = _layers_of(layers, layer_bytes, begin + common_bytes, rest, len(stored))
        if not self.takes(shape):
            raise Undecodable("the codec has no form for this shape")
        return Frame(form, shape, CodingError(rms, most) if is_lossy else None, places, are_as_they_are, begin)

    def judge_form(self, form: int) -> str:
        """Return why layers of the version `form` cannot be decoded here; "" if they can."""
        return "" if form == self.form else f"version {form} of its layers, this code reads {self.form}"

    def _begin(self, stored: memoryview, payload: memoryview) -> tuple[Frame, Bytes]:
        """Return the head of the frame `stored`, and `payload` as an array [layer, byte]."""
        frame = self.read(stored)
        if frame.shape.nbytes != len(payload):
            raise Undecodable(f"it holds {frame.shape.nbytes} bytes, not {len(payload)}")
        return frame, np.frombuffer(payload, np.uint8).reshape(frame.shape.layers, frame.shape.layer_bytes)

    def _decode(self, frame: Frame, stored: memoryview, numbers: range, layers: Bytes) -> None:
        if not any(frame.are_as_they_are):
            self.decode_layers(frame, stored, numbers, layers)
            return
        begin = numbers.start
        while begin < numbers.stop:
            is_as_it_is, end = frame.are_as_they_are[begin], begin + 1
            while end < numbers.stop and frame.are_as_they_are[end] == is_as_it_is:
                end += 1
            into = layers[begin - numbers.start : end - numbers.start]
            if is_as_it_is:
                whole = np.frombuffer(stored, np.uint8)[frame.places[begin] : frame.places[end]]
                np.copyto(into, whole.reshape(into.shape))
            else:
                self.decode_layers(frame, stored, range(begin, end), into)
            begin = end


@lru_cache(maxsize=64)  # frames of one length share all this, and it takes longer than to decode some
def _layers_of(
    layers: int, layer_bytes: int, first: int, rest: bytes, end: int
) -> tuple[PayloadShape, list[int], list[bool]]:
    """Return the shape, the places of the layers and which are stored as they are, of `rest`, the tensors and lengths
    in a frame of `end` bytes whose layers begin at `first`. Raises Undecodable."""
    try:
        shape = read_shape(layers, layer_bytes, rest[: -4 * layers])
    except ShapeError as wrong_shape:
        raise Undecodable(str(wrong_shape)) from None
    index = np.frombuffer(rest, "<u4")[-layers:]
    places = np.cumsum(np.concatenate(([first], index & ~np.uint32(_AS_IT_IS))), dtype=np.int64)
    as_they_are = (index & np.uint32(_AS_IT_IS)) != 0
    if int(places[-1]) != end or np.any(np.diff(places)[as_they_are] != layer_bytes):
        raise Undecodable("its lengths do not add up")
    return shape, places.tolist(), as_they_are.tolist()


def _head_bytes(tensors: int, layers: int) -> int:
    return _HEAD.size + tensors * RECORD_BYTES + 4 * layers
