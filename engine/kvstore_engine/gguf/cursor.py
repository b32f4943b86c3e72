"""Bounded reading of GGUF's scalars, strings and arrays.

The module owns the position inside the header and the promise that nothing is read past its end and nothing is
allocated before its length is known to fit. It does not know what a key means.

The file counts as hostile: every count is compared with the bytes that are left *before* it is used, so a flipped
length leads to an error message and allocates no memory.
"""

import struct
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from kvstore_engine.errors import UsageError

MAX_STRING_BYTES = 1 << 24  # chat templates reach 20 KiB; a longer string is a damaged length

_STRING, _ARRAY, _BOOL = 8, 9, 7
# By GGUF's number of the type: its format for struct, and numpy's type of an array of it.
_NUMBERS = {
    0: ("<B", "u1"),
    1: ("<b", "i1"),
    2: ("<H", "<u2"),
    3: ("<h", "<i2"),
    4: ("<I", "<u4"),
    5: ("<i", "<i4"),
    6: ("<f", "<f4"),
    10: ("<Q", "<u8"),
    11: ("<q", "<i8"),
    12: ("<d", "<f8"),
}
_SCALARS = {kind: struct.Struct(layout) for kind, (layout, _) in _NUMBERS.items()} | {_BOOL: struct.Struct("<B")}
_ARRAY_DTYPES = {kind: dtype for kind, (_, dtype) in _NUMBERS.items()}
_U64 = struct.Struct("<Q")


class GGUFError(UsageError):
    """An error: a file is not a usable GGUF file. The message is one line and names the file."""


class Cursor:
    """A reader of a GGUF file's header in `buffer`, from its start forward and never past its end. `path` names the
    file in errors. Its methods raise GGUFError.
    """

    def __init__(self, buffer: memoryview, file_name: str) -> None:
        self.buffer = buffer
        self.file_name = file_name
        self.position = 0

    def error(self, what: str) -> GGUFError:
        """Return a GGUFError whose message says `what` is wrong, at which byte and in which file."""
        return GGUFError(f"{self.file_name}: {what} (at byte {self.position} of {len(self.buffer)})")

    def take(self, count_bytes: int, what: str) -> memoryview:
        """Return the next `count_bytes` bytes without a copy. `what` names them in an error."""
        end = self.position + count_bytes
        if end > len(self.buffer):
            raise self.error(f"truncated: the file ends inside {what}")
        view = self.buffer[self.position : end]
        self.position = end
        return view

    def u32(self, what: str) -> int:
        """Return the next unsigned 32-bit integer. `what` names it in an error."""
        return int.from_bytes(self.take(4, what), "little")

    def u64(self, what: str) -> int:
        """Return the next unsigned 64-bit integer. `what` names it in an error."""
        return int.from_bytes(self.take(8, what), "little")

    def count(self, what: str, item_bytes: int) -> int:
        """Return the next 64-bit integer, a number of items of at least `item_bytes` bytes each. `what` names it in an
        error. Raises GGUFError if the file is too short for the items.
        """
        count = self.u64(what)
        left = len(self.buffer) - self.position
        if count * item_bytes > left:
            raise self.error(f"damaged or truncated: {what} is {count}, more than the {left} bytes left can hold")
        return count

    def string(self, what: str, max_bytes: int = MAX_STRING_BYTES) -> str:
        """Return the next UTF-8 string, which is stored behind its length. `what` names it in an error. Raises
        GGUFError if it is longer than `max_bytes`.
        """
        length = self.u64(what)
        if length > max_bytes:
            raise self.error(f"damaged: {what} claims {length} bytes, the limit is {max_bytes}")
        try:
            return str(self.take(length, what), "utf-8")
        except UnicodeDecodeError:
            raise self.error(f"damaged: {what} is not UTF-8") from None

    def value(self, key: str) -> object:
        """Return the next metadata value, whose key is `key`: a bool, int, float, str, list of str, or array of
        numbers.
        """
        kind = self.u32(f"the type of {key!r}")
        if kind == _STRING:
            return self.string(f"the value of {key!r}")
        if kind == _ARRAY:
            return self._array(key)
        return self._scalar(kind, key)

    def _scalar(self, kind: int, key: str) -> object:
        layout = _SCALARS.get(kind)
        if layout is None:
            raise self.error(f"damaged: {key!r} has the unknown value type {kind}")
        (value,) = layout.unpack(self.take(layout.size, f"the value of {key!r}"))
        return bool(value) if kind == _BOOL else value

    def _array(self, key: str) -> object:
        kind = self.u32(f"the element type of {key!r}")
        if kind == _STRING:
            return self._strings(key)
        if kind != _BOOL and kind not in _ARRAY_DTYPES:
            raise self.error(f"{key!r} is an array of the unsupported element type {kind}")
        dtype: npt.DTypeLike = np.dtype(np.bool_ if kind == _BOOL else _ARRAY_DTYPES[kind])
        size = np.dtype(dtype).itemsize
        count = self.count(f"the length of {key!r}", size)
        raw = self.take(count * size, f"the array {key!r}")
        if kind == _BOOL:
            return np.frombuffer(raw, np.uint8) != 0
        return np.frombuffer(raw, dtype).copy()

    def _strings(self, key: str) -> list[str]:
        # A vocabulary has up to a quarter of a million of these: the loop below is most of the time to open
        # a file, so it works on local names and checks the bound itself instead of calling `string`.
        count = self.count(f"the length of {key!r}", 8)
        unpack: Callable[[memoryview, int], tuple[int]] = _U64.unpack_from
        buffer, position, size = self.buffer, self.position, len(self.buffer)
        strings: list[str] = []
        append = strings.append
        for _ in range(count):
            start = position + 8
            if start > size:
                raise self.error(f"truncated: the file ends inside {key!r}")
            position = start + unpack(buffer, position)[0]
            if position > size:
                raise self.error(f"damaged or truncated: string {len(strings)} of {key!r} runs past the file's end")
            try:
                append(str(buffer[start:position], "utf-8"))
            except UnicodeDecodeError:
                raise self.error(f"damaged: string {len(strings)} of {key!r} is not UTF-8") from None
        self.position = position
        return strings
