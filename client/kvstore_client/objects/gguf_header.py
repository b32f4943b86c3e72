"""The part of a GGUF file's header that says how long the file must be, so that one that was cut short is not stored.

The module walks the header and keeps nothing of it; the engine reads what it means. The file counts as hostile: nothing
is read past its end, and no length is believed before it fits.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from typing import BinaryIO, Final

from kvstore_client.errors import invalid
from kvstore_proto.errors import KVStoreError
from kvstore_proto.ggml_types import TENSOR_TYPES

_NUMBER_BYTES: Final = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}  # by GGUF's type
_UINT32, _STRING, _ARRAY = 4, 8, 9
_ALIGNMENT: Final = b"general.alignment"
_MOST_KEY_BYTES: Final = 1 << 16
_MOST_DIMENSIONS: Final = 16


class _Walk:
    """The way through a header: `take` and `skip` raise KVStoreError(INVALID) at the end of the file."""

    def __init__(self, file: BinaryIO, name: str, nbytes: int) -> None:
        self._file, self._name, self._left = file, name, nbytes
        self.place = 0

    def wrong(self, what: str) -> KVStoreError:
        return invalid(f"{self._name} is no whole GGUF file: {what}: fetch it again")

    def _advance(self, nbytes: int) -> None:
        if nbytes > self._left:
            raise self.wrong("it ends in its header")
        self._left -= nbytes
        self.place += nbytes

    def take(self, nbytes: int) -> bytes:
        self._advance(nbytes)
        return self._file.read(nbytes)

    def skip(self, nbytes: int) -> None:
        self._advance(nbytes)
        self._file.seek(nbytes, 1)

    def number(self, layout: str) -> int:
        found: int = struct.unpack(layout, self.take(struct.calcsize(layout)))[0]
        return found

    def text(self) -> bytes:
        size = self.number("<Q")
        if size > _MOST_KEY_BYTES:
            raise self.wrong(f"a name in it would have {size} bytes")
        return self.take(size)

    def skip_values(self, kind: int, count: int, depth: int = 0) -> None:
        """Pass over `count` values of GGUF's type `kind`."""
        if kind in _NUMBER_BYTES:
            self.skip(count * _NUMBER_BYTES[kind])
        elif kind == _STRING or (kind == _ARRAY and depth < 4):
            pass_one: Callable[[], None] = self._skip_text if kind == _STRING else lambda: self._skip_array(depth)
            for _ in range(count):
                pass_one()
        else:
            raise self.wrong(f"it has a value of the unknown type {kind}")

    def _skip_text(self) -> None:
        self.skip(self.number("<Q"))

    def _skip_array(self, depth: int) -> None:
        kind, count = self.number("<I"), self.number("<Q")
        self.skip_values(kind, count, depth + 1)


def require_whole(file: BinaryIO, name: str, nbytes: int) -> None:
    """Check that the GGUF file `file` of `nbytes` bytes, whose name is `name`, has all of its tensors; of one of an
    unknown type it looks for the place alone. Raises KVStoreError(INVALID)."""
    walk, alignment, end = _Walk(file, name, nbytes), 32, 0
    if walk.take(min(4, nbytes)) != b"GGUF":
        raise invalid(f"{name} is no GGUF file")
    version, tensors, values = walk.number("<I"), walk.number("<Q"), walk.number("<Q")
    if version not in (2, 3):
        raise walk.wrong(f"version {version} of the format is not known")
    for _ in range(values):
        key, kind = walk.text(), walk.number("<I")
        if key == _ALIGNMENT and kind == _UINT32:
            alignment = max(walk.number("<I"), 1)
        else:
            walk.skip_values(kind, 1)
    if not tensors:
        raise walk.wrong("it has no tensor")
    for _ in range(tensors):
        walk.text()
        if (dimensions := walk.number("<I")) > _MOST_DIMENSIONS:
            raise walk.wrong(f"a tensor in it would have {dimensions} dimensions")
        elements = math.prod(walk.number("<Q") for _ in range(dimensions))
        form, offset = TENSOR_TYPES.get(walk.number("<I")), walk.number("<Q")
        end = max(end, offset + (0 if form is None else form.row_bytes(elements)))
    begin = -(-walk.place // alignment) * alignment
    if begin + end > nbytes:
        raise walk.wrong(f"its tensors need {begin + end} bytes, and it has {nbytes}")
