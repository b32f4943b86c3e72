"""Values for arrays: the module packs the pieces of what policies and the predictor learned, and reads them again.

The key of a piece is the name of its table and the number of the piece, so a piece that has not changed costs no write.
A contents entry, written in the same transaction, names all pieces: a table that misses a piece is left out as a whole.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from io import BytesIO
from typing import Any

import numpy as np
from numpy.lib import format as npy

from kvstore_predictor.base import Array

PIECE = struct.Struct(">I")  # ends a key: the number of the piece
CONTENTS = b":contents"
FORMAT = 3  # of the tables
Entry = tuple[bytes, bytes]


def packed(piece: Array) -> bytes:
    file = BytesIO()
    npy.write_array(file, np.ascontiguousarray(piece), version=(1, 0), allow_pickle=False)
    return file.getvalue()


def unpacked(value: bytes) -> Array:
    """Return the array in `value`, as `packed` made it. Raises nearly any exception for other bytes."""
    found: Array = npy.read_array(BytesIO(value), allow_pickle=False)
    return found


class Contents:
    """A list of the pieces of tables that are being saved. It is saved after them, and a reader sees by it whether a
    table is complete."""

    def __init__(self) -> None:
        self._pieces: dict[str, int] = {}
        self.keys: list[bytes] = []
        self.nbytes = 0

    def add(self, name: str, value: bytes) -> Entry:
        """Return the database entry for `value`, the next piece of the table `name`, and note the piece in this
        list."""
        number = self._pieces.get(name, 0)
        self._pieces[name] = number + 1
        key = name.encode() + PIECE.pack(number)
        self.keys.append(key)
        self.nbytes += len(value)
        return key, value

    def end(self) -> Entry:
        """Return the database entry that lists all pieces noted so far."""
        key = CONTENTS + PIECE.pack(0)
        self.keys.append(key)
        names = np.frombuffer(json.dumps({"format": FORMAT, "pieces": self._pieces}).encode(), np.uint8)
        return key, packed(names)


def tables_in(entries: Sequence[Entry]) -> dict[str, Array]:
    """Return the saved tables in `entries`, by name, that have all of their pieces. Return none when the list of pieces
    is missing. Raises ValueError for tables of another format."""
    found = dict(entries)
    raw = found.get(CONTENTS + PIECE.pack(0))
    if raw is None:
        return {}
    try:
        contents: dict[str, Any] = json.loads(unpacked(raw).tobytes())
        version, pieces = contents["format"], contents["pieces"].items()
    except Exception as error:
        raise ValueError(f"its contents cannot be read: {error}") from None
    if version != FORMAT:
        raise ValueError(f"format {version}")
    tables = {}
    for name, count in pieces:
        values = [found.get(name.encode() + PIECE.pack(number)) for number in range(count)]
        if None not in values:
            arrays = [unpacked(value) for value in values if value is not None]
            tables[name] = np.concatenate(arrays) if len(arrays) > 1 else arrays[0]
    return tables
