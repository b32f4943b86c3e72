"""`lossless` keeps 16-bit floats by a compression library: OpenZL, or blosc2 where OpenZL has no wheel.

A coded layer is its tensors one after the other: a length in 4 bytes, with the highest bit set for a tensor that is
stored as it is, because it gains less than 3 %; then the bytes of the library. The library works in a process of its
own (`library_worker.py`), one for encoding and one for decoding. The form in the frame's head names the library and its
format, which never changes: OpenZL calls a sound frame of a newer format corrupt.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from functools import lru_cache
from importlib.util import find_spec
from multiprocessing.connection import Connection
from typing import Final

import numpy as np

from kvstore_proto.number_types import NUMBER_TYPES
from kvstore_proto.version import pip_install
from kvstore_tiers.child_processes import variables_of_children
from kvstore_tiers.codecs import NotReadable, Undecodable
from kvstore_tiers.codecs.frames import Bytes, CodedLayers, Frame, LayeredCodec
from kvstore_tiers.codecs.library_worker import (
    BLOSC2,
    COMPRESS,
    DECOMPRESS,
    DONE,
    HEAD,
    LIBRARIES,
    OPENZL,
    OPENZL_FORMAT,
    REFUSED,
)
from kvstore_tiers.codecs.shapes import PayloadShape

EXTRA = "codecs"
_FORMS: Final = {OPENZL: OPENZL << 16 | OPENZL_FORMAT, BLOSC2: BLOSC2 << 16 | 1}
_TYPES: Final = (NUMBER_TYPES["f16"], NUMBER_TYPES["bf16"])
_AS_IT_IS: Final = 1 << 31
_MISSING: Final = (f"{ImportError.__name__}:", f"{ModuleNotFoundError.__name__}:")
BATCH_BYTES = 4 << 20  # of layers that are sent to the worker at once
ANSWER_S = 60.0  # a worker that takes longer hangs


class LosslessCodec(LayeredCodec):
    """Gives back what was put, bit by bit."""

    name = "lossless"
    number = 1

    def __init__(self) -> None:
        self.library = next((number for number, name in LIBRARIES.items() if find_spec(name) is not None), OPENZL)
        self.form = _FORMS[self.library]  # type: ignore[misc]
        self._writer, self._reader = Worker(), Worker()

    def lacks(self) -> str:
        return "" if any(find_spec(name) is not None for name in LIBRARIES.values()) else pip_install(EXTRA)

    def judge_form(self, form: int) -> str:
        library = next((number for number, known in _FORMS.items() if known == form), None)
        if library is None:
            return f"version {form} of its layers is of no library that this code knows"
        missing = find_spec(LIBRARIES[library]) is None
        return f"it needs the package {LIBRARIES[library]}: {pip_install(EXTRA)}" if missing else ""

    def takes(self, shape: PayloadShape) -> bool:
        return bool(shape.tensors) and all(each.type in _TYPES for each in shape.tensors)

    def encode_layers(self, shape: PayloadShape, layers: Bytes, room: Bytes) -> CodedLayers | None:
        sizes, is_bfloat = [each.nbytes for each in shape.tensors], shape.tensors[0].type == _TYPES[1]
        lengths: list[int] = []
        for part in _batches(shape, range(shape.layers)):
            raw = layers[part.start : part.stop]
            with self._writer.room(raw.nbytes) as (source, target):
                _gather(shape, raw, source)
                made = self._writer.ask(COMPRESS, self.library, sizes * len(part), is_bfloat=is_bfloat)
                end = _write(sizes, made, source, target, room[sum(lengths) :])
                if end is None:
                    return None
                lengths += end
        raw_bytes = shape.layer_bytes + 4 * len(sizes)
        if all(each == raw_bytes for each in lengths):
            return None
        return CodedLayers(lengths, [False] * shape.layers)

    def decode_layers(self, frame: Frame, stored: memoryview, numbers: range, layers: Bytes) -> None:
        library = frame.form >> 16
        shape, sizes = frame.shape, [each.nbytes for each in frame.shape.tensors]
        for part in _batches(shape, numbers):
            pieces = [piece for layer in part for piece in _pieces(frame.layer(stored, layer), sizes)]
            coded = [(piece, size) for piece, size in zip(pieces, sizes * len(part), strict=True) if piece[0]]
            with self._reader.room(shape.layer_bytes * len(part)) as (source, target):
                at = 0
                for (_, piece), _size in coded:
                    source[at : at + piece.nbytes] = piece
                    at += piece.nbytes
                if coded:
                    lengths = [piece.nbytes for (_, piece), _size in coded]
                    self._reader.ask(DECOMPRESS, library, lengths + [size for _, size in coded], len(coded))
                into = layers[part.start - numbers.start : part.stop - numbers.start]
                _scatter(shape, pieces, target, into)


class Worker:
    """One process of `library_worker.py`, and the memory that it shares. One caller at a time has `room`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._memory_fd, self._half, self._whole = -1, 0, np.zeros(0, np.uint8)

    @contextlib.contextmanager
    def room(self, nbytes: int) -> Iterator[tuple[Bytes, Bytes]]:
        """Wait for the worker, and give the shared memory for sources and for results, `nbytes` at least each."""
        with self._lock:
            if self._memory_fd < 0:
                self._memory_fd = os.memfd_create("kvstored-codec", os.MFD_CLOEXEC)
            if self._half < nbytes:
                half = max(-(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE, BATCH_BYTES)
                os.ftruncate(self._memory_fd, 2 * half)
                self._whole = np.frombuffer(mmap.mmap(self._memory_fd, 2 * half), np.uint8)
                self._half = half
            yield self._whole[: self._half], self._whole[self._half :]

    def ask(
        self, operation: int, library: int, numbers: Sequence[int], pieces: int = 0, is_bfloat: bool = False
    ) -> list[int]:
        """Return the lengths that the worker answers; the caller has `room`. Raises Undecodable for what it refuses to
        decompress, NotReadable without the library, and RuntimeError when it dies twice or lacks memory."""
        request = (
            HEAD.pack(operation, library, is_bfloat, pieces or len(numbers), self._half)
            + np.array(numbers, "<u8").tobytes()
        )
        for _ in range(2):
            answer = self._answer(request)
            if answer[:1] == DONE:
                return [int(each) for each in np.frombuffer(answer, "<u8", offset=1)]
            if answer:
                wrong = answer[1:].decode(errors="replace")
                if answer[:1] == REFUSED:
                    raise Undecodable(wrong)
                raise NotReadable(wrong) if wrong.startswith(_MISSING) else RuntimeError(wrong)
        raise RuntimeError("its process died over it")

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        if self._connection is not None:
            self._connection.close()
        self._process = self._connection = None

    def _answer(self, request: bytes) -> bytes:
        """Return the worker's answer; nothing when it died or hung, and it is gone then."""
        try:
            connection = self._connection or self._start()
            connection.send_bytes(request)
            if connection.poll(ANSWER_S):
                return connection.recv_bytes()
        except (OSError, EOFError):
            pass
        self.close()
        return b""

    def _start(self) -> Connection:
        ours, theirs = socket.socketpair()
        limit = struct.pack("ll", int(ANSWER_S), int(ANSWER_S % 1 * 1e6))
        for way in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):  # of one that stops within a request or an answer
            ours.setsockopt(socket.SOL_SOCKET, way, limit)
        with theirs:
            command = [sys.executable, "-m", "kvstore_tiers.codecs.library_worker"]
            self._process = subprocess.Popen(
                [*command, str(theirs.fileno()), str(self._memory_fd)],
                pass_fds=(theirs.fileno(), self._memory_fd), env=variables_of_children(), stdin=subprocess.DEVNULL,
            )  # fmt: skip
        self._connection = Connection(ours.detach())
        return self._connection


def _batches(shape: PayloadShape, numbers: range) -> Iterator[range]:
    step = max(1, BATCH_BYTES // shape.layer_bytes)
    for begin in range(numbers.start, numbers.stop, step):
        yield range(begin, min(begin + step, numbers.stop))


@lru_cache(maxsize=256)
def _is_plain(shape: PayloadShape) -> bool:
    """Return whether the tensors of a layer lie one behind the other, each without gaps."""
    end = 0
    for each in shape.tensors:
        row_bytes = each.heads * each.width * each.type.nbytes
        if each.offset != end or each.token_stride != row_bytes or each.head_stride * each.heads != row_bytes:
            return False
        end += each.nbytes
    return True


def _gather(shape: PayloadShape, layers: Bytes, source: Bytes) -> None:
    """Write the tensors of `layers`, layer by layer, each without gaps."""
    if _is_plain(shape):
        source[: layers.nbytes] = layers.reshape(-1)
        return
    into, at = source[: layers.nbytes].reshape(len(layers), shape.layer_bytes), 0
    for tensor in shape.tensors:
        numbers = tensor.of(layers)
        view = into[:, at : at + tensor.nbytes].view(numbers.dtype)
        view.reshape(numbers.shape)[:] = numbers
        at += tensor.nbytes


def _write(sizes: list[int], made: list[int], source: Bytes, target: Bytes, room: Bytes) -> list[int] | None:
    """Write coded layers to `room`; `made` has the lengths of the pieces in `target`, 0 for one to take from `source`.
    Return the lengths of the layers, None when they do not fit."""
    lengths, at, begin, end = [], 0, 0, 0
    for first in range(0, len(made), len(sizes)):
        started = at
        for size, length in zip(sizes, made[first : first + len(sizes)], strict=True):
            piece = target[begin : begin + length] if length else source[end : end + size]
            begin, end = begin + length, end + size
            if at + 4 + piece.nbytes > room.nbytes:
                return None
            word = np.array([length or size | _AS_IT_IS], "<u4")
            room[at : at + 4] = word.view(np.uint8)
            room[at + 4 : at + 4 + piece.nbytes] = piece
            at += 4 + piece.nbytes
        lengths.append(at - started)
    return lengths


def _pieces(layer: Bytes, sizes: list[int]) -> Iterator[tuple[bool, Bytes]]:
    """Return the pieces of a coded layer: whether the library made it, and its bytes. Raises Undecodable."""
    at = 0
    for size in sizes:
        word = int.from_bytes(layer[at : at + 4].tobytes(), "little")
        length, is_coded = word & (_AS_IT_IS - 1), not word & _AS_IT_IS
        piece = layer[at + 4 : at + 4 + length]
        if piece.nbytes != length or (length >= size if is_coded else length != size):
            raise Undecodable("the lengths of its tensors do not add up")
        yield is_coded, piece
        at += 4 + length
    if at != layer.nbytes:
        raise Undecodable("the lengths of its tensors do not add up")


def _scatter(shape: PayloadShape, pieces: list[tuple[bool, Bytes]], target: Bytes, layers: Bytes) -> None:
    """Fill `layers` with the pieces. `target` has the pieces that the library made."""
    if _is_plain(shape) and all(is_coded for is_coded, _ in pieces):
        layers.reshape(-1)[:] = target[: layers.nbytes]
        return
    at = 0
    for number, (is_coded, piece) in enumerate(pieces):
        layer, place = divmod(number, len(shape.tensors))
        tensor = shape.tensors[place]
        raw = target[at : at + tensor.nbytes] if is_coded else np.ascontiguousarray(piece)
        at += tensor.nbytes if is_coded else 0
        numbers = tensor.of(layers[layer : layer + 1])
        np.copyto(numbers, raw.view(numbers.dtype).reshape(numbers.shape))
