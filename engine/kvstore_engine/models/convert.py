"""Rewrites a GGUF file with its matrices in another quantisation.

The module owns the choice of a type for each tensor and the new file's layout. Metadata is copied byte for byte, except
`general.file_type`, which says what the matrices are. It never touches the source, and a conversion appears
whole or not at all.

Which tensors change:
  - Vectors (norms, biases, rope factors) stay as they are: they are small and everything is multiplied by
    them.
  - `token_embd.weight` and `output.weight` become q8_0 where q4_0 is asked for. The embedding is the output
    matrix too
    in models with tied weights; its error goes straight into every logit, and llama.cpp spends more bits on
    it for the same reason (q6_K in its q4_0 files, a format that we do not write).
  - Rows that are no multiple of 32 become f16, because a block cannot span rows.
  - Everything else becomes the target. A tensor that has its type already is copied.
"""

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import xxhash

from kvstore_engine.errors import UsageError
from kvstore_engine.ggml import load_library
from kvstore_engine.ggml.tensor_values import dequantised, quantised
from kvstore_engine.gguf import TENSOR_TYPES, FileWatch, GGUFFile, TensorInfo
from kvstore_engine.gguf.cursor import Cursor
from kvstore_engine.models.cache import appearing, exclusive

QUANTISATIONS = ("q4_0", "q8_0", "f16")
READABLE = ("f32", "f16", "bf16", "q4_0", "q4_1", "q5_0", "q8_0", "q4_k", "q6_k")

_FILE_TYPES = {"f16": 1, "q4_0": 2, "q8_0": 7}  # LLAMA_FTYPE_MOSTLY_*
_TYPE_NUMBERS = {kind.name: number for number, kind in TENSOR_TYPES.items()}
_BLOCK = 32  # values of q4_0 and q8_0 that share a scale
_OUTPUT_TENSORS = ("token_embd.weight", "output.weight")
_SLICE_ELEMENTS = 1 << 20  # a megabyte of values at a time stays in the processor's cache
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")


class _Target(NamedTuple):
    source: TensorInfo
    type_name: str
    offset_bytes: int
    nbytes: int


def convert(source: Path, target_type: str, folder: Path | None = None, digest: str | None = None) -> Path:
    """Return the path of a model file like `source` with its matrices in the quantisation `target_type`, which is made
    on first use.

    The result is beside the source (or in `folder`). Its name contains the source's digest, so that a changed source is
    converted anew; pass that `digest`, if it is known, to avoid reading the whole source. Return `source` itself if
    nothing would change. Raises UsageError for a type that cannot be read or written; OperationError if the result
    cannot be stored; GGUFError for a bad source.
    """
    if target_type not in QUANTISATIONS:
        raise UsageError(f"cannot convert to {target_type!r}; choose one of {', '.join(QUANTISATIONS)}")
    with GGUFFile.open(source) as file:
        return _convert(file, target_type, folder or source.parent, digest)


def converted_path(source: Path, target_type: str, folder: Path, digest: str) -> Path:
    """Return the path in `folder` of the file into which `source` is converted. `target_type` is the quantisation of
    its matrices, `digest` the digest of the source.
    """
    return folder / f"{source.stem}.{target_type}-{digest[:12]}.gguf"


def _convert(file: GGUFFile, target_type: str, folder: Path, digest: str | None) -> Path:
    if all(info.type_name == _type_for(info, target_type) for info in file.tensors.values()):
        return file.path
    unreadable = next((info for info in file.tensors.values() if info.type_name not in READABLE), None)
    if unreadable is not None:
        raise UsageError(
            f"{file.path}: cannot convert: {unreadable.name} is {unreadable.type_name}, and only "
            f"{', '.join(READABLE)} can be read"
        )
    # All bytes, not only the weights': a corrected chat template must not keep its old conversion alive.
    target = converted_path(file.path, target_type, folder, digest or xxhash.xxh3_128(file.data.data).hexdigest())
    if not target.exists():
        with exclusive(target):
            if not target.exists():
                _write(file, target_type, target)
    return target


def _type_for(info: TensorInfo, target_type: str) -> str:
    """Return the type of `info` in a file of `target_type`, by the rules in the module's docstring."""
    if len(info.shape) == 1:
        return info.type_name
    if target_type == "q4_0" and info.name in _OUTPUT_TENSORS:
        target_type = "q8_0"
    return target_type if target_type == "f16" or info.shape[0] % _BLOCK == 0 else "f16"


def _write(file: GGUFFile, target_type: str, path: Path) -> None:
    alignment = file.metadata.get("general.alignment", 32)
    assert isinstance(alignment, int)  # the reader checked it
    targets: list[_Target] = []
    end = 0
    for info in file.tensors.values():
        type_name = _type_for(info, target_type)
        kind = TENSOR_TYPES[_TYPE_NUMBERS[type_name]]
        nbytes = kind.row_bytes(info.shape[0]) * (int(np.prod(info.shape)) // info.shape[0])
        offset = -(-end // alignment) * alignment
        targets.append(_Target(info, type_name, offset, nbytes))
        end = offset + nbytes
    watch = FileWatch(file)
    with appearing(path) as out:
        header = _header(file, targets, target_type)
        start = -(-len(header) // alignment) * alignment
        at = out.write(header)
        for target in targets:
            at += out.write(bytes(start + target.offset_bytes - at))
            for piece in _converted(file, target):
                out.write(piece)
                at += piece.nbytes
        out.write(bytes(-at % alignment))
        watch.require_untouched()  # since it was opened: the name of the result holds its digest


def _converted(file: GGUFFile, target: _Target) -> Iterator[memoryview]:
    """Yield the tensor's bytes in its new type, a slice at a time."""
    raw = file.tensor_bytes(target.source.name)
    if target.type_name == target.source.type_name:
        yield raw.data
        return
    kind, library = TENSOR_TYPES[target.source.ggml_type], load_library()
    step = _SLICE_ELEMENTS // kind.block_elements * kind.block_bytes
    for start in range(0, raw.size, step):
        values = dequantised(library, target.source.ggml_type, np.ascontiguousarray(raw[start : start + step]))
        yield quantised(library, _TYPE_NUMBERS[target.type_name], values).data


def _header(file: GGUFFile, targets: list[_Target], target_type: str) -> bytes:
    """Return magic, counts, the source's metadata, and the new tensor table."""
    metadata, count = _raw_metadata(file, target_type)
    parts = [b"GGUF", _U32.pack(3), _U64.pack(len(targets)), _U64.pack(count), metadata]
    for target in targets:
        name = target.source.name.encode()
        shape = target.source.shape
        parts += [_U64.pack(len(name)), name, _U32.pack(len(shape)), *map(_U64.pack, shape)]
        parts += [_U32.pack(_TYPE_NUMBERS[target.type_name]), _U64.pack(target.offset_bytes)]
    return b"".join(parts)


def _raw_metadata(file: GGUFFile, target_type: str) -> tuple[bytes, int]:
    """Return the metadata section's bytes, with `general.file_type` set if the source has it, and its entry count."""
    cursor = Cursor(memoryview(file.data.data), str(file.path))
    cursor.take(16, "the header")
    count = cursor.u64("the number of metadata entries")
    start = cursor.position
    file_type_end = None
    for _ in range(count):
        key = cursor.string("a metadata key")
        cursor.value(key)
        if key == "general.file_type":
            file_type_end = cursor.position - start
    raw = bytearray(cursor.buffer[start : cursor.position])
    if file_type_end is not None:
        _U32.pack_into(raw, file_type_end - _U32.size, _FILE_TYPES[target_type])
    return bytes(raw), count
