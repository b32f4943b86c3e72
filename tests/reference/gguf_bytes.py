"""Writes GGUF files for tests, value by value, independently of the engine's own code.

Owns the encoding of metadata and tensors as the format document says it (version 3, little-endian). Python
types decide the stored type: bool, int (u32), float (f32), str, list of str, and numpy arrays of int32 or
float32. None leaves the key out.
"""

import struct
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

ALIGNMENT_BYTES = 32
Tensor = tuple[int, tuple[int, ...], bytes]  # ggml type, shape with the contiguous dimension first, data


def write_gguf(path: Path, metadata: Mapping[str, object], tensors: Mapping[str, Tensor] | None = None) -> Path:
    """Write `path` and return it."""
    with path.open("wb") as file:
        file.writelines(_pieces(metadata, tensors or {}))
    return path


def gguf_bytes(metadata: Mapping[str, object], tensors: Mapping[str, Tensor]) -> bytes:
    """The bytes of a GGUF file."""
    return b"".join(_pieces(metadata, tensors))


def _pieces(metadata: Mapping[str, object], tensors: Mapping[str, Tensor]) -> Iterator[bytes]:
    metadata = {key: value for key, value in metadata.items() if value is not None}
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata))
    head += b"".join(_string(key) + _value(value) for key, value in metadata.items())
    offset = 0
    for name, (kind, shape, raw) in tensors.items():
        head += _string(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)
        offset += len(raw) + -len(raw) % ALIGNMENT_BYTES
    yield head + bytes(-len(head) % ALIGNMENT_BYTES)
    for _, _, raw in tensors.values():
        yield raw
        yield bytes(-len(raw) % ALIGNMENT_BYTES)


def _string(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _value(value: object) -> bytes:
    match value:
        case bool():
            return struct.pack("<I?", 7, value)
        case int():
            return struct.pack("<II", 4, value)
        case float():
            return struct.pack("<If", 6, value)
        case str():
            return struct.pack("<I", 8) + _string(value)
        case list():
            return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(_string, value))
        case np.ndarray():
            kind = {np.dtype(np.int32): 5, np.dtype(np.float32): 6}[value.dtype]
            return struct.pack("<IIQ", 9, kind, value.size) + value.tobytes()
        case _:
            raise TypeError(f"no GGUF type for {value!r}")
