"""Opens a GGUF file: metadata, tensor table, and the tensors' bytes in place.

The module owns the parsed header and the memory map. It does not copy or dequantise tensor data, and never writes.
Invariants after `open`: every tensor is wholly inside the file, has a known type, and starts on the file's alignment;
so the bytes of a `TensorInfo` need no other check.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little-endian. It has its own
parser because `gguf.GGUFReader` builds a numpy view per string and takes seconds on large vocabularies.
"""

import json
import mmap
import os
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt
import xxhash

from kvstore_engine.errors import OperationError
from kvstore_engine.gguf.cursor import Cursor, GGUFError
from kvstore_engine.gguf.open_file import FileChanged, OpenFile
from kvstore_proto.ggml_types import TENSOR_TYPES

__all__ = ["FileDigest", "GGUFError", "GGUFFile", "TensorInfo"]

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT_BYTES = 32
_MAX_ALIGNMENT_BYTES = 1 << 16
_MAX_KEY_BYTES = 65535
_MAX_NAME_BYTES = 64  # GGML_MAX_NAME
_MAX_DIMENSIONS = 4  # GGML_MAX_DIMS
_MAX_ELEMENTS = 1 << 48
_MIN_METADATA_BYTES = 8 + 4 + 1  # empty key, type, one-byte value
_MIN_TENSOR_BYTES = 8 + 4 + 4 + 8  # empty name, no dimensions, type, offset
_CHUNK_BYTES = 1 << 20  # read and hashed at a time: it stays in the processor's cache


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """The name, type, shape and place of one tensor in a GGUF file. As in ggml, the first dimension of `shape` is the
    contiguous one.
    """

    name: str
    ggml_type: int
    type_name: str
    shape: tuple[int, ...]
    offset_bytes: int
    nbytes: int


class FileDigest(NamedTuple):
    """The digests of a model file's content, 32 hex digits each: `weights` covers everything that K and V depend on,
    `header` everything before the tensors, with tokenizer and chat template.
    """

    weights: str
    header: str


class GGUFFile:
    """An open GGUF file, to be closed by `close` or a `with` block. `source` is the open file itself; with
    `owns_source` it is closed too. `metadata` maps keys to bool, int, float, str, list[str] or 1-d numpy arrays;
    `tensors` maps names to `TensorInfo`; `data` is the whole file as a read-only uint8 memory map.
    """

    def __init__(
        self,
        source: OpenFile,
        data: npt.NDArray[np.uint8],
        metadata: Mapping[str, object],
        tensors: Mapping[str, TensorInfo],
        *,
        owns_source: bool = True,
    ) -> None:
        self.source, self._owns_source = source, owns_source
        self.path = source.path  # what messages call the file
        self.data = data
        self.metadata = MappingProxyType(dict(metadata))
        self.tensors = MappingProxyType(dict(tensors))

    @classmethod
    def open(cls, file: str | os.PathLike[str] | OpenFile) -> Self:
        """Map and parse the GGUF file `file`, a path or an open file that the caller closes. Raises GGUFError, with a
        message of one line, if it cannot be used.
        """
        if isinstance(file, OpenFile):
            return cls._parsed(file, owns_source=False)
        source = OpenFile.open(file)
        try:
            return cls._parsed(source, owns_source=True)
        except BaseException:
            source.close()
            raise

    @classmethod
    def _parsed(cls, source: OpenFile, *, owns_source: bool) -> Self:
        path = source.path
        try:
            data = source.mapped()
        except OSError as error:
            raise GGUFError(f"{path}: cannot be opened: {error.strerror or error}") from None
        except ValueError:  # numpy refuses to map an empty file
            raise GGUFError(f"{path}: not a GGUF file: it is empty") from None
        cursor = Cursor(memoryview(data.data), str(path))
        metadata_count, tensor_count = _read_header(cursor)
        metadata = _read_metadata(cursor, metadata_count)
        tensors = _read_tensors(cursor, tensor_count, _alignment_bytes(cursor, metadata))
        return cls(source, data, metadata, tensors, owns_source=owns_source)

    def tensor_bytes(self, name: str) -> npt.NDArray[np.uint8]:
        """Return the stored bytes of the tensor `name`, uint8 [nbytes], without a copy. Raises KeyError if the file has
        no such tensor.
        """
        info = self.tensors[name]
        return self.data[info.offset_bytes : info.offset_bytes + info.nbytes]

    def weights_digest(self) -> str:
        """Return a digest, 32 hex digits, of everything that K and V depend on: the architecture, its hyperparameters,
        the tensor table and the tensors' bytes. Tokenizer and description are left out, so that a renamed model keeps
        its stored blocks. It guards against mix-ups and not against forgery.
        """
        architecture = self.metadata.get("general.architecture", "")
        relevant = {k: _plain(v) for k, v in self.metadata.items() if k.startswith(f"{architecture}.")}
        table = [(t.name, t.ggml_type, t.shape) for t in self.tensors.values()]
        digest = xxhash.xxh3_128(json.dumps([architecture, relevant, table], sort_keys=True).encode())
        for info in self.tensors.values():
            self._hash(digest, info.offset_bytes, info.nbytes)
        return digest.hexdigest()

    def digest(self) -> FileDigest:
        """Read the whole file and return the digests of its content. Raises FileChanged if it has become too short for
        its tensors.
        """
        header = xxhash.xxh3_128()
        self._hash(header, 0, min((info.offset_bytes for info in self.tensors.values()), default=self.data.size))
        return FileDigest(self.weights_digest(), header.hexdigest())

    def _hash(self, digest: xxhash.xxh3_128, start: int, count: int) -> None:
        """Add `count` bytes of the file from `start` on. They are read, not mapped: if a mapped file ends too early,
        the process crashes.
        """
        buffer = memoryview(bytearray(min(count, _CHUNK_BYTES)))
        end = start + count
        while start < end:
            try:
                got = os.preadv(self.source.descriptor, [buffer[: end - start]], start)
            except OSError as error:
                raise OperationError(f"{self.path}: cannot be read: {error.strerror or error}") from None
            if not got:
                raise FileChanged(f"the model file {self.path} has become shorter than its tensors: start again")
            digest.update(buffer[:got])
            start += got

    def release(self) -> None:
        """Let the operating system drop the file's pages from this process's memory. They stay mapped and are read
        again when needed.
        """
        if isinstance(self.data.base, mmap.mmap):
            self.data.base.madvise(mmap.MADV_DONTNEED)

    def close(self) -> None:
        """Drop the memory map. The memory stays mapped until the last array over it is gone. The file is closed too if
        this object owns it.
        """
        self.data = np.empty(0, np.uint8)
        if self._owns_source:
            self.source.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _read_header(cursor: Cursor) -> tuple[int, int]:
    """Return the numbers of metadata entries and of tensors."""
    magic = bytes(cursor.buffer[:4])
    if magic != _MAGIC[: len(magic)]:
        raise cursor.error(f"not a GGUF file: it starts with {magic!r}")
    cursor.take(4, "the magic number")
    version = cursor.u32("the version")
    if version not in _VERSIONS:
        hint = "a big-endian file" if version >> 16 else "convert it with a current llama.cpp"
        raise cursor.error(f"GGUF version {version} is not supported, only {_VERSIONS} are: {hint}")
    tensor_count = cursor.count("the number of tensors", _MIN_TENSOR_BYTES)
    return cursor.count("the number of metadata entries", _MIN_METADATA_BYTES), tensor_count


def _read_metadata(cursor: Cursor, count: int) -> dict[str, object]:
    metadata: dict[str, object] = {}
    for index in range(count):
        key = cursor.string(f"metadata key {index}", _MAX_KEY_BYTES)
        if key in metadata:
            raise cursor.error(f"damaged: the metadata key {key!r} appears twice")
        metadata[key] = cursor.value(key)
    return metadata


def _alignment_bytes(cursor: Cursor, metadata: Mapping[str, object]) -> int:
    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT_BYTES)
    if not isinstance(alignment, int) or not 0 < alignment <= _MAX_ALIGNMENT_BYTES or alignment & (alignment - 1):
        raise cursor.error(f"damaged: general.alignment is {alignment!r}, not a power of two")
    return alignment


def _read_tensors(cursor: Cursor, count: int, alignment_bytes: int) -> dict[str, TensorInfo]:
    relative = [_read_tensor(cursor, index, alignment_bytes) for index in range(count)]
    start = -(-cursor.position // alignment_bytes) * alignment_bytes
    tensors: dict[str, TensorInfo] = {}
    for info in relative:
        offset = start + info.offset_bytes
        if offset + info.nbytes > len(cursor.buffer):
            raise cursor.error(
                f"truncated: the tensor {info.name!r} ends at {offset + info.nbytes}, past the file's end"
            )
        if info.name in tensors:
            raise cursor.error(f"damaged: the tensor {info.name!r} appears twice")
        tensors[info.name] = TensorInfo(info.name, info.ggml_type, info.type_name, info.shape, offset, info.nbytes)
    return tensors


def _read_tensor(cursor: Cursor, index: int, alignment_bytes: int) -> TensorInfo:
    """Return one entry of the tensor table, its offset still relative to the data section."""
    name = cursor.string(f"the name of tensor {index}", _MAX_NAME_BYTES)
    dimensions = cursor.u32(f"the rank of {name!r}")
    if not 1 <= dimensions <= _MAX_DIMENSIONS:
        raise cursor.error(f"damaged: the tensor {name!r} has {dimensions} dimensions")
    shape = tuple(cursor.u64(f"the shape of {name!r}") for _ in range(dimensions))
    elements = 1
    for extent in shape:
        elements *= extent
    if not 0 < elements <= _MAX_ELEMENTS:
        raise cursor.error(f"damaged: the tensor {name!r} has the shape {shape}")
    number = cursor.u32(f"the type of {name!r}")
    kind = TENSOR_TYPES.get(number)
    if kind is None:
        raise cursor.error(f"the tensor {name!r} has the unknown ggml type {number}")
    if shape[0] % kind.block_elements:
        raise cursor.error(f"damaged: {name!r} has rows of {shape[0]}, {kind.name} needs {kind.block_elements}s")
    offset = cursor.u64(f"the offset of {name!r}")
    if offset % alignment_bytes:
        raise cursor.error(f"damaged: the tensor {name!r} starts at {offset}, not a multiple of {alignment_bytes}")
    return TensorInfo(name, number, kind.name, shape, offset, kind.row_bytes(shape[0]) * (elements // shape[0]))


def _plain(value: object) -> object:
    return value.tolist() if isinstance(value, np.ndarray) else value
