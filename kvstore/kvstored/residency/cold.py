"""The keys of blocks that were taken over in bulk and that nothing has changed since: cold rows.

A dictionary entry with its key and its number takes some 150 bytes. A cold row's key lies in one byte string beside all
others, and is found by open addressing over row numbers: 24 bytes a block, three times the time of a dictionary. What
changes a cold row wakes it first: its key moves to the tenant's dictionary, and all else is as if it had always been
there.

Owns the table of one tenant. Entries are never taken out: a row that is awake, or gone, or another block's is no longer
cold, and the table looks at that. The hash is multiply-shift under a random odd multiplier, over key bytes that are
themselves a digest; a tenant who forges keys makes its own lookups slower, nobody else's.
"""

from __future__ import annotations

import secrets
from array import array
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore_proto.identity import KEY_BYTES
from kvstored.residency.rows import Rows

_FILL_BITS = 1  # twice as many places as keys, or up to four times
_WORD_BITS = 32
_WORD_MASK = (1 << _WORD_BITS) - 1
_HEADS_A_KEY = KEY_BYTES * 8 // _WORD_BITS
_NOTHING = -1

Column = npt.NDArray[Any]


class ColdKeys:
    """The cold rows `members` of one tenant, to be found by key."""

    __slots__ = ("_multiplier", "_places", "_rows", "_shift", "_table")

    def __init__(self, rows: Rows, members: Column) -> None:
        self._rows = rows
        bits = max(1, len(members).bit_length() + _FILL_BITS)
        self._multiplier = secrets.randbits(_WORD_BITS) | 1
        self._shift = _WORD_BITS - min(bits, _WORD_BITS)
        self._table = self._filled(members)
        self._places = np.frombuffer(self._table, np.int32)

    def members(self) -> Column:
        """The rows that have a place here."""
        found: Column = self._places[self._places != _NOTHING]
        return found

    def get(self, key: bytes) -> int:
        """The cold row of `key`, or -1."""
        rows, table = self._rows, self._table
        keys, mask, awake = rows.cold_keys, rows.mask, rows.keys
        place = (int.from_bytes(key[:4], "little") * self._multiplier & _WORD_MASK) >> self._shift
        while (row := table[place]) >= 0:
            if keys[row << 4 : (row << 4) + KEY_BYTES] == key and mask[row] and awake[row] is None:
                return row
            place += 1
        return -1

    def has_place(self, key: bytes, row: int) -> bool:
        """Whether `row` would be found under `key` if it were cold."""
        keys, table = self._rows.cold_keys, self._table
        if keys[row << 4 : (row << 4) + KEY_BYTES] != key:
            return False
        place = (int.from_bytes(key[:4], "little") * self._multiplier & _WORD_MASK) >> self._shift
        while (there := table[place]) >= 0:
            if there == row:
                return True
            place += 1
        return False

    def find_run(self, keys: Sequence[bytes], hot: Callable[[bytes], int | None]) -> list[int]:
        """Rows of the leading run of `keys` that are `hot` or cold: `get`, without a call for each."""
        rows, table = self._rows, self._table
        cold_keys, mask, awake = rows.cold_keys, rows.mask, rows.keys
        heads = np.frombuffer(b"".join(keys), "<u4")[::_HEADS_A_KEY] * np.uint32(self._multiplier)
        found: list[int] = []
        for key, home in zip(keys, (heads >> np.uint32(self._shift)).tolist(), strict=True):
            at = hot(key)
            row = -1 if at is None else at
            if at is None:
                place = home
                while (row := table[place]) >= 0:
                    if cold_keys[row << 4 : (row << 4) + KEY_BYTES] == key and mask[row] and awake[row] is None:
                        break
                    place += 1
                if row < 0:
                    break
            found.append(row)
        return found

    def find_each(self, keys: Column) -> Column:
        """The cold row, or -1, of each of `keys` (shape (n, 2), little-endian words)."""
        mask, awake = self._rows.mask, self._rows.keys
        ours = np.frombuffer(self._rows.cold_keys, "<u8").reshape(-1, 2)
        found = np.full(len(keys), _NOTHING, np.int32)
        left, places = np.arange(len(keys)), self._homes(keys)
        while len(left):
            there = self._places[places]
            here = there != _NOTHING
            left, places, there = left[here], places[here], there[here]
            equal = (ours[there] == keys[left]).all(axis=1)
            equal[equal] = [bool(mask[row]) and awake[row] is None for row in there[equal].tolist()]
            found[left[equal]] = there[equal]
            left, places = left[~equal], places[~equal] + 1
        return found

    def _homes(self, keys: Column) -> Column:
        """Where each key's search begins."""
        words = (keys[:, 0] & np.uint64(_WORD_MASK)).astype(np.uint32)
        words *= np.uint32(self._multiplier)
        return (words >> np.uint32(self._shift)).astype(np.int64)

    def _filled(self, members: Column) -> array[int]:
        """Linear probing without probing: in the order of their homes, each goes behind the one before, or to its home
        if that is later. The table ends with an empty place, so no search wraps.
        """
        keys = np.frombuffer(self._rows.cold_keys, "<u8").reshape(-1, 2)[members]
        homes = self._homes(keys)
        count = len(homes)
        position_bits = max(1, count.bit_length())
        ordered = np.sort(homes << position_bits | np.arange(count))
        order = ordered & (1 << position_bits) - 1
        ordered >>= position_bits
        ordered -= np.arange(count)
        places = np.maximum.accumulate(ordered) + np.arange(count)
        length = max(1 << _WORD_BITS - self._shift, int(places[-1]) + 1 if count else 0) + 1
        table = np.full(length, _NOTHING, np.int32)
        table[places] = members[order]
        return array("i", table.tobytes())
