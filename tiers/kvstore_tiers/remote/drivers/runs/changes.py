"""A change of the index as bytes: what the objects `log/…` and `checkpoints/…` hold.

    magic (8) · names dropped: count (4) · runs added: count (4) · dropped names (24 each)
    for each run: identity (16) · rows: count (4) · rows (37 each: name, offset, length, is it live)
    XXH3-128 of all before (16)

Numbers are little-endian. A checkpoint is a change too: it adds every run and drops nothing. Dead rows are kept, so
that an order to remove a value finds the bytes of all its copies. Never knows a store.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import xxhash

NAME_BYTES: Final = 24
RUN_ID_BYTES: Final = 16
MOST_ROWS: Final = 1 << 20  # of a run
ROW: Final = np.dtype([("name", f"V{NAME_BYTES}"), ("offset", "<u8"), ("length", "<u4"), ("live", "u1")])
_MAGIC: Final = b"KVRUNS1\n"
_COUNTS: Final = struct.Struct("<II")
_COUNT: Final = struct.Struct("<I")
_DIGEST_BYTES: Final = 16

Rows = npt.NDArray[Any]  # of ROW


class DamagedChange(ValueError):
    pass


@dataclass(frozen=True)
class AddedRun:
    """`run_id` in hexadecimal digits."""

    run_id: str
    rows: Rows


@dataclass(frozen=True)
class Change:
    """First the dropped names lose their values, then the live rows of the added runs get theirs."""

    dropped: Sequence[bytes] = ()
    added: Sequence[AddedRun] = field(default_factory=tuple)

    def pack(self) -> bytes:
        parts = [_MAGIC, _COUNTS.pack(len(self.dropped), len(self.added)), *self.dropped]
        for run in self.added:
            parts += [bytes.fromhex(run.run_id), _COUNT.pack(len(run.rows)), run.rows.tobytes()]
        body = b"".join(parts)
        return body + xxhash.xxh3_128_digest(body)

    @classmethod
    def unpack(cls, raw: bytes) -> Change:
        """Raises DamagedChange for bytes that are no whole change."""
        body, digest = raw[:-_DIGEST_BYTES], raw[-_DIGEST_BYTES:]
        if not body.startswith(_MAGIC):
            raise DamagedChange("no change of the index, or of an unknown version")
        if xxhash.xxh3_128_digest(body) != digest:
            raise DamagedChange("the checksum differs")
        try:
            return cls._parsed(body)
        except (struct.error, ValueError) as error:
            raise DamagedChange(str(error)) from error

    @classmethod
    def _parsed(cls, body: bytes) -> Change:
        at = len(_MAGIC)
        dropped_count, run_count = _COUNTS.unpack_from(body, at)
        at += _COUNTS.size
        if at + dropped_count * NAME_BYTES > len(body):
            raise DamagedChange("fewer names than it says")
        dropped = [body[at + i * NAME_BYTES : at + (i + 1) * NAME_BYTES] for i in range(dropped_count)]
        at += dropped_count * NAME_BYTES
        added: list[AddedRun] = []
        for _ in range(run_count):
            run_id = body[at : at + RUN_ID_BYTES].hex()
            (row_count,) = _COUNT.unpack_from(body, at + RUN_ID_BYTES)
            at += RUN_ID_BYTES + _COUNT.size
            if row_count > MOST_ROWS:
                raise DamagedChange("a run of too many rows")
            rows = np.frombuffer(body, ROW, count=row_count, offset=at).copy()  # ValueError where it is too short
            at += rows.nbytes
            added.append(AddedRun(run_id, rows))
        if at != len(body):
            raise DamagedChange("bytes after its end")
        return cls(dropped, added)


def rows_of(names: Sequence[bytes], lengths: Sequence[int]) -> Rows:
    """Live rows of values that are one behind the other."""
    rows = np.zeros(len(names), ROW)
    rows["name"] = np.frombuffer(b"".join(names), f"V{NAME_BYTES}")
    rows["length"] = lengths
    rows["offset"] = np.cumsum([0, *lengths])[:-1]
    rows["live"] = 1
    return rows
