"""Entries of the saved state in a form for people, for `kvctl state show` and `kvstored inspect`."""

from __future__ import annotations

import json
from collections.abc import Callable

from kvstored.state.databases import SLOT
from kvstored.state.tables import PIECE, unpacked
from kvstored.store.blocks.usage import described

Shown = dict[str, object]


def shown(database: str, key: bytes, value: bytes) -> Shown:
    """Return an entry of `database` as fields that JSON can express. An entry in an unknown form gives its key in
    hexadecimal and the error.
    """
    try:
        return _FORMS.get(database, _as_text)(key, value)
    except Exception as error:  # bytes that mean nothing raise nearly any
        return {"key": key.hex(), "wrong": f"{type(error).__name__}: {error}"}


def _as_text(key: bytes, value: bytes) -> Shown:
    return {"key": _printable(key), "value": _printable(value)}


def _printable(raw: bytes) -> str:
    text = raw.decode(errors="replace")
    return text if text.isprintable() else raw.hex()


def _as_json(key: bytes, value: bytes) -> Shown:
    found: Shown = json.loads(value)
    return {"key": _printable(key), **found}


def _piece(key: bytes, value: bytes) -> Shown:
    piece = unpacked(value)
    (number,) = PIECE.unpack(key[-PIECE.size :])
    return {"table": key[: -PIECE.size].decode(), "piece": number, "rows": len(piece), "bytes": piece.nbytes}


def _name(key: bytes, value: bytes) -> Shown:
    kind, _, name = key.partition(b":")
    if not value:
        return {kind.decode(): name.decode()}
    return {kind.decode(): name.hex(), "named": json.loads(value)}


def _quarantined(key: bytes, value: bytes) -> Shown:
    names = ("slab", "offset", "bytes", "generation")
    return {**dict(zip(names, SLOT.unpack(key), strict=True)), "reason": value.decode(errors="replace")}


_FORMS: dict[str, Callable[[bytes, bytes], Shown]] = {
    "usage": described, "usage-memory": described, "learned": _piece, "names": _name, "quarantine": _quarantined,
    "endurance": _as_json, "scrub": _as_json,
}  # fmt: skip
