"""The process in which a compression library works for the codec `lossless`. OpenZL holds the GIL throughout, takes
nine times its input, and may crash on spoilt bytes: the daemon can have none of it in its own process.

Started as `python -m kvstore_tiers.codecs.library_worker SOCKET MEMORY`, with two descriptors. A request is a packed
`HEAD`, then the sizes of a layer's tensors and the lengths of the layers, 8 bytes each; the layers lie one behind the
other in the first half of the shared memory, and the results are put into the second half. The answer is one byte:
`DONE` with the lengths of the results, `REFUSED` or `FAILED` with one line of text.

A coded layer is its tensors one after the other: a length in 4 bytes, with the highest bit set for a tensor that is
stored as it is, because it gains less than 3 %; then the bytes of the library. Invariants: a tensor is decompressed
only if its head promises the tensor's size; `REFUSED` is a verdict on the bytes, never a lack of memory or of the
library.
"""

from __future__ import annotations

import mmap
import os
import resource
import struct
import sys
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from multiprocessing.connection import Connection
from typing import Any, Final, Protocol

import numpy as np

HEAD: Final = struct.Struct("<BBHIQ")  # operation, library, 1 for bfloat16, tensors, half of the shared memory
COMPRESS, DECOMPRESS = 1, 2
OPENZL, BLOSC2 = 1, 2
LIBRARIES: Final = {OPENZL: "openzl", BLOSC2: "blosc2"}
OPENZL_FORMAT: Final = 21
LEAST_GAIN: Final = 0.03
WORD_BYTES: Final = 4
_AS_IT_IS: Final = 1 << 31
_DISABLED: Final = 2
DATA_LIMIT_BYTES = 2 << 30
DONE, REFUSED, FAILED = b"\0", b"\1", b"\2"


class Library(Protocol):
    """Compresses tensors of 16-bit floats."""

    def compress(self, piece: memoryview, is_bfloat: bool) -> bytes: ...

    def decompress(self, piece: bytes, nbytes: int) -> bytes:
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

    def compress(self, piece: memoryview, is_bfloat: bool) -> bytes:
        writer, _ = self._writers[is_bfloat]
        made: bytes = writer.compress((self._zl.Input(self._zl.Type.Numeric, piece.cast("H")),))
        return made

    def decompress(self, piece: bytes, nbytes: int) -> bytes:
        promised = self._zl.FrameInfo(piece)
        if promised.num_outputs != 1 or promised.output_content_size(0) != nbytes:
            raise ValueError("it promises another length")
        made: bytes = self._reader.decompress(piece)[0].content.as_bytes()
        return made


class Blosc2:
    """blosc2 with its byte shuffle and zstd 1."""

    def __init__(self) -> None:
        self._blosc: Any = import_module("blosc2")
        self._how = {
            "codec": self._blosc.Codec.ZSTD, "clevel": 1, "typesize": 2, "filters": [self._blosc.Filter.SHUFFLE],
            "nthreads": 1,
        }  # fmt: skip

    def compress(self, piece: memoryview, is_bfloat: bool) -> bytes:
        made: bytes = self._blosc.compress2(piece, **self._how)
        return made

    def decompress(self, piece: bytes, nbytes: int) -> bytes:
        if len(piece) < 32 or self._blosc.get_cbuffer_sizes(piece)[0] != nbytes:
            raise ValueError("it promises another length")
        made: bytes = self._blosc.decompress2(piece, nthreads=1)
        return made


_MAKERS: Final[dict[int, Callable[[], Library]]] = {OPENZL: OpenZL, BLOSC2: Blosc2}


def serve(connection: Connection, memory_fd: int) -> None:
    """Answer requests until the other end closes, or its process ends within a request."""
    opened: dict[int, Library] = {}
    memory = mmap.mmap(memory_fd, os.fstat(memory_fd).st_size)
    with suppress(EOFError, ConnectionError):
        while True:
            request = connection.recv_bytes()
            operation, library, is_bfloat, tensors, half = HEAD.unpack_from(request)
            if len(memory) < 2 * half:
                memory = mmap.mmap(memory_fd, os.fstat(memory_fd).st_size)
            numbers = np.frombuffer(request, "<u8", offset=HEAD.size).tolist()
            sizes, lengths = numbers[:tensors], numbers[tensors:]
            try:
                used = opened.get(library) or opened.setdefault(library, _MAKERS[library]())
                with memoryview(memory) as whole, whole[:half] as source, whole[half : 2 * half] as target:
                    if operation == COMPRESS:
                        lengths = _compress(used, source, target, sizes, len(lengths), bool(is_bfloat))
                    else:
                        _decompress(used, source, target, sizes, lengths)
                answer = DONE + np.array(lengths, "<u8").tobytes()
            except Exception as error:  # of a library, of any kind
                verdict = FAILED if isinstance(error, ImportError | MemoryError | OSError) else REFUSED
                answer = verdict + f"{type(error).__name__}: {error}".replace("\n", " ")[:300].encode()
            connection.send_bytes(answer)


def _compress(
    library: Library, source: memoryview, target: memoryview, sizes: list[int], layers: int, is_bfloat: bool
) -> list[int]:
    """Write the coded form of each layer to `target`, and return their lengths."""
    lengths, at, end = [], 0, 0
    for _ in range(layers):
        begin = end
        for nbytes in sizes:
            raw: memoryview | bytes = source[at : at + nbytes]
            made: memoryview | bytes = library.compress(source[at : at + nbytes], is_bfloat)
            word, at = len(made), at + nbytes
            if len(made) > nbytes * (1 - LEAST_GAIN):
                made, word = raw, nbytes | _AS_IT_IS
            target[end : end + WORD_BYTES] = word.to_bytes(WORD_BYTES, "little")
            begun, end = end + WORD_BYTES, end + WORD_BYTES + len(made)
            target[begun:end] = made
        lengths.append(end - begin)
    return lengths


def _decompress(library: Library, source: memoryview, target: memoryview, sizes: list[int], lengths: list[int]) -> None:
    """Write the tensors of each layer to `target`. Raises ValueError for a layer whose lengths do not add up."""
    at = end = last = 0
    for length in lengths:
        last += length
        for nbytes in sizes:
            word = int.from_bytes(source[at : at + WORD_BYTES], "little")
            coded_bytes, is_coded = word & ~_AS_IT_IS, not word & _AS_IT_IS
            begun, at = at + WORD_BYTES, at + WORD_BYTES + coded_bytes
            if at > last or (coded_bytes >= nbytes if is_coded else coded_bytes != nbytes):
                raise ValueError("the lengths of its tensors do not add up")
            piece = source[begun:at]
            target[end : end + nbytes] = library.decompress(bytes(piece), nbytes) if is_coded else piece
            end += nbytes
        if at != last:
            raise ValueError("the lengths of its tensors do not add up")


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_DATA, (DATA_LIMIT_BYTES, DATA_LIMIT_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    serve(Connection(int(sys.argv[1])), int(sys.argv[2]))
