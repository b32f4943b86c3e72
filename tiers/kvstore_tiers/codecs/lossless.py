"""`lossless` keeps 16-bit floats by a compression library: OpenZL, or blosc2 where OpenZL has no wheel.

The library works in a process of its own, one for encoding and one for decoding, on several layers at once
(`library_worker.py`, which describes a coded layer). The form in the frame's head names the library and its
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
from collections.abc import Iterator
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
    WORD_BYTES,
)
from kvstore_tiers.codecs.shapes import PayloadShape

EXTRA = "codecs"
_FORMS: Final = {OPENZL: OPENZL << 16 | OPENZL_FORMAT, BLOSC2: BLOSC2 << 16 | 1}
_TYPES: Final = (NUMBER_TYPES["f16"], NUMBER_TYPES["bf16"])
_MISSING: Final = (f"{ImportError.__name__}:", f"{ModuleNotFoundError.__name__}:")
BATCH_BYTES = 1 << 20  # of layers that are sent to the worker at once: what a cache next to a core holds
ANSWER_S = 60.0  # a worker that takes longer hangs


class LosslessCodec(LayeredCodec):
    """Gives back what was put, bit by bit."""

    name = "lossless"
    number = 1

    def __init__(self) -> None:
        self.library = next((number for number, name in LIBRARIES.items() if find_spec(name) is not None), OPENZL)
        self.form = _FORMS[self.library]  # type: ignore[misc]
        self._writer, self._reader = Worker(), Worker()
        self._found: set[int] = set()

    def lacks(self) -> str:
        return "" if any(find_spec(name) is not None for name in LIBRARIES.values()) else pip_install(EXTRA)

    def judge_form(self, form: int) -> str:
        library = next((number for number, known in _FORMS.items() if known == form), None)
        if library is None:
            return f"version {form} of its layers is of no library that this code knows"
        if library not in self._found and find_spec(LIBRARIES[library]) is None:  # a search of the disk
            return f"it needs the package {LIBRARIES[library]}: {pip_install(EXTRA)}"
        self._found.add(library)
        return ""

    def takes(self, shape: PayloadShape) -> bool:
        return bool(shape.tensors) and all(each.type in _TYPES for each in shape.tensors)

    def encode_layers(self, shape: PayloadShape, layers: Bytes, room: Bytes) -> CodedLayers | None:
        sizes, is_bfloat = [each.nbytes for each in shape.tensors], shape.tensors[0].type == _TYPES[1]
        lengths: list[int] = []
        end, most_bytes = 0, shape.layer_bytes + WORD_BYTES * len(sizes)
        for part in _batches(shape, range(shape.layers)):
            raw = layers[part.start : part.stop]
            with self._writer.room(most_bytes * len(part)) as (source, target):
                _gather(shape, raw, source)
                made = self._writer.ask(COMPRESS, self.library, sizes, [shape.layer_bytes] * len(part), is_bfloat)
                begin, end = end, end + sum(made)
                if end > room.nbytes:
                    return None
                room[begin:end] = target[: end - begin]
                lengths += made
        return None if all(each == most_bytes for each in lengths) else CodedLayers(lengths, [False] * shape.layers)

    def decode_layers(self, frame: Frame, stored: memoryview, numbers: range, layers: Bytes) -> None:
        shape, places = frame.shape, frame.places
        sizes, most_bytes = [each.nbytes for each in shape.tensors], shape.layer_bytes + WORD_BYTES * len(shape.tensors)
        for part in _batches(shape, numbers):
            lengths = [places[layer + 1] - places[layer] for layer in part]
            if max(lengths) > most_bytes:
                raise Undecodable("a layer is longer than one that is stored as it is")
            with self._reader.room(most_bytes * len(part)) as (source, target):
                nbytes = sum(lengths)
                source[:nbytes] = np.frombuffer(stored, np.uint8, nbytes, places[part.start])
                self._reader.ask(DECOMPRESS, frame.form >> 16, sizes, lengths)
                _scatter(shape, target, layers[part.start - numbers.start : part.stop - numbers.start])


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
        self, operation: int, library: int, sizes: list[int], lengths: list[int], is_bfloat: bool = False
    ) -> list[int]:
        """Return the lengths that the worker answers; the caller has `room`, with layers of `lengths` bytes whose
        tensors have `sizes`. Raises Undecodable for what it refuses to decompress, NotReadable without the library, and
        RuntimeError when it dies twice or lacks memory."""
        request = HEAD.pack(operation, library, is_bfloat, len(sizes), self._half)
        request += np.array(sizes + lengths, "<u8").tobytes()
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
            return connection.recv_bytes()  # the socket has a limit of time
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
                process_group=0,  # a terminal's signals are the daemon's
            )  # fmt: skip
        self._connection = Connection(ours.detach())
        return self._connection


def _batches(shape: PayloadShape, numbers: range) -> Iterator[range]:
    """Cut layers into batches of nearly one size."""
    batches = -(-len(numbers) * shape.layer_bytes // BATCH_BYTES)
    step = -(-len(numbers) // batches)
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
    into, at = source[: layers.nbytes].reshape(len(layers), shape.layer_bytes), 0
    if _is_plain(shape):
        into[:] = layers
        return
    for tensor in shape.tensors:
        numbers = tensor.of(layers)
        into[:, at : at + tensor.nbytes].view(numbers.dtype).reshape(numbers.shape)[:] = numbers
        at += tensor.nbytes


def _scatter(shape: PayloadShape, target: Bytes, layers: Bytes) -> None:
    """Fill `layers` with the tensors that `_gather` would write to `target`."""
    made, at = target[: layers.nbytes].reshape(len(layers), shape.layer_bytes), 0
    if _is_plain(shape):
        layers[:] = made
        return
    for tensor in shape.tensors:
        numbers = tensor.of(layers)
        numbers[:] = made[:, at : at + tensor.nbytes].view(numbers.dtype).reshape(numbers.shape)
        at += tensor.nbytes
