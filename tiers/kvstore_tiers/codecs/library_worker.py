"""The process in which a compression library works for the codec `lossless`. OpenZL holds the GIL throughout, takes
nine times its input, and may crash on spoilt bytes: the daemon can have none of it in its own process.

Started as `python -m kvstore_tiers.codecs.library_worker SOCKET MEMORY`, with two descriptors. A request is a packed
`_HEAD`, then numbers, 8 bytes each; the bytes to work on are one piece after the other in the first half of the shared
memory, and the results are put into the second half. The answer is one byte: `DONE` with the lengths of the results,
`REFUSED` or `FAILED` with one line of text. Invariants: a piece is decompressed only if its head promises the length
that is asked for; `REFUSED` is the library's own verdict on a piece, never a lack of memory or of the library.
"""

from __future__ import annotations

import mmap
import os
import resource
import struct
import sys
from collections.abc import Callable
from importlib import import_module
from multiprocessing.connection import Connection
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
HEAD: Final = struct.Struct("<BBHIQ")  # operation, library, 1 for bfloat16, pieces, half of the shared memory
COMPRESS, DECOMPRESS = 1, 2
OPENZL, BLOSC2 = 1, 2
LIBRARIES: Final = {OPENZL: "openzl", BLOSC2: "blosc2"}
OPENZL_FORMAT: Final = 21
LEAST_GAIN: Final = 0.03
_DISABLED: Final = 2
DATA_LIMIT_BYTES = 2 << 30
DONE, REFUSED, FAILED = b"\0", b"\1", b"\2"


class Library(Protocol):
    """Compresses pieces of 16-bit floats."""

    def compress(self, piece: Bytes, is_bfloat: bool) -> bytes: ...

    def decompress(self, piece: Bytes, nbytes: int) -> Bytes:
        """Return the `nbytes` bytes that were compressed. Raises Exception when the piece holds no such bytes."""
        ...


class OpenZL:
    """OpenZL with its node for bfloat16, for both 16-bit types: the eight bits behind the sign are coded, the rest is
    stored. For float16 these are the exponent and three bits of the fraction. Huffman codes them for float16; FSE for
    bfloat16, where it gains 0.5 % more. Its checksums are off: images have their own."""

    def __init__(self) -> None:
        zl: Any = import_module("openzl.ext")
        self._zl, self._reader = zl, zl.DCtx()
        self._writers = [self._writer(graph) for graph in (zl.graphs.Huffman, zl.graphs.Fse)]

    def _writer(self, exponent: Any) -> tuple[Any, Any]:
        """Return a context that compresses with the graph `exponent`, and the compressor that it refers to."""
        zl, compressor = self._zl, self._zl.Compressor()
        graph = zl.nodes.BFloat16Deconstruct()(
            compressor, sign_frac=zl.graphs.Store()(compressor), exponent=exponent()(compressor)
        )
        compressor.select_starting_graph(graph)
        writer = zl.CCtx()
        writer.ref_compressor(compressor)
        writer.set_parameter(zl.CParam.StickyParameters, 1)
        writer.set_parameter(zl.CParam.FormatVersion, OPENZL_FORMAT)
        for checksum in (zl.CParam.ContentChecksum, zl.CParam.CompressedChecksum):
            writer.set_parameter(checksum, _DISABLED)
        return writer, compressor

    def compress(self, piece: Bytes, is_bfloat: bool) -> bytes:
        writer, _ = self._writers[is_bfloat]
        made: bytes = writer.compress([self._zl.Input(self._zl.Type.Numeric, piece.view(np.uint16))])
        return made

    def decompress(self, piece: Bytes, nbytes: int) -> Bytes:
        raw = piece.tobytes()
        promised = self._zl.FrameInfo(raw)
        if promised.num_outputs != 1 or promised.output_content_size(0) != nbytes:
            raise ValueError("it promises another length")
        return np.asarray(self._reader.decompress(raw)[0].content.as_nparray()).view(np.uint8).reshape(-1)


class Blosc2:
    """blosc2 with its byte shuffle and zstd 1."""

    def __init__(self) -> None:
        self._blosc: Any = import_module("blosc2")
        self._how = {
            "codec": self._blosc.Codec.ZSTD, "clevel": 1, "typesize": 2, "filters": [self._blosc.Filter.SHUFFLE],
            "nthreads": 1,
        }  # fmt: skip

    def compress(self, piece: Bytes, is_bfloat: bool) -> bytes:
        made: bytes = self._blosc.compress2(piece, **self._how)
        return made

    def decompress(self, piece: Bytes, nbytes: int) -> Bytes:
        raw = piece.tobytes()
        if len(raw) < 32 or self._blosc.get_cbuffer_sizes(raw)[0] != nbytes:
            raise ValueError("it promises another length")
        return np.frombuffer(self._blosc.decompress2(raw, nthreads=1), np.uint8)


_MAKERS: Final[dict[int, Callable[[], Library]]] = {OPENZL: OpenZL, BLOSC2: Blosc2}


def serve(connection: Connection, memory_fd: int) -> None:
    """Answer requests until the other end closes."""
    opened: dict[int, Library] = {}
    memory = mmap.mmap(memory_fd, os.fstat(memory_fd).st_size)
    while True:
        try:
            request = connection.recv_bytes()
        except EOFError:
            return
        operation, library, is_bfloat, pieces, half = HEAD.unpack_from(request)
        if len(memory) < 2 * half:
            memory = mmap.mmap(memory_fd, os.fstat(memory_fd).st_size)
        numbers = np.frombuffer(request, "<u8", offset=HEAD.size).tolist()
        whole = np.frombuffer(memory, np.uint8)
        try:
            used = opened.get(library) or opened.setdefault(library, _MAKERS[library]())
            if operation == COMPRESS:
                lengths = _compress(used, whole[:half], whole[half : 2 * half], numbers, bool(is_bfloat))
            else:
                lengths = _decompress(used, whole[:half], whole[half : 2 * half], numbers[:pieces], numbers[pieces:])
            connection.send_bytes(DONE + np.array(lengths, "<u8").tobytes())
        except Exception as error:  # of a library, of any kind
            verdict = FAILED if isinstance(error, ImportError | MemoryError | OSError) else REFUSED
            connection.send_bytes(verdict + f"{type(error).__name__}: {error}".replace("\n", " ")[:300].encode())
        del whole


def _compress(library: Library, source: Bytes, target: Bytes, lengths: list[int], is_bfloat: bool) -> list[int]:
    """Return the lengths of the compressed pieces; 0 for a piece that gains too little, which is left out."""
    made, at, end = [], 0, 0
    for nbytes in lengths:
        piece = library.compress(source[at : at + nbytes], is_bfloat)
        at += nbytes
        is_smaller = len(piece) <= nbytes * (1 - LEAST_GAIN)
        if is_smaller:
            target[end : end + len(piece)] = np.frombuffer(piece, np.uint8)
            end += len(piece)
        made.append(len(piece) if is_smaller else 0)
    return made


def _decompress(library: Library, source: Bytes, target: Bytes, coded: list[int], lengths: list[int]) -> list[int]:
    at = end = 0
    for coded_bytes, nbytes in zip(coded, lengths, strict=True):
        target[end : end + nbytes] = library.decompress(source[at : at + coded_bytes], nbytes)
        at, end = at + coded_bytes, end + nbytes
    return lengths


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_DATA, (DATA_LIMIT_BYTES, DATA_LIMIT_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    serve(Connection(int(sys.argv[1])), int(sys.argv[2]))
