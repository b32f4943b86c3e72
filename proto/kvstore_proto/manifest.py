"""An object's manifest: which tensors it has, where each lies in its content, and which blocks hold the content.

The content is cut into parts of one size, the last one padded with zeros to the smallest class that holds it. A part is
a block under the fingerprint `OBJECTS`, whose eight token ids are the part's digest: so equal parts of any objects are
one block. The manifest is canonical JSON, cut and stored likewise; its digest names the whole object, and says all of
its bytes. Part digests guard against mix-ups and damage, not against a forger inside the tenant.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import xxhash

from kvstore_proto.arena import HEADER_BYTES
from kvstore_proto.errors import InvalidValue

DIGEST_BYTES: Final = 32
MAX_OBJECT_NAME_BYTES: Final = 1024
OBJECT_NAMES: Final = f"1 to {MAX_OBJECT_NAME_BYTES} bytes, no control character and no @"  # which there are
PIN_OWNER: Final = "objects"  # of the pins of parts
ALIGNMENT_BYTES: Final = 64  # of tensors in the content
_PART_TAG: Final = b"KVpart1\0"
_FORMAT: Final = 1
_SMALLEST, _LARGEST, _SLAB_FROM = 13, 24, 20  # powers of two of a slot's size
# Payload bytes of parts, so that slots fill arenas, and slabs beside their records.
PART_CLASSES: Final = tuple(
    (1 << power) - (1 << power >> 8 if power >= _SLAB_FROM else 0) - HEADER_BYTES
    for power in range(_SMALLEST, _LARGEST + 1)
)
DEFAULT_PART_BYTES: Final = PART_CLASSES[-1]


def is_object_name(name: str) -> bool:
    """Return whether `name` can name an object: 1 to 1024 bytes, all printable, without "@", which stands before a
    version.
    """
    return 0 < len(name.encode(errors="replace")) <= MAX_OBJECT_NAME_BYTES and name.isprintable() and "@" not in name


def class_bytes(nbytes: int, most: int = DEFAULT_PART_BYTES) -> int:
    """Return the smallest payload size for a part of `nbytes` bytes that is at most `most`, itself a size of a part."""
    return next(size for size in PART_CLASSES if size >= min(nbytes, most))


def part_digest(payload: npt.NDArray[np.uint8] | bytes) -> bytes:
    """Return the digest of a part, 32 bytes: xxh3_128 of its bytes, their number, and a tag."""
    raw = payload.data if isinstance(payload, np.ndarray) else payload
    return xxhash.xxh3_128_digest(raw) + len(payload).to_bytes(8, "little") + _PART_TAG


def split_digests(packed: bytes) -> tuple[bytes, ...]:
    """Return the digests that are `packed` one behind the other."""
    return tuple(packed[at : at + DIGEST_BYTES] for at in range(0, len(packed), DIGEST_BYTES))


def part_tokens(digest: bytes) -> npt.NDArray[np.int32]:
    """Return the eight token ids of the block that holds the part with the digest `digest`."""
    return np.frombuffer(digest, "<i4").astype(np.int32, copy=False)


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of an object: `nbytes` bytes at `offset` of the content. `dtype` is a name of safetensors, such as
    BF16, or ggml's number of a type, such as ggml:2."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Manifest:
    """The description of one version of an object. `parts` has the digest of each part; `metadata` is what the writer
    wants to find again, by name."""

    kind: str
    nbytes: int
    part_bytes: int
    parts: tuple[bytes, ...]
    tensors: tuple[TensorEntry, ...] = ()
    metadata: Mapping[str, str] = field(default_factory=dict)

    def pack(self) -> bytes:
        """Return the manifest as canonical JSON."""
        return json.dumps(
            {
                "format": _FORMAT, "kind": self.kind, "bytes": self.nbytes, "part_bytes": self.part_bytes,
                "parts": b"".join(self.parts).hex(), "metadata": dict(self.metadata),
                "tensors": [[each.name, each.dtype, each.shape, each.offset, each.nbytes] for each in self.tensors],
            },
            sort_keys=True, separators=(",", ":"),
        ).encode()  # fmt: skip

    def payload_bytes(self, part: int) -> int:
        """Return the payload bytes of the block that holds part number `part`."""
        left = self.nbytes - part * self.part_bytes
        return class_bytes(max(left, 1), self.part_bytes)

    @property
    def by_name(self) -> dict[str, TensorEntry]:
        return {each.name: each for each in self.tensors}


def manifest_digest(packed: bytes) -> bytes:
    """Return the digest of a packed manifest, 32 bytes."""
    return hashlib.blake2b(packed, digest_size=DIGEST_BYTES, person=b"kvstore manifest").digest()


def parse_manifest(packed: bytes, digest: bytes) -> Manifest | None:
    """Return the manifest whose `Manifest.pack` is `packed`, or None if its digest is not `digest`, or its form is
    unknown.
    """
    if manifest_digest(packed) != digest:
        return None
    try:
        raw = json.loads(packed)
        parts = bytes.fromhex(raw["parts"])
        found = Manifest(
            raw["kind"], raw["bytes"], raw["part_bytes"],
            split_digests(parts),
            tuple(TensorEntry(name, dtype, tuple(shape), at, size) for name, dtype, shape, at, size in raw["tensors"]),
            raw["metadata"],
        )  # fmt: skip
    except (ValueError, KeyError, TypeError):
        return None
    is_whole = found.part_bytes in PART_CLASSES and len(found.parts) == parts_of(found.nbytes, found.part_bytes)
    return found if raw["format"] == _FORMAT and is_whole and _are_inside(found) else None


def parts_of(nbytes: int, part_bytes: int) -> int:
    """Return the number of parts of a content of `nbytes` bytes; an empty one has one part."""
    return max(1, -(-nbytes // part_bytes))


def _are_inside(manifest: Manifest) -> bool:
    return all(each.offset >= 0 and each.offset + each.nbytes <= manifest.nbytes for each in manifest.tensors)


# Bits of one number, by the names that safetensors has for types.
DTYPE_BITS: Final = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16,
    "I32": 32, "U32": 32, "F32": 32, "I64": 64, "U64": 64, "F64": 64, "C64": 64,
}  # fmt: skip
NUMPY_DTYPES: Final = {
    "BOOL": "?", "U8": "u1", "I8": "i1", "F8_E4M3": "u1", "F8_E5M2": "u1", "F8_E8M0": "u1", "I16": "<i2", "U16": "<u2",
    "F16": "<f2", "BF16": "<u2", "I32": "<i4", "U32": "<u4", "F32": "<f4", "I64": "<i8", "U64": "<u8", "F64": "<f8",
    "C64": "<c8",
}  # fmt: skip


def dtype_name(dtype: npt.DTypeLike) -> str:
    """Return the name for numbers of the NumPy type `dtype`. Raises KVStoreError(INVALID) for a type without one."""
    wanted = np.dtype(dtype).newbyteorder("<")
    for name, code in NUMPY_DTYPES.items():
        if np.dtype(code) == wanted and name not in ("F8_E4M3", "F8_E5M2", "F8_E8M0", "BF16"):
            return name
    raise InvalidValue(f"tensors of {np.dtype(dtype)} cannot be stored; known: {', '.join(NUMPY_DTYPES)}")


def laid_out(tensors: Sequence[tuple[str, str, Sequence[int]]]) -> tuple[tuple[TensorEntry, ...], int]:
    """Return entries for `tensors` (name, type and shape of each) one after the other, each at a multiple of 64 bytes,
    and the bytes of all.
    """
    entries, offset = list[TensorEntry](), 0
    for name, dtype, shape in tensors:
        nbytes = prod(shape) * DTYPE_BITS[dtype] // 8
        entries.append(TensorEntry(name, dtype, tuple(shape), offset, nbytes))
        offset += -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    return tuple(entries), offset


def metadata_of(given: Mapping[str, Any]) -> dict[str, str]:
    """Return `given` with every value as text."""
    return {str(name): value if isinstance(value, str) else json.dumps(value) for name, value in given.items()}
