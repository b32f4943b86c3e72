"""`context` keeps 16-bit floats bit by bit: signs, exponents and two bits of the fractions by rANS in the context of
their channel, and the bits below as they are.

Channels differ in size, while the numbers of one channel keep to a few octaves. So the code of a number is relative to
the levels of its channel and of its token in this layer, and channels that spread alike share one of 12 pairs of
tables, for either sign of the same channel and the token before. Levels, groups and tables are in the frame, so no
profile of the model is needed, which could be lost. Before the layers come the tables of each
tensor. A coded layer is its tensors one after the other:

    offset  size  field
    0       4     bytes of the words
    4       4     exceptions: numbers far from the level of their channel
    8       4     level of the first channel
    12      64    the sixteen states
    76            words of 16 bits, which feed the states
    ..            the bits below the codes: a byte a number for float16; for bfloat16, of sixteen numbers of a token 8
                  bytes with nibbles and 2 with single bits
    ..      6     place and bits of an exception, for each

The groups of all channels are decoded first, then the differences of their levels, then the levels of the tokens, then
the numbers token by token. Two layers are decoded side by side, since each step waits for the one before. The work is
in `csrc/`; there is no other code for it, so a daemon without a compiler misses such blocks.
"""

from __future__ import annotations

import ctypes as ct
import threading
from functools import lru_cache
from typing import Final

import numpy as np
import numpy.typing as npt

from kvstore_proto.number_types import NUMBER_TYPES
from kvstore_proto.version import pip_install
from kvstore_tiers.codecs import NotReadable, Undecodable
from kvstore_tiers.codecs.frames import Bytes, CodedLayers, Frame, LayeredCodec
from kvstore_tiers.codecs.native import wait_for_library
from kvstore_tiers.codecs.shapes import PayloadShape

_LOW_BITS: Final = {NUMBER_TYPES["f16"]: 8, NUMBER_TYPES["bf16"]: 5}
_NO_MEMORY: Final = -2
_MOST_HELD: Final = 64 << 20
_TENSOR_BYTES: Final = 512 * 1024  # tables of a tensor: 27 of 8 KiB, and more
_thread = threading.local()


class ContextCodec(LayeredCodec):
    """Gives back what was put, bit by bit; smaller than `lossless`, and slower."""

    name = "context"
    number = 2
    form = 2

    def lacks(self) -> str:
        return "" if wait_for_library() is not None else f"a C++ compiler, or {pip_install('compiler')}"

    def takes(self, shape: PayloadShape) -> bool:
        types = {each.type for each in shape.tensors}
        return len(types) == 1 and not types.isdisjoint(_LOW_BITS)

    def encode_layers(self, shape: PayloadShape, layers: Bytes, room: Bytes) -> CodedLayers | None:
        lengths, as_they_are = np.zeros(shape.layers, np.int64), np.zeros(shape.layers, np.uint8)
        tables_bytes, work, described = np.zeros(1, np.int64), _work_of(shape), _described(shape)
        answer = self._library().kv_context_encode(
            _LOW_BITS[shape.tensors[0].type], described.ctypes.data, len(shape.tensors), layers.ctypes.data,
            shape.layers, shape.layer_bytes, room.ctypes.data, room.nbytes, lengths.ctypes.data,
            as_they_are.ctypes.data, tables_bytes.ctypes.data, work.ctypes.data, work.nbytes,
        )  # fmt: skip
        if answer == _NO_MEMORY:
            raise MemoryError("no memory to encode")
        if answer < 0:
            return None
        return CodedLayers(lengths.tolist(), as_they_are.astype(bool).tolist(), common_bytes=int(tables_bytes[0]))

    def decode_layers(self, frame: Frame, stored: memoryview, numbers: range, layers: Bytes) -> None:
        shape, tables, described = frame.shape, frame.common(stored), _described(frame.shape)
        places = np.array(frame.places[numbers.start : numbers.stop + 1], np.int64)
        whole, work = np.frombuffer(stored, np.uint8), _work_of(shape)
        answer = self._library().kv_context_decode(
            _LOW_BITS[shape.tensors[0].type], described.ctypes.data, len(shape.tensors), tables.ctypes.data,
            tables.nbytes, whole.ctypes.data, places.ctypes.data, len(numbers), layers.ctypes.data, shape.layer_bytes,
            work.ctypes.data, work.nbytes,
        )  # fmt: skip
        if answer == _NO_MEMORY:
            raise MemoryError("no memory to decode")
        if answer:
            raise Undecodable("its tables or layers are damaged")

    def _library(self) -> ct.CDLL:
        found = wait_for_library()
        if found is None:
            raise NotReadable(f"it needs {self.lacks()}")
        return found


def _work_of(shape: PayloadShape) -> Bytes:
    """Return memory to encode or decode in. This thread uses it again, since new pages cost more than the work in them,
    unless it has over `_MOST_HELD` bytes: a block of one token, a recurrent state, takes many times its size."""
    channels = sum(each.heads * each.width for each in shape.tensors)
    needed = shape.nbytes * 3 // 4 + channels * (20 * shape.layers + 160) + len(shape.tensors) * _TENSOR_BYTES
    needed += 8 * shape.layer_bytes + 128 * 1024
    held: Bytes | None = getattr(_thread, "work", None)
    if held is None or held.nbytes < needed:
        held = np.empty(needed, np.uint8)
        if needed <= _MOST_HELD:
            _thread.work = held
    return held


@lru_cache(maxsize=256)
def _described(shape: PayloadShape) -> npt.NDArray[np.int64]:
    """Return the tensors of a shape as the compiled code reads them."""
    return np.array([[each.kind, 0, *each[2:]] for each in shape.tensors], np.int64)
