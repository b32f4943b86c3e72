"""Sources of an object's content: arrays in memory, and files of weights, which are read past the page cache.

A source knows the layout of the content that it makes, and writes any range of it. Files are read by O_DIRECT where
their file system has it, so filling the store does not push out what else is cached. The module neither hashes nor
stores.
"""

from __future__ import annotations

import errno
import json
import mmap
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from kvstore_client.errors import invalid
from kvstore_client.memory import Bytes
from kvstore_client.objects.gguf_header import require_whole
from kvstore_proto.errors import KVStoreError
from kvstore_proto.manifest import DTYPE_BITS, TensorEntry, dtype_name, laid_out, metadata_of

DIRECT_BYTES = 4096  # what O_DIRECT wants places and lengths to be multiples of
SLACK_BYTES = 2 * DIRECT_BYTES  # around what is read: it begins and ends anywhere in a page
MAX_HEADER_BYTES = 100 << 20  # of a safetensors file, as the library has it


class Source(Protocol):
    """The content of an object to be: its layout, and `fill`, which several threads may call at once."""

    @property
    def kind(self) -> str: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def tensors(self) -> tuple[TensorEntry, ...]: ...
    @property
    def metadata(self) -> Mapping[str, str]: ...

    def fill(self, offset: int, nbytes: int, buffer: Bytes) -> int:
        """Write the `nbytes` bytes of the content from `offset` on into `buffer`, which begins at a page and has room
        for `SLACK_BYTES` more, and return the place in it where they begin. Raises OSError, and KVStoreError for a file
        that has changed."""
        ...


class ArraySource:
    """The source of `arrays`, by name: NumPy arrays, or raw bytes with a type and a shape of `types`. `kind` and
    `metadata` are for readers."""

    def __init__(
        self,
        arrays: Mapping[str, npt.NDArray[Any]],
        types: Mapping[str, tuple[str, tuple[int, ...]]] | None = None,
        *,
        kind: str = "tensors",
        metadata: Mapping[str, Any] | None = None,
    ) -> None:
        types = types or {}
        listed = [(name, *types.get(name, (dtype_name(array.dtype), array.shape))) for name, array in arrays.items()]
        self.kind, self.metadata = kind, metadata_of(metadata or {})
        self.tensors, self.nbytes = laid_out(listed)
        self._arrays = {name: np.ascontiguousarray(array).reshape(-1).view(np.uint8) for name, array in arrays.items()}

    def fill(self, offset: int, nbytes: int, buffer: Bytes) -> int:
        buffer[:nbytes] = 0
        for each in self.tensors:
            first, last = max(each.offset, offset), min(each.offset + each.nbytes, offset + nbytes)
            if first < last:
                raw = self._arrays[each.name][first - each.offset : last - each.offset]
                np.copyto(buffer[first - offset : last - offset], raw)
        return 0


class BytesSource:
    """The source of the bytes `data`, without tensors."""

    def __init__(self, data: bytes | Bytes, *, kind: str = "bytes", metadata: Mapping[str, Any] | None = None) -> None:
        self._data = np.frombuffer(data, np.uint8) if isinstance(data, bytes) else data
        self.kind, self.nbytes, self.metadata = kind, len(self._data), metadata_of(metadata or {})
        self.tensors: tuple[TensorEntry, ...] = ()

    def fill(self, offset: int, nbytes: int, buffer: Bytes) -> int:
        np.copyto(buffer[:nbytes], self._data[offset : offset + nbytes])
        return 0


FileState = tuple[int, int, int]
"""Size, time of the last change, and inode of a file."""


class Segment(NamedTuple):
    """A run of `nbytes` bytes at `offset` of the content, from `file_offset` of file number `file`."""

    offset: int
    nbytes: int
    file: int
    file_offset: int


@dataclass(frozen=True, slots=True)
class _OpenFile:
    path: Path
    descriptor: int
    is_direct: bool
    state: FileState


class FileSource:
    """The source of a content that `segments` of the files `paths` make up, in order. `states` says how the files were
    when the segments were found. Close it after use. Raises KVStoreError(INVALID) for a file that has changed since."""

    def __init__(
        self,
        paths: Sequence[Path],
        segments: Sequence[Segment],
        tensors: tuple[TensorEntry, ...],
        nbytes: int,
        *,
        kind: str,
        metadata: Mapping[str, str],
        states: Sequence[FileState],
    ) -> None:
        self.kind, self.nbytes, self.tensors, self.metadata = kind, nbytes, tensors, metadata
        self._segments = _joined(segments)
        self._ends = np.array([each.offset + each.nbytes for each in self._segments])
        self._local = threading.local()
        self._files = [_open(path) for path in paths]
        if (changed := self._changed(states)) is not None:
            self.close()
            raise _changed_meanwhile(changed)

    def fill(self, offset: int, nbytes: int, buffer: Bytes) -> int:
        """Write the `nbytes` bytes from `offset` on into `buffer`, and return where they begin. The longest run is read
        straight into its place, at the offset in its page that the file has; the rest of its pages is overwritten."""
        runs = self._runs(offset, nbytes)
        if not runs:
            buffer[:nbytes] = 0
            return 0
        runs.sort(key=lambda each: -each.nbytes)
        begin = (runs[0].file_offset - runs[0].offset) % DIRECT_BYTES
        for number, each in enumerate(runs):
            file, place = self._files[each.file], begin + each.offset
            straight_to = None if number else buffer[place - each.file_offset % DIRECT_BYTES :]
            self._read(file, each.file_offset, buffer[place : place + each.nbytes], straight_to)
        filled = 0
        for each in sorted(runs, key=lambda each: each.offset):
            buffer[begin + filled : begin + each.offset] = 0
            filled = each.offset + each.nbytes
        buffer[begin + filled : begin + nbytes] = 0
        if (changed := self._changed([file.state for file in self._files])) is not None:
            raise _changed_meanwhile(changed)
        return begin

    def _changed(self, states: Sequence[FileState]) -> Path | None:
        """Return a file that is not in its state of `states`, if there is one."""
        pairs = zip(self._files, states, strict=True)
        return next((file.path for file, state in pairs if _state(file.descriptor) != state), None)

    def _runs(self, offset: int, nbytes: int) -> list[Segment]:
        """Return the runs of files in the `nbytes` bytes from `offset` on, by their offset there."""
        runs = []
        for each in self._segments[int(np.searchsorted(self._ends, offset, "right")) :]:
            first, last = max(each.offset, offset), min(each.offset + each.nbytes, offset + nbytes)
            if first >= last:
                break
            runs.append(Segment(first - offset, last - first, each.file, each.file_offset + first - each.offset))
        return runs

    def _read(self, file: _OpenFile, at: int, destination: Bytes, straight_to: Bytes | None) -> None:
        """Read `destination` full from `at` on: straight with O_DIRECT if there is `straight_to`, which has room for
        all of the first and the last page, else by memory of this thread's."""
        if not file.is_direct:
            _read_whole(file, at, destination, len(destination))
            return
        begin, end = at - at % DIRECT_BYTES, at + len(destination)
        length = -(-(end - begin) // DIRECT_BYTES) * DIRECT_BYTES
        held = self._buffer(length) if straight_to is None else straight_to
        _read_whole(file, begin, held[:length], end - begin)
        if straight_to is None:
            np.copyto(destination, held[at - begin : end - begin])

    def _buffer(self, nbytes: int) -> Bytes:
        held: Bytes | None = getattr(self._local, "buffer", None)
        if held is None or len(held) < nbytes:
            held = self._local.buffer = np.frombuffer(mmap.mmap(-1, nbytes), np.uint8)
        return held

    def close(self) -> None:
        while self._files:
            os.close(self._files.pop().descriptor)

    def __enter__(self) -> FileSource:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _joined(segments: Sequence[Segment]) -> list[Segment]:
    """Return `segments` with neighbours in one file joined, also over a gap, which reading through is cheaper than."""
    joined: list[Segment] = []
    for each in segments:
        if not each.nbytes:
            continue
        if joined and joined[-1].file == each.file:
            last = joined[-1]
            if each.offset - last.offset == each.file_offset - last.file_offset:
                joined[-1] = last._replace(nbytes=each.offset + each.nbytes - last.offset)
                continue
        joined.append(each)
    return joined


def _open(path: Path) -> _OpenFile:
    try:
        descriptor, is_direct = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT), True
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        descriptor, is_direct = os.open(path, os.O_RDONLY | os.O_CLOEXEC), False
    return _OpenFile(path, descriptor, is_direct, _state(descriptor))


def _changed_meanwhile(path: Path) -> KVStoreError:
    return invalid(f"{path} was changed while it was read: put it again")


def _state(descriptor: int) -> FileState:
    status = os.fstat(descriptor)
    return status.st_size, status.st_mtime_ns, status.st_ino


def _read_whole(file: _OpenFile, at: int, destination: Bytes, needed: int) -> None:
    """Read `destination` full from `at` on; at the end of the file `needed` bytes suffice."""
    done = 0
    while done < needed:
        got = os.preadv(file.descriptor, [destination[done:].data], at + done)
        if not got or (got % DIRECT_BYTES and done + got < needed and file.is_direct):
            raise invalid(f"{file.path} is shorter than it says")
        done += got


# Files of weights


def weights_source(path: Path) -> FileSource:
    """Return the source of the weights at `path`: a safetensors or GGUF file, or a directory with one of a model, whose
    safetensors may be sharded. Its config.json and generation_config.json go into the metadata. Raises
    KVStoreError(INVALID) for files that are none, and OSError.
    """
    if not path.is_dir():
        if path.suffix == ".gguf":
            return gguf_source(path)
        return safetensors_source([path], {})
    index = path / "model.safetensors.index.json"
    if index.is_file():
        listed = _json(index.read_bytes(), index).get("weight_map")
        if not isinstance(listed, dict) or not all(isinstance(name, str) for name in listed.values()):
            raise invalid(f"{index} has no `weight_map` from tensors to files")
        files = sorted({path / name for name in listed.values()})
    else:
        files = sorted(path.glob("*.safetensors"))
    found = [*path.glob("*.gguf")]
    if not files and len(found) == 1:
        return gguf_source(found[0])
    if not files:
        raise invalid(f"{path} has no *.safetensors, and not one *.gguf: name the file")
    names = ("config.json", "generation_config.json")
    return safetensors_source(files, {name: _text(path / name) for name in names if (path / name).is_file()})


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise invalid(f"{path} is not text in UTF-8") from None


def safetensors_source(paths: Sequence[Path], metadata: Mapping[str, str]) -> FileSource:
    """Return the source of all tensors in the safetensors files `paths`, in the order in which they lie there, each at
    a multiple of 64 bytes. Raises KVStoreError(INVALID) for other files, and OSError.
    """
    listed: list[tuple[str, str, list[int]]] = []
    places: list[tuple[int, int]] = []
    states: list[FileState] = []
    for number, path in enumerate(paths):
        begin, tensors, state = _safetensors_header(path)
        states.append(state)
        for name, each in tensors:
            listed.append((name, each["dtype"], each["shape"]))
            places.append((number, begin + each["data_offsets"][0]))
    if not listed:
        raise invalid(f"{paths[0]} has no tensor")
    if len({name for name, _, _ in listed}) < len(listed):
        raise invalid(f"{paths[0].parent} has a tensor in two of its files")
    entries, nbytes = laid_out(listed)
    segments = [Segment(each.offset, each.nbytes, *place) for each, place in zip(entries, places, strict=True)]
    found = metadata_of(metadata)
    return FileSource(paths, segments, entries, nbytes, kind="safetensors", metadata=found, states=states)


def _safetensors_header(path: Path) -> tuple[int, list[tuple[str, dict[str, Any]]], FileState]:
    """Return where the data of a safetensors file begins, its tensors by their place, and the state of the file."""
    with open(path, "rb") as file:
        size, *_ = state = _state(file.fileno())
        length = int.from_bytes(file.read(8), "little")
        if not 0 < length <= min(size - 8, MAX_HEADER_BYTES):
            raise invalid(f"{path} is no safetensors file, or was cut short: it has no whole header")
        header = _json(file.read(length), path)
    header.pop("__metadata__", None)
    for name, each in header.items():
        if not _is_described(each):
            raise invalid(f"{path}: tensor {name} has no type, shape or place that is known")
        begin, end = each["data_offsets"]
        if (end - begin) * 8 != DTYPE_BITS[each["dtype"]] * int(np.prod(each["shape"], dtype=object)):
            raise invalid(f"{path}: tensor {name} does not fit its shape")
        if 8 + length + end > size:
            raise invalid(f"{path}: tensor {name} ends after the file, which was cut short: fetch it again")
    return 8 + length, sorted(header.items(), key=lambda item: item[1]["data_offsets"][0]), state


def _is_described(tensor: Any) -> bool:
    """Return whether a header's entry has a type that is known, and natural numbers for its shape and its place."""
    if not isinstance(tensor, dict):
        return False
    dtype, shape, place = (tensor.get(key) for key in ("dtype", "shape", "data_offsets"))
    numbers = [*shape, *place] if isinstance(shape, list) and isinstance(place, list) and len(place) == 2 else [-1]
    return isinstance(dtype, str) and dtype in DTYPE_BITS and all(type(each) is int and each >= 0 for each in numbers)


def _json(raw: bytes, path: Path) -> dict[str, Any]:
    try:
        found = json.loads(raw)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise invalid(f"{path} is not what its name says: its header is no JSON object")
    return found


def gguf_source(path: Path) -> FileSource:
    """Return the source of a GGUF file as it is, for readers that take the file's bytes from memory. Raises
    KVStoreError(INVALID) for another file, and OSError.
    """
    with open(path, "rb") as file:
        size, *_ = state = _state(file.fileno())
        require_whole(file, str(path), size)
    named, content = {"file": path.name}, [Segment(0, size, 0, 0)]
    return FileSource([path], content, (), size, kind="gguf", metadata=named, states=[state])
