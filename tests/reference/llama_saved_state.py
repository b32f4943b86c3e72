"""Saved states in llama.cpp's format, as another reading of it than the hook's: written row by row, in plain Python."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_F16 = 1  # ggml's number
_ELEMENT_BYTES = 2


@dataclass(frozen=True)
class SavedLayers:
    """K has 6 elements a token, V 4."""

    layers: int
    transposed: bool = False
    has_values: bool = True
    architecture: bytes = b"llama"


def row(seed: int, layer: int, kind: int, token: int, elements: int) -> bytes:
    """Return the state of `token` in one layer: 0 for K, 1 for V."""
    return np.random.default_rng([seed, layer, kind, token]).bytes(elements * _ELEMENT_BYTES)


def saved_state(form: SavedLayers, tokens: int, seed: int, cells: Sequence[int] = ()) -> bytes:
    """Return the state of `tokens` tokens, or of the positions `cells`, in this order."""
    cells = cells or range(tokens)
    data = struct.pack("<I", len(form.architecture)) + form.architecture
    data += struct.pack("<II", 1, len(cells))
    for token in cells:
        data += struct.pack("<iIi", token, 1, 0)
    data += struct.pack("<II", form.transposed, form.layers)
    for layer in range(form.layers):
        data += struct.pack("<iQ", _F16, 6 * _ELEMENT_BYTES)
        data += b"".join(row(seed, layer, 0, token, 6) for token in cells)
    if not form.has_values:
        return data
    for layer in range(form.layers):
        rows = [row(seed, layer, 1, token, 4) for token in cells]
        if form.transposed:
            data += struct.pack("<iII", _F16, _ELEMENT_BYTES, 4)
            data += b"".join(r[2 * element : 2 * element + 2] for element in range(4) for r in rows)
        else:
            data += struct.pack("<iQ", _F16, 4 * _ELEMENT_BYTES) + b"".join(rows)
    return data
